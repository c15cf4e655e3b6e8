"""Optimizers of PyTorch under a strategy, which sum the gradients of all replicas."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, TypeAlias, cast

import torch

from mpidist.arrays.dtypes import Array
from mpidist.core.context import StrategyLike, get_replica_context, has_strategy, in_cross_replica_context
from mpidist.torch.buckets import BUCKET_BYTES, OwnGradients, SummedGradients, changes_of, count_optimizers
from mpidist.torch.modules import ReplicatedModule, SharedBuffers
from mpidist.torch.optimizer_state import OptimizerSettings, held_tensors, make_equal, parameters_of, settings_of, take
from mpidist.torch.step_checks import independent
from mpidist.torch.tensors import array_of
from mpidist.values.placement import checksum

if TYPE_CHECKING:
    from torch import Tensor

    from mpidist.strategies import ReplicaContext, Strategy

OptimizerOrFactory: TypeAlias = "Callable[..., torch.optim.Optimizer]"


class ReplicatedOptimizer(torch.optim.Optimizer):  # type: ignore[misc, unused-ignore]
    """An optimizer of ``torch.optim`` for an adopted module (collective to make).

    Inside ``strategy.run``, ``step`` is collective: call it on every replica. Gradients are *summed* over all replicas,
    so divide losses by the global batch size (``mpidist.compute_average_loss``). Sums are computed in buckets while
    ``backward`` runs, or in ``step`` if the strategy has several optimizers. A replica without rows contributes zeros,
    whether it calls ``backward`` or not. A parameter that no replica has used keeps ``grad`` None. After the step, the
    buffers of all replicas are those of the first.

    In ``run``, ``param_groups`` and ``state`` belong to the running replica. Outside of ``run`` they belong to the
    first replica, and the others use its settings. So you can use schedulers of ``torch.optim.lr_scheduler``: call
    their ``step`` outside of ``strategy.run``.

    Args:
        model: The module that ``mpidist.torch.adopt`` has returned.
        optimizer: A class of ``torch.optim``, called with all parameters; or a function of a
            module that returns an optimizer, for parameters in groups.
        bucket_bytes: About how many bytes of gradients are summed at once.
        settings: Keyword arguments of the class, such as ``lr=1e-3``.

    Raises:
        TypeError: A module that was not adopted, something that creates no optimizer, or LBFGS, whose steps call the
            model.
        ValueError: Parameters of another module, or none, or copies that differ in which parameters have gradients.
        MismatchError: Other modules on other ranks.
        RuntimeError: Called inside ``strategy.run``.

    >>> import mpidist, torch
    >>> strategy = mpidist.MirroredStrategy(["cpu:0", "cpu:1"], communicator=None)
    >>> with strategy.scope():
    ...     model = mpidist.torch.adopt(torch.nn.Linear(1, 1, bias=False))
    ...     optimizer = Optimizer(model, torch.optim.SGD, lr=1.0)
    >>> def step(x):
    ...     optimizer.zero_grad()
    ...     model(x).sum().backward()
    ...     optimizer.step()
    ...     return model.weight.grad.item()
    >>> strategy.run(step, args=(torch.ones(2, 1),))
    PerReplica:{0: 4.0, 1: 4.0}
    >>> strategy.close()
    """

    def __init__(
        self,
        model: ReplicatedModule,
        optimizer: OptimizerOrFactory,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        **settings: object,
    ) -> None:
        if has_strategy() and not in_cross_replica_context():
            raise RuntimeError(
                "mpidist.torch.Optimizer was made inside strategy.run(), where every step would start with new state. "
                "Create it once, before, inside `with strategy.scope():`."
            )
        if not isinstance(model, ReplicatedModule):
            raise TypeError(
                f"The model is a {type(model).__name__}. Adopt it first: model = mpidist.torch.adopt(model)"
            )
        is_alone = model.strategy.num_replicas_in_sync == 1
        if not is_alone:
            # Changes since adopt() may have reached only one rank or copy.
            model.make_equal_on_ranks("Optimizer()")
        self.inner = tuple(independent(_made(optimizer, module, settings)) for module in model.copies)
        first = self.inner[0]
        super().__init__([{**group, "params": list(group["params"])} for group in first.param_groups], first.defaults)
        self._model = model
        # The settings that each copy has copied from the first.
        self._copied = self._nothing_copied()
        # The settings that all ranks have, and how often torch has changed the parameters of each copy, as of the last
        # step. Whether step number n must compare the parameters, by n, and the number of each copy's step.
        self._agreed: list[dict[str, object]] | None = None
        self._changes: list[int | None] = [None for _ in self.inner]
        self._decisions: dict[int, bool] = {}
        self._steps = [0 for _ in self.inner]
        self._is_replaced = False
        self._gradients: tuple[SummedGradients, ...] = ()
        if is_alone:
            self._own_gradients = OwnGradients([each for each in parameters_of(first) if each.requires_grad])
        else:
            self._take_over(bucket_bytes)

    def _take_over(self, bucket_bytes: int) -> None:
        """Sum the gradients of the parameters. An earlier optimizer of theirs stops."""
        strategy, mine = self._model.strategy, set(parameters_of(self.inner[0]))
        for before in [other for other in self._model.optimizers if mine & set(parameters_of(other.inner[0]))]:
            before.detach()
            self._model.optimizers.remove(before)
        self._model.optimizers.append(self)
        self._frozen = [[each for each in parameters_of(inner) if not each.requires_grad] for inner in self.inner]
        self._gradients = tuple(
            SummedGradients(strategy, [each for each in parameters_of(inner) if each.requires_grad], bucket_bytes)
            for inner in self.inner
        )
        self._buffers = tuple(map(SharedBuffers, self._model.copies))
        count_optimizers(strategy, 1)

    # Steps ----------------------------------------------------------------------------------------------------------

    def step(self, closure: None = None) -> None:
        """Change the parameters by the sums of the gradients of all replicas (collective).

        Args:
            closure: Not supported.

        Raises:
            TypeError: A closure.
            RuntimeError: Called outside of ``strategy.run`` with several replicas, or gradients that were changed
                before they were summed.
            MismatchError: Settings, such as the learning rate, differ from those of another rank. Or parameters do
                that were changed since the last step.
            ValueError: Parameters of the copies on this rank differ.
        """
        if closure is not None:
            raise TypeError(
                "step() was given a closure. Replicas could call it differently often. Call loss.backward() before "
                "optimizer.step()."
            )
        if not self._gradients:
            self._own_gradients.check()
            self.inner[0].step()
            return
        context = self._replica("step()")
        number = context.local_replica_id
        gradients = self._gradients[number]
        if not gradients.are_summed:
            self.synchronize()
        inner = self._with_first_settings(number)
        self._agree(context, inner)
        inner.step()
        self._changes[number] = self._count_changes(number)
        gradients.are_summed = False

    def synchronize(self) -> None:
        """Wait until the gradients are the sums over all replicas (collective).

        ``step`` does so itself. Call it before, on every replica, to read or change the sums, as by
        ``torch.nn.utils.clip_grad_norm_``.
        """
        if not self._gradients:
            self._own_gradients.check()
            return
        context = self._replica("synchronize()")
        number = context.local_replica_id
        gradients, buffers = self._gradients[number], self._buffers[number]
        if any(parameter.grad is not None for parameter in self._frozen[number]):
            raise RuntimeError(
                "A parameter that took no gradients when the optimizer was made has one now. Call requires_grad_() "
                "before you create the optimizer."
            )
        gradients.start_all(context)
        buffers.start(context)
        gradients.finish()
        buffers.finish(context)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of this replica, or outside of ``run`` of all on this rank."""
        if not self._gradients:
            self._own_gradients.reset()
        for number in self._here():
            if self._gradients:
                self._gradients[number].reset()
            self.inner[number].zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients on their replicas in the block.

        For batches in several parts: all but the last inside of the block. They are added up, and summed over replicas
        with the last part's. Nothing is communicated.

        >>> import mpidist, torch
        >>> model = mpidist.torch.adopt(torch.nn.Linear(1, 1))
        >>> optimizer = Optimizer(model, torch.optim.SGD, lr=0.1)
        >>> with optimizer.no_sync():
        ...     model(torch.ones(1, 1)).sum().backward()
        """
        gradients = [self._gradients[number] for number in self._here() if self._gradients]
        before = [each.accumulates for each in gradients]
        for each in gradients:
            each.accumulates = True
        try:
            yield
        finally:
            for each, accumulates in zip(gradients, before, strict=True):
                each.accumulates = accumulates

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Raise NotImplementedError once the optimizer is created: all copies need the group."""
        if hasattr(self, "_model"):
            raise NotImplementedError(
                "add_param_group() would add parameters of one replica only. Pass all groups from the start: "
                "mpidist.torch.Optimizer(model, lambda module: torch.optim.SGD([{'params': ...}, {'params': ...}]))"
            )
        super().add_param_group(param_group)

    def detach(self) -> None:
        """Stop summing gradients: another optimizer has the parameters."""
        if self._gradients and not self._is_replaced:
            count_optimizers(self._model.strategy, -1)
        self._is_replaced = True
        for gradients in self._gradients:
            gradients.detach()

    @property
    def distribute_strategy(self) -> StrategyLike:
        """The strategy of the model's replicas."""
        strategy: StrategyLike = self._model.strategy
        return strategy

    def _here(self) -> range:
        """Return the local numbers of the replicas that a call is for."""
        context = get_replica_context()
        if context is None or context.strategy is not self._model.strategy:
            return range(len(self.inner))
        return range(context.local_replica_id, context.local_replica_id + 1)

    def _replica(self, method: str) -> ReplicaContext:
        context = get_replica_context()
        if self._is_replaced:
            raise RuntimeError(f"{method}: a later one has taken the optimizer's parameters. Use the later optimizer.")
        if context is None or context.strategy is not self._model.strategy:
            raise RuntimeError(
                f"{method} was called outside of strategy.run(). Call it in the function that you pass to "
                "strategy.run(), where the replicas have gradients to sum."
            )
        return cast("ReplicaContext", context)

    def _agree(self, context: ReplicaContext, inner: torch.optim.Optimizer) -> None:
        """Compare changed settings and parameters between ranks and copies."""
        settings = [settings_of(group) for group in inner.param_groups]
        # Replicas take turns, and one may change its copy before another checks. The first check of a step counts.
        self._steps[context.local_replica_id] += 1
        step = self._steps[context.local_replica_id]
        if step not in self._decisions:
            numbers = range(len(self.inner))
            self._decisions[step] = any(self._changes[number] != self._count_changes(number) for number in numbers)
            self._decisions.pop(step - 2, None)
        if settings != self._agreed or self._decisions[step]:
            context.merge_call(lambda strategy: self._agree_on(strategy, settings))

    def _agree_on(self, strategy: Strategy, settings: list[dict[str, object]]) -> None:
        first, *others = [_checksum_of(parameters_of(inner)) for inner in self.inner]
        if any(other != first for other in others):
            raise ValueError(
                "the parameters of the copies on this rank differ, because only one copy was changed. Change all "
                "copies by model.apply(fn) outside of strategy.run(), or change the module before you adopt it."
            )
        name = type(self.inner[0]).__name__
        strategy.extended.agree_on(
            lambda: f"step() of {name} with {settings} and parameters with the checksum {first:08x}"
        )
        self._agreed = settings
        self._changes = [*map(self._count_changes, range(len(self.inner)))]

    def _count_changes(self, number: int) -> int:
        return sum(map(changes_of, parameters_of(self.inner[number])))

    # Groups and state of the running replica ------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, object]]:
        """The parameter groups of the running replica, or of the first replica outside of ``run``."""
        if "_model" not in self.__dict__:
            return self._unused_groups
        groups: list[dict[str, object]] = self._with_first_settings(self._here()[0]).param_groups
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, object]]) -> None:
        # The base class sets it. Its groups are not used.
        self._unused_groups = groups

    @property
    def state(self) -> object:
        """The state of the running replica, or of the first replica outside of ``run``."""
        return self.inner[self._here()[0]].state

    @state.setter
    def state(self, state: object) -> None:
        # The base class sets it.
        del state

    def _nothing_copied(self) -> list[list[dict[str, object]]]:
        return [[{} for _ in inner.param_groups] for inner in self.inner]

    def _with_first_settings(self, number: int) -> torch.optim.Optimizer:
        """Return a replica's optimizer with the first one's settings, except those that it has set."""
        inner = self.inner[number]
        if number:
            groups = zip(inner.param_groups, self.inner[0].param_groups, self._copied[number], strict=True)
            for group, of_first, copied in groups:
                for name, value in list(of_first.items()):
                    if name != "params" and group.get(name) is copied.get(name, group.get(name)):
                        group[name] = value
                copied.update({name: value for name, value in group.items() if name != "params"})
        return inner

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """Return the state of the first replica's optimizer."""
        state: dict[str, object] = self.inner[0].state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Set the state of the optimizers of all replicas of this rank."""
        self._copied = self._nothing_copied()
        for inner in self.inner:
            # torch keeps the tensors of the argument, and each replica needs state of its own.
            inner.load_state_dict(copy.deepcopy(state_dict))

    def __getstate__(self) -> NoReturn:
        raise TypeError("mpidist.torch.Optimizer cannot be pickled or copied; save optimizer.state_dict()")

    def _names(self) -> dict[Tensor, str]:
        return {parameter: name for name, parameter in self._model.copies[0].named_parameters()}

    def _checkpoint_children(self) -> dict[str, object]:
        settings = OptimizerSettings(self.inner, self._names())
        return {"settings": settings, **held_tensors(self.inner[0], self._names())}

    def _checkpoint_defer(self, values: dict[str, Array]) -> None:
        take(self.inner[0], self._names(), values)
        make_equal(self.inner)


def _made(optimizer: OptimizerOrFactory, module: torch.nn.Module, settings: dict[str, object]) -> torch.optim.Optimizer:
    """Return the optimizer of one copy."""
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        made = optimizer(module.parameters(), **settings)
    elif callable(optimizer):
        made = optimizer(module, **settings)
    else:
        raise TypeError(
            f"the optimizer is {optimizer!r}; expected a class, as in mpidist.torch.Optimizer(model, torch.optim.Adam, "
            "lr=1e-3), or a function of a module that returns an optimizer."
        )
    if not isinstance(made, torch.optim.Optimizer) or isinstance(made, ReplicatedOptimizer):
        raise TypeError(f"{optimizer!r} made a {type(made).__name__}; expected an optimizer of torch.optim")
    if isinstance(made, torch.optim.LBFGS):
        raise TypeError(
            "LBFGS calls the model several times in a step, and replicas differently often. Use an optimizer that "
            "needs gradients once, such as torch.optim.SGD."
        )
    known = set(module.parameters())
    if any(parameter not in known for parameter in parameters_of(made)):
        raise ValueError(
            "The optimizer has parameters that its module has not. The function is called once for each replica: use "
            "the parameters of its argument."
        )
    return made


def _checksum_of(tensors: list[Tensor]) -> int:
    return zlib.crc32(str([checksum(array_of(tensor)) for tensor in tensors]).encode())


Optimizer: TypeAlias = ReplicatedOptimizer
"""The name for programs. The class has another one, because mpidist has optimizers, too."""
