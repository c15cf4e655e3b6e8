"""Fit, evaluate and predict of an adopted model, for both of Keras' backends."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import keras
from keras import ops
from keras.src.backend import get_keras_mask  # JAX's arrays have no attribute for it under jit

from mpidist.keras.global_batches import GlobalBatches, global_batches, rows_of, split
from mpidist.keras.rank_callbacks import callbacks_of_rank
from mpidist.keras.rank_sums import RankSums
from mpidist.strategies import Strategy
from mpidist.values.placement import checksum

if TYPE_CHECKING:
    from jax import Array
    from torch import Tensor

    Values = Sequence[Tensor | Array]


class Adoption:
    """An adopted model's ties to its strategy."""

    def __init__(self, strategy: Strategy, optimizer_class: type) -> None:
        self.strategy = strategy
        self.optimizer_class = optimizer_class
        self.sums = RankSums(strategy)
        # This rank's rows of the current batch.
        self.rows = 0
        # Whether to multiply losses by them, and not gradients: only in a step of Keras' own.
        self.may_weigh_losses = self.weighs_losses = False
        # Whether metrics and optimizer have their variables.
        self.is_built = False
        self.statistics: list[keras.Variable] = []
        # The weights and the values of the optimizer after the last step, with the numbers of their changes.
        self._noted: list[tuple[Tensor | Array, int]] = []

    def note(self, values: Values) -> None:
        """Record the weights and the values of the optimizer after a step."""
        self._noted = [(value, _changes_of(value)) for value in values]

    def report_changes(self, values: Values) -> None:
        """Let the ranks compare values that changed since the last step."""
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
        """The factor for the gradients of this step."""
        return 1 if self.weighs_losses else self.rows

    @contextmanager
    def step(self) -> Iterator[None]:
        """Multiply losses by rows in the block, a step of training."""
        self.weighs_losses = self.may_weigh_losses
        try:
            yield
        finally:
            self.weighs_losses = False


def _changes_of(value: Tensor | Array) -> int:
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


def subclassed(value: object, mixin: type, adoption: Adoption) -> None:
    """Change the class of an object to a subclass of ``mixin`` and its class.

    ``value.__class__`` is still the old class, so that Keras saves files of that class.
    """
    given = value.__class__
    names = {"__module__": given.__module__, "__qualname__": given.__qualname__}
    kind = type(given.__name__, (mixin, given), {**names, "__class__": property(lambda _: given)})
    object.__setattr__(value, "__class__", kind)
    object.__setattr__(value, "_mpidist", adoption)


class ReplicaOptimizer(keras.optimizers.Optimizer):
    """An optimizer that applies the gradients of all rows."""

    _mpidist: Adoption

    def scale_loss(self, loss: Tensor | Array) -> Tensor | Array:
        """See Keras. Multiplies by this rank's rows, which costs less than multiplying gradients."""
        scaled, adoption = super().scale_loss(loss), self._mpidist
        return scaled * adoption.rows if adoption.weighs_losses else scaled


