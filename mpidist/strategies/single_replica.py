"""What the default strategy and OneDeviceStrategy share: one replica, so that nothing has to be combined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mpidist.arrays.convert import Array
from mpidist.arrays.dtypes import as_dtype
from mpidist.core import nest
from mpidist.core.enums import ReduceOp
from mpidist.core.options import CommunicationOptions
from mpidist.strategies.extended import StrategyExtended
from mpidist.strategies.leaves import check_can_gather, check_can_reduce, check_out, copy_into
from mpidist.strategies.replica_work import finished_work
from mpidist.values import ReplicaValues, Variable, select_replica
from mpidist.values.placement import place_at
from mpidist.values.variable import initial_array, make_variable

if TYPE_CHECKING:
    from mpidist.strategies.replica_context import ReplicaContext


class SingleReplicaExtended(StrategyExtended):
    """One replica on one device."""

    _device = "cpu:0"

    @property
    def _num_replicas_in_sync(self) -> int:
        return 1

    @property
    def local_replica_ids(self) -> tuple[int, ...]:
        """See ``StrategyExtended``."""
        return (0,)

    def _create_variable(self, **kwargs: Any) -> Variable:
        array = initial_array(kwargs["initial_value"], kwargs.pop("dtype"), kwargs.pop("shape"), kwargs["aggregation"])
        return make_variable(self._strategy, (self._device_for(array),), array, **kwargs)

    def _device_for(self, array: Array) -> str:
        """Return where a variable is put that starts from ``array``."""
        return self._device

    def _batch_reduce_to(
        self,
        op: ReduceOp,
        pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None,
        structure: str = "",
    ) -> list[Any]:
        values = [_own_value(value) for value, _ in pairs]
        check_can_reduce(values, op)
        return values

    def _gather_to_implementation(
        self, leaves: Sequence[Any], axis: int, structure: str, options: CommunicationOptions | None = None
    ) -> list[Any]:
        for leaf in leaves:
            check_can_gather(leaf, axis, "gather()")
        return [_own_value(leaf) for leaf in leaves]

    def _broadcast_to(self, tensor: Any, destinations: Any, root: int) -> Any:
        if root != 0:
            raise ValueError(f"root is {root}; expected 0: this strategy has one rank")
        return tensor

    def _broadcast_from_first(self, value: Any, doing: str = "") -> Any:
        return value

    def _replica_ctx_all_reduce(
        self, ctx: ReplicaContext, op: ReduceOp, value: Any, options: CommunicationOptions | None, out: Any
    ) -> Any:
        check_can_reduce(nest.flatten(value), op)
        if out is None:
            return value
        check_out(value, out, op, 1)
        return copy_into(out, value)

    def _replica_ctx_all_reduce_async(
        self, ctx: ReplicaContext, op: ReduceOp, value: Any, options: CommunicationOptions | None, out: Any
    ) -> Any:
        check_can_reduce(nest.flatten(value), op)
        if out is not None:
            check_out(value, out, op, 1)
        return finished_work(value, self._first_gpu)

    def _replica_ctx_all_gather(
        self, ctx: ReplicaContext, value: Any, axis: int, options: CommunicationOptions | None
    ) -> Any:
        for leaf in nest.flatten(value):
            check_can_gather(leaf, axis, "all_gather()")
        return value

    def _empty(self, shape: int | Sequence[int], dtype: Any, device: str) -> Any:
        return empty_on(device, shape, dtype)


def empty_on(device: str, shape: int | Sequence[int], dtype: Any) -> Array:
    """Return an uninitialized array on ``device``."""
    place = place_at(device)
    return place.ops.empty((shape,) if isinstance(shape, int) else tuple(shape), as_dtype(dtype), place.number)


def _own_value(value: Any) -> Any:
    if isinstance(value, Variable):
        return value.value()
    return value.values[0] if isinstance(value, ReplicaValues) else value


def plain_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
    """Call ``fn`` with the single components of distributed values in its arguments."""
    if not args and not kwargs:
        return fn()
    return fn(*select_replica(0, tuple(args)), **select_replica(0, kwargs or {}))
