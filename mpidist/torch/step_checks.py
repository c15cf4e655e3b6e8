"""Checks of torch optimizer steps, so that replicas do not train apart."""

from __future__ import annotations

from functools import wraps
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from mpidist.core.context import StrategyLike, get_replica_context, get_strategy, has_strategy
from mpidist.torch.compiling import keep_compiler_out

_independent: WeakSet[Optimizer] = WeakSet()
_scope_of: WeakKeyDictionary[Optimizer, StrategyLike] = WeakKeyDictionary()
# The replica that steps the first parameter of an optimizer.
_replica_of = WeakIdKeyDictionary()
# Modules that adopt() has returned.
adopted: WeakSet[torch.nn.Module] = WeakSet()


def independent(optimizer: Optimizer) -> Optimizer:
    """Declare that mpidist must not check the steps of an optimizer of PyTorch.

    Use it for a model that each replica trains alone, or if the program sums the gradients itself. Local, not
    collective.

    Args:
        optimizer: An optimizer of ``torch.optim``. Declare copies of it as well.

    Returns:
        The same object.

    Raises:
        TypeError: ``optimizer`` is no optimizer of PyTorch.

    >>> import torch
    >>> probe = torch.nn.Linear(1, 1)
    >>> optimizer = independent(torch.optim.SGD(probe.parameters(), lr=0.1))
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}. Pass an optimizer of torch.optim.")
    _independent.add(optimizer)
    return optimizer


class _Checks:
    @staticmethod
    def before_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        """Raise RuntimeError if replicas in sync would train apart by this step."""
        if optimizer in _independent:
            _check_not_shared(optimizer)
            return
        strategy = get_strategy() if has_strategy() else None
        owner = getattr(optimizer, "distribute_strategy", None)
        if owner is not None:
            if strategy is not None and strategy is not owner and strategy.num_replicas_in_sync > 1:
                raise RuntimeError(
                    f"step() of a module that another {type(owner).__name__} has adopted was called under "
                    f"{type(strategy).__name__}. Its gradients are not summed over the replicas. Call "
                    "mpidist.torch.adopt() and mpidist.torch.Optimizer() inside `with strategy.scope():`."
                )
            return
        strategy = strategy or _scope_of.get(optimizer)
        name = f"torch.optim.{type(optimizer).__name__}"
        if _has_adopted(optimizer):
            raise RuntimeError(
                f"{name} has parameters of an adopted module, and does not sum their gradients over the replicas. Use "
                f"mpidist.torch.Optimizer(model, {name}, ...)."
            )
        if strategy is not None and strategy.num_replicas_in_sync > 1 and not _has_process_group():
            raise RuntimeError(
                f"{name} was made or called under {type(strategy).__name__} with a module that is not adopted. Each "
                "replica would train a model of its own. Use model = mpidist.torch.adopt(module) and optimizer = "
                f"mpidist.torch.Optimizer(model, {name}, ...). If that is intended, or if the program sums the "
                "gradients, call mpidist.torch.independent(optimizer)."
            )


def _check_not_shared(optimizer: Optimizer) -> None:
    """Raise RuntimeError if replicas of this process step one module and share its gradients."""
    replica = get_replica_context() if has_strategy() else None
    if replica is None or len(replica.strategy.extended.local_replica_ids) == 1:
        return
    mine = replica.local_replica_id
    first = _replica_of.setdefault(optimizer.param_groups[0]["params"][0], mine)
    if first != mine:
        name = f"torch.optim.{type(optimizer).__name__}"
        raise RuntimeError(
            f"replicas {first} and {mine} of this process step one module of PyTorch by {name}. Both have added to its "
            "gradients. Use a copy for each replica: model = mpidist.torch.adopt(module) and optimizer = "
            f"mpidist.torch.Optimizer(model, {name}, ...), which sums gradients itself. Or use one replica per rank: "
            f"pass the strategy one device, and start it with mpirun -n {replica.num_replicas_in_sync}."
        )


def _has_adopted(optimizer: Optimizer) -> bool:
    copies = [copy for module in adopted if module.strategy.num_replicas_in_sync > 1 for copy in module.copies]
    known = {id(parameter) for copy in copies for parameter in copy.parameters()}
    return any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"])


def _has_process_group() -> bool:
    """Return whether the program may sum gradients by DDP, FSDP or the like."""
    return bool(torch.distributed.is_available() and torch.distributed.is_initialized())


_make = Optimizer.__init__


@wraps(_make)
def _make_in_scope(self: Optimizer, *args: object, **kwargs: object) -> None:
    _make(self, *args, **kwargs)
    if has_strategy():
        _scope_of[self] = get_strategy()


Optimizer.__init__ = _make_in_scope
keep_compiler_out(_Checks)
register_optimizer_step_pre_hook(_Checks.before_step)
