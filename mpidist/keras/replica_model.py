"""Fit, evaluate and predict of an adopted model, the same for both of Keras' backends."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import keras
from keras import ops
from keras.src.backend import get_keras_mask  # under jit JAX's arrays take no attribute

from mpidist.keras.global_batches import GlobalBatches, global_batches, rows_of, split
from mpidist.keras.rank_callbacks import callbacks_of_rank
from mpidist.keras.rank_sums import RankSums
from mpidist.keras.untyped import KerasObject, Tensors
from mpidist.strategies import Strategy
from mpidist.values.placement import checksum


class Adoption:
    """An adopted model's ties to its strategy."""

    def __init__(self, strategy: Strategy, optimizer_class: type) -> None:
        self.strategy = strategy
        self.optimizer_class = optimizer_class
        self.sums = RankSums(strategy)
        # Of this rank, in the present step.
        self.rows = 0
        # Whether losses are multiplied by them, and not gradients: never, unless in a step of Keras.
        self.may_weigh_losses = self.weighs_losses = False
        # Whether metrics and optimizer have their variables.
        self.is_built = False
        self.statistics: list[KerasObject] = []
        # The weights and the values of the optimizer, with counts of their changes, as the last step has left them.
        self._noted: list[tuple[Tensors, int]] = []

    def note(self, values: Sequence[Tensors]) -> None:
        """Remember the weights and the values of the optimizer after a step."""
        self._noted = [(value, _changes_of(value)) for value in values]

    def report_changes(self, values: Sequence[Tensors]) -> None:
        """Compare values that changed since the last step between ranks."""
        if len(values) == len(self._noted):
            pairs = zip(values, self._noted, strict=True)
            values = [value for value, (old, count) in pairs if value is not old or _changes_of(value) != count]
        if values:
            self.strategy.extended.done(
                "Keras model",
                f"{len(values)} weights or values of the optimizer of a Keras model were changed between two steps, as "
                "by a callback (change them alike on every rank)",
                lambda: zlib.crc32(str([checksum(ops.convert_to_numpy(value)) for value in values]).encode()),
            )

    @property
    def factor(self) -> int:
        """Return by what the gradients of the present step are to be multiplied."""
        return 1 if self.weighs_losses else self.rows

    @contextmanager
    def step(self) -> Iterator[None]:
        """Have losses weighed in the block, a step of training."""
        self.weighs_losses = self.may_weigh_losses
        try:
            yield
        finally:
            self.weighs_losses = False

    @contextmanager
    def shared(self, method: str) -> Iterator[None]:
        """Tell the other ranks of an error of the block."""
        try:
            yield
        except Exception as error:
            self.strategy.extended.announce(error, method)
            raise


def _changes_of(value: Tensors) -> int:
    """Return how often PyTorch has changed a tensor. Arrays of JAX do not change."""
    count: int = getattr(value, "_version", 0)
    return count