class ReplicaModel(keras.Model):
    """A model that is equal on all ranks, each of which computes with its rows."""

    _mpidist: Adoption

    def require_strategy(self, strategy: object) -> None:
        """Raise ValueError if ``strategy`` is not the model's."""
        if self._mpidist.strategy is not strategy:
            raise ValueError(f"the model {self.name!r} belongs to another {type(self._mpidist.strategy).__name__}")

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "optimizer":
            self._adopt_optimizer()

    def compile(self, *args: object, **kwargs: object) -> None:
        """See Keras. Losses that are not means over rows raise ValueError."""
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
        self._mpidist.is_built = False
        if self.optimizer is not None and not isinstance(self.optimizer, self._mpidist.optimizer_class):
            subclassed(self.optimizer, self._mpidist.optimizer_class, self._mpidist)

    def fit(
        self,
        x: object = None,
        y: object = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: object = "auto",
        callbacks: object = None,
        validation_split: float = 0.0,
        validation_data: object = None,
        shuffle: bool | str = True,
        class_weight: object = None,
        sample_weight: object = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: object = 1,
    ) -> keras.callbacks.History:
        """Train as Keras does (collective: call it on every rank).

        ``batch_size`` and the batches of datasets are those of all ranks together.
        """
        strategy, sums = self._mpidist.strategy, self._mpidist.sums
        with strategy.extended.shared_errors("fit()"):
            if validation_split and validation_data is None:
                (x, y, sample_weight), validation_data = split((x, y, sample_weight), validation_split)
            # As for Keras' own generators, keras.utils.set_random_seed() determines it.
            seed = sums.of_first(random.randint(1, 10**9)) if shuffle and shuffle != "batch" else None
            batches = global_batches(strategy, x, y, sample_weight, batch_size, steps_per_epoch, seed=seed)
            batches.starts_again = steps_per_epoch is not None
            tested = None
            if validation_data is not None:
                values = validation_data if isinstance(validation_data, (list, tuple)) else (validation_data,)
                x, y, sample_weight = [*values, None, None][:3]
                size = validation_batch_size or batch_size
                tested = global_batches(strategy, x, y, sample_weight, size, validation_steps)
            is_compared = sums.are_needed and self.optimizer is not None
            settings = _shared_settings(self.optimizer.get_config()) if is_compared else {}
            optimizer = f"{type(self.optimizer).__name__}({settings})"
            self._agree("fit()", batches, tested, epochs=epochs, initial_epoch=initial_epoch, optimizer=optimizer)
            self._build_by(batches)
            return super().fit(
                batches,
                **self._shown(batches, verbose, callbacks),
                epochs=epochs,
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
        x: object = None,
        y: object = None,
        batch_size: int | None = None,
        verbose: object = "auto",
        sample_weight: object = None,
        steps: int | None = None,
        callbacks: object = None,
        return_dict: bool = False,
        **kwargs: object,
    ) -> object:
        """Evaluate as Keras does (collective: call it on every rank)."""
        kwargs.update(steps=steps, return_dict=return_dict)
        if isinstance(x, GlobalBatches):  # within fit()
            return super().evaluate(x, verbose=verbose, callbacks=callbacks, **kwargs)
        with self._mpidist.strategy.extended.shared_errors("evaluate()"):
            batches = global_batches(self._mpidist.strategy, x, y, sample_weight, batch_size, steps)
            self._agree("evaluate()", batches)
            self._build_by(batches)
            return super().evaluate(batches, **self._shown(batches, verbose, callbacks), **kwargs)

    def predict(
        self,
        x: object,
        batch_size: int | None = None,
        verbose: object = "auto",
        steps: int | None = None,
        callbacks: object = None,
    ) -> object:
        """Return the predictions for all rows, in order, on every rank (collective)."""
        with self._mpidist.strategy.extended.shared_errors("predict()"):
            batches = global_batches(self._mpidist.strategy, x, None, None, batch_size, steps, fills=True)
            self._agree("predict()", batches)
            outputs = super().predict(batches, **self._shown(batches, verbose, callbacks), steps=steps)
            return batches.predictions(outputs)

    def train_on_batch(self, *args: object, **kwargs: object) -> object:
        """Raise NotImplementedError on several ranks: one step is one batch of ``fit``."""
        self._require_one_rank("train_on_batch()", "fit")
        return super().train_on_batch(*args, **kwargs)

    def test_on_batch(self, *args: object, **kwargs: object) -> object:
        """Raise NotImplementedError on several ranks: one step is one batch of ``evaluate``."""
        self._require_one_rank("test_on_batch()", "evaluate")
        return super().test_on_batch(*args, **kwargs)

    def _require_one_rank(self, method: str, other: str) -> None:
        if self._mpidist.sums.are_needed:
            raise NotImplementedError(
                f"{method} is not supported by a strategy with several ranks. Call {other}() with a "
                "keras.utils.PyDataset of the global batches"
            )

    def compute_loss(self, *args: object, **kwargs: object) -> Tensor | Array | None:
        """Return the loss of this rank's rows; see Keras."""
        y_pred = args[2] if len(args) > 2 else kwargs.get("y_pred")
        has_mask = any(get_keras_mask(output) is not None for output in keras.tree.flatten(y_pred))
        if has_mask and self._mpidist.sums.are_needed:
            raise ValueError(
                "an output has a mask. Masked outputs are not supported on several ranks, because Keras averages the "
                "loss over unmasked elements. Use sample_weight instead of Masking or mask_zero=True."
            )
        return super().compute_loss(*args, **kwargs)

    def begin_step(self, data: object, name: str) -> bool:
        """Record this rank's rows, and return whether it has any.

        Raise ValueError if not and the user has written the step ``name``, which needs rows.
        """
        self._mpidist.rows = rows_of(data)
        if self._mpidist.rows > 0 or not self._mpidist.sums.are_needed:
            return True
        if not self._has_step_of_keras(name):
            raise ValueError(
                f"the last global batch has fewer rows than there are replicas, and a {name}() of one's own has to "
                "have some on each; expected another batch_size, or data without those rows"
            )
        return False

    def _has_step_of_keras(self, name: str) -> bool:
        return getattr(self.__class__, name) is getattr(keras.Model, name)

    def _get_metrics_result_or_logs(self, logs: object) -> object:
        # Keras calls it after the last batch of an epoch or an evaluation.
        self._mpidist.sums.total(self.metrics_variables)
        found = super()._get_metrics_result_or_logs(logs)
        if found is logs and isinstance(logs, dict):
            return self._mpidist.sums.mean_of_logs(logs, self._mpidist.rows)
        return found

    def _agree(self, method: str, *batches: GlobalBatches | None, **values: object) -> None:
        """Compare data and arguments between ranks."""

        def text() -> str:
            texts = [given.text() for given in batches if given is not None]
            texts += [f"{name}={value}" for name, value in values.items()]
            return f"{method} of a Keras model, {', '.join(texts)}"

        self._mpidist.strategy.extended.agree_on(text)

    def _build_by(self, batches: GlobalBatches) -> None:
        # Keras would build by this rank's rows of the first batch, which may be empty.
        if self._mpidist.sums.are_needed and self.compiled and not self._mpidist.is_built:
            batches.fills = True
            self._symbolic_build(data_batch=batches[0])
            batches.fills = False
            self._mpidist.is_built = True
            # It may be compiled for another optimizer.
            self.train_function: Callable[..., object] | None = None

    def _shown(self, batches: GlobalBatches, verbose: object, callbacks: object) -> dict[str, object]:
        """Return the arguments for output and callbacks of this rank."""
        shown = verbose if self._mpidist.sums.rank == 0 else 0
        return {"verbose": shown, "callbacks": callbacks_of_rank(callbacks, self._align, batches)}

    def _align(self) -> None:
        """Copy the state of the first rank to all ranks (collective)."""
        sums, layers = self._mpidist.sums, self._flatten_layers()
        # The variables that layers change as they compute, such as those of BatchNormalization.
        frozen = {id(variable) for layer in layers if not layer.trainable for variable in layer.variables}
        self._mpidist.statistics = [
            variable
            for variable in self.non_trainable_variables
            if keras.backend.is_float_dtype(variable.dtype) and id(variable) not in frozen
        ]
        # A step of the user's may read gradients, or keep a compiled function. float16 overflows by the products.
        self._mpidist.may_weigh_losses = (
            sums.are_needed
            and self._has_step_of_keras("train_step")
            and not any(layer.compute_dtype == "float16" for layer in layers)
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