def _shared_settings(config: dict[str, object]) -> dict[str, object]:
    """Return settings without names and learning rates, which may differ between ranks."""
    return {
        name: _shared_settings(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in ("name", "learning_rate")
    }


def subclassed(value: KerasObject, mixin: type, adoption: Adoption) -> None:
    """Make an object one of a subclass of its class, which is ``mixin`` too.

    It still names its old class (``value.__class__``), so that files in which Keras saves it are those of that class.
    """
    given = value.__class__
    names = {"__module__": given.__module__, "__qualname__": given.__qualname__}
    kind = type(given.__name__, (mixin, given), {**names, "__class__": property(lambda _: given)})
    object.__setattr__(value, "__class__", kind)
    object.__setattr__(value, "_mpidist", adoption)


class ReplicaOptimizer(keras.optimizers.Optimizer):
    """An optimizer that takes the gradients of all rows."""

    _mpidist: Adoption

    def scale_loss(self, loss: Tensors) -> Tensors:
        """See Keras: times the rows of this rank, which costs less than gradients times them."""
        scaled, adoption = super().scale_loss(loss), self._mpidist
        return scaled * adoption.rows if adoption.weighs_losses else scaled


class ReplicaModel(keras.Model):
    """A model that is equal on all ranks, each of which computes with its rows."""

    _mpidist: Adoption

    def require_strategy(self, strategy: object) -> None:
        """Raise ValueError if ``strategy`` is not the model's."""
        if self._mpidist.strategy is not strategy:
            raise ValueError(f"the model {self.name!r} belongs to another {type(self._mpidist.strategy).__name__}")

    def __setattr__(self, name: str, value: KerasObject) -> None:
        super().__setattr__(name, value)
        if name == "optimizer":
            self._adopt_optimizer()

    def compile(self, *args: object, **kwargs: object) -> None:
        """See Keras.

        Raises:
            ValueError: Losses that are not means over rows, which means over ranks cannot be made of.
        """
        super().compile(*args, **kwargs)
        self.adopt_compiled()

    def adopt_compiled(self) -> None:
        """Adopt the optimizer that the model was compiled with."""
        for loss in keras.tree.flatten(self.loss):
            reduction = getattr(loss, "reduction", "sum_over_batch_size")
            if reduction not in ("sum_over_batch_size", "mean") and self._mpidist.sums.are_needed:
                raise ValueError(
                    f"{type(loss).__name__}(reduction={reduction!r}): the ranks average their losses by their rows; "
                    "expected reduction='sum_over_batch_size'"
                )
        self._adopt_optimizer()

    def _adopt_optimizer(self) -> None:
        """Have the optimizer, which may be a new one, apply the gradients of all ranks."""
        self._mpidist.is_built = False
        if self.optimizer is not None and not isinstance(self.optimizer, self._mpidist.optimizer_class):
            subclassed(self.optimizer, self._mpidist.optimizer_class, self._mpidist)

    def fit(
        self,
        x: Tensors = None,
        y: Tensors = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: object = "auto",
        callbacks: KerasObject = None,
        validation_split: float = 0.0,
        validation_data: Tensors = None,
        shuffle: bool | str = True,
        class_weight: KerasObject = None,
        sample_weight: Tensors = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: object = 1,
    ) -> KerasObject:
        """Train as Keras does (collective: call it on every rank).

        ``batch_size`` and the batches of datasets are those of all ranks together.
        """
        with self._mpidist.shared("fit()"):
            if validation_split and validation_data is None:
                (x, y, sample_weight), validation_data = split((x, y, sample_weight), validation_split)
            strategy = self._mpidist.strategy
            # As Keras' own generators draw theirs: keras.utils.set_random_seed() decides it.
            seed = self._mpidist.sums.of_first(random.randint(1, 10**9)) if shuffle and shuffle != "batch" else None
            batches = global_batches(strategy, x, y, sample_weight, batch_size, steps_per_epoch, seed=seed)
            batches.begins_again = steps_per_epoch is not None
            tested = None
            if validation_data is not None:
                values = validation_data if isinstance(validation_data, (list, tuple)) else (validation_data,)
                x, y, sample_weight = [*values, None, None][:3]
                size = validation_batch_size or batch_size
                tested = global_batches(strategy, x, y, sample_weight, size, validation_steps)
            self._agree(
                "fit()", batches, tested, epochs=epochs, initial_epoch=initial_epoch, optimizer=self._settings()
            )
            self._build_by(batches)
            return super().fit(
                batches,
                epochs=epochs,
                verbose=self._shown(verbose),
                callbacks=self._callbacks(callbacks, batches),
                validation_data=tested,
                shuffle=False,
                class_weight=class_weight,
                initial_epoch=initial_epoch,
                steps_per_epoch=steps_per_epoch,
                validation_steps=validation_steps,
                validation_freq=validation_freq,
            )

    def evaluate(
        self,
        x: Tensors = None,
        y: Tensors = None,
        batch_size: int | None = None,
        verbose: object = "auto",
        sample_weight: Tensors = None,
        steps: int | None = None,
        callbacks: KerasObject = None,
        return_dict: bool = False,
        **kwargs: object,
    ) -> KerasObject:
        """Evaluate as Keras does (collective: call it on every rank)."""
        if isinstance(x, GlobalBatches):  # within fit()
            return super().evaluate(
                x, verbose=verbose, steps=steps, callbacks=callbacks, return_dict=return_dict, **kwargs
            )
        with self._mpidist.shared("evaluate()"):
            batches = global_batches(self._mpidist.strategy, x, y, sample_weight, batch_size, steps)
            self._agree("evaluate()", batches)
            self._build_by(batches)
            return super().evaluate(
                batches,
                verbose=self._shown(verbose),
                steps=steps,
                callbacks=self._callbacks(callbacks, batches),
                return_dict=return_dict,
                **kwargs,
            )

    def predict(
        self,
        x: Tensors,
        batch_size: int | None = None,
        verbose: object = "auto",
        steps: int | None = None,
        callbacks: KerasObject = None,
    ) -> KerasObject:
        """Return the predictions for all rows, in order, on every rank (collective)."""
        with self._mpidist.shared("predict()"):
            batches = global_batches(self._mpidist.strategy, x, None, None, batch_size, steps, fills=True)
            self._agree("predict()", batches)
            outputs = super().predict(
                batches,
                verbose=self._shown(verbose),
                steps=steps,
                callbacks=self._callbacks(callbacks, batches),
            )
            return batches.in_order(self._mpidist.sums.concatenate(batches.without_fillers(outputs)))

    def train_on_batch(self, x: Tensors, y: Tensors = None, *args: object, **kwargs: object) -> KerasObject:
        """Raise NotImplementedError on several ranks: one step is one batch of ``fit``."""
        if self._mpidist.sums.are_needed:
            raise NotImplementedError(_ONE_BATCH.format("train_on_batch()", "fit"))
        return super().train_on_batch(x, y, *args, **kwargs)

    def test_on_batch(self, x: Tensors, y: Tensors = None, *args: object, **kwargs: object) -> KerasObject:
        """Raise NotImplementedError on several ranks: one step is one batch of ``evaluate``."""
        if self._mpidist.sums.are_needed:
            raise NotImplementedError(_ONE_BATCH.format("test_on_batch()", "evaluate"))
        return super().test_on_batch(x, y, *args, **kwargs)

    def compute_loss(self, *args: object, **kwargs: object) -> KerasObject:
        """Return the loss of this rank's rows; see Keras."""
        y_pred = args[2] if len(args) > 2 else kwargs.get("y_pred")
        has_mask = any(get_keras_mask(output) is not None for output in keras.tree.flatten(y_pred))
        if has_mask and self._mpidist.sums.are_needed:
            raise ValueError(
                "an output has a mask, by whose elements Keras divides the loss: the mean over ranks by their rows is "
                "another one. Expected: sample_weight in place of Masking or mask_zero=True"
            )
        return super().compute_loss(*args, **kwargs)

    def begin_step(self, data: Tensors) -> bool:
        """Return whether this rank has rows in a step, and take down how many."""
        self._mpidist.rows = rows_of(data)
        return self._mpidist.rows > 0 or not self._mpidist.sums.are_needed

    def require_own_step(self, name: str) -> None:
        """Raise ValueError where the user has written a step, which cannot do without rows.

        Args:
            name: ``train_step`` or ``test_step``.
        """
        if not self._has_step_of_keras(name):
            raise ValueError(
                f"the last global batch has fewer rows than there are replicas, and a {name}() of one's own has to "
                "have some on each; expected another batch_size, or data without those rows"
            )

    def _has_step_of_keras(self, name: str) -> bool:
        return getattr(self.__class__, name) is getattr(keras.Model, name)

    def _get_metrics_result_or_logs(self, logs: KerasObject) -> KerasObject:
        # Called by Keras after the last batch of an epoch or an evaluation.
        self._mpidist.sums.total(self.metrics_variables)
        found = super()._get_metrics_result_or_logs(logs)
        is_of_step = found is logs and isinstance(logs, dict)
        return self._mpidist.sums.mean_of_logs(logs, self._mpidist.rows) if is_of_step else found

    def _settings(self) -> str:
        """Return the text of the optimizer's settings that must be the same on all ranks."""
        is_compared = self._mpidist.sums.are_needed and self.optimizer is not None
        settings = _shared_settings(self.optimizer.get_config()) if is_compared else {}
        return f"{type(self.optimizer).__name__}({settings})"

    def _agree(self, method: str, *batches: GlobalBatches | None, **values: object) -> None:
        texts = [given.text for given in batches if given is not None]
        texts += [f"{name}={value}" for name, value in values.items()]
        self._mpidist.strategy.extended.agree_on(lambda: f"{method} of a Keras model, {', '.join(texts)}")

    def _build_by(self, batches: GlobalBatches) -> None:
        # Keras would build by this rank's rows of the first batch, of which there may be none.
        if self._mpidist.sums.are_needed and self.compiled and not self._mpidist.is_built:
            batches.fills = True
            self._symbolic_build(data_batch=batches[0])
            batches.fills = False
            self._mpidist.is_built = True
            # It may be compiled for another optimizer.
            self.train_function: KerasObject = None

    def _shown(self, verbose: object) -> KerasObject:
        return verbose if self._mpidist.sums.rank == 0 else 0

    def _callbacks(self, callbacks: KerasObject, batches: GlobalBatches) -> list[KerasObject]:
        def begin_epoch(epoch: int) -> None:
            batches.epoch = epoch

        sums = self._mpidist.sums
        return callbacks_of_rank(callbacks, sums.rank, self._align, sums.any_of, begin_epoch)

    def _align(self) -> None:
        """Give all ranks the state of the first one (collective)."""
        sums = self._mpidist.sums
        self._mpidist.statistics = self._statistics()
        # A step of the user's may look at gradients, or keep their compiled function; float16 has no room for products.
        self._mpidist.may_weigh_losses = (
            sums.are_needed
            and self._has_step_of_keras("train_step")
            and not any(layer.compute_dtype == "float16" for layer in self._flatten_layers())
        )
        optimizer = getattr(self, "optimizer", None)
        others = [name for name, value in vars(self).items() if isinstance(value, keras.optimizers.Optimizer)]
        if sums.are_needed and set(others) - {"optimizer"}:
            raise ValueError(
                f"the model has optimizers in {others}, and the ranks average the gradients of model.optimizer alone; "
                "expected one model for each optimizer"
            )
        of_optimizer = [] if optimizer is None else optimizer.variables
        sums.make_equal([*self.variables, *of_optimizer])
        self._mpidist.note([variable.value for variable in (*self.trainable_variables, *of_optimizer)])
        self._initial_epoch: int | None = sums.of_first(self._initial_epoch)

    def _statistics(self) -> list[KerasObject]:
        """Return the variables that layers change as they compute, such as those of BatchNormalization."""
        frozen = {
            id(variable) for layer in self._flatten_layers() if not layer.trainable for variable in layer.variables
        }
        return [
            variable
            for variable in self.non_trainable_variables
            if keras.backend.is_float_dtype(variable.dtype) and id(variable) not in frozen
        ]


_ONE_BATCH = (
    "{} is not supported by a strategy with several ranks. Call {}() with a keras.utils.PyDataset of the global batches"
)
