"""What the default strategy and OneDeviceStrategy share: one replica, so that nothing has to be combined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.arrays.convert import Array, to_array
from mpidist.arrays.dtypes import check_transportable, reduction_dtypes
from mpidist.collectives import FinishedWork
from mpidist.core import nest
from mpidist.core.enums import ReduceOp
from mpidist.core.options import CommunicationOptions
from mpidist.strategies.extended import StrategyExtended
from mpidist.values import DistributedValues, IndexedSlices, Variable, select_replica
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
        return make_variable(self._strategy, (self._device,), array, **kwargs)

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
        self, ctx: ReplicaContext, op: ReduceOp, value: Any, options: CommunicationOptions | None
    ) -> Any:
        check_can_reduce(nest.flatten(value), op)
        return FinishedWork(value)

    def _replica_ctx_all_gather(
        self, ctx: ReplicaContext, value: Any, axis: int, options: CommunicationOptions | None
    ) -> Any:
        for leaf in nest.flatten(value):
            check_can_gather(leaf, axis, "all_gather()")
        return value

    def _empty(self, shape: int | Sequence[int], dtype: Any) -> Any:
        return np.empty(shape, dtype)


def _own_value(value: Any) -> Any:
    if isinstance(value, Variable):
        return value.value()
    return value.values[0] if isinstance(value, DistributedValues) else value


def check_out(value: Any, out: Any, op: ReduceOp, num_replicas: int) -> None:
    """Raise ValueError unless ``out`` can take the result of reducing ``value`` over ``num_replicas`` replicas."""
    for leaf, target_array in zip(nest.flatten(value), outputs_for(value, out), strict=True):
        if isinstance(leaf, IndexedSlices):
            raise ValueError("out was given for IndexedSlices, whose number of rows is not known; leave it out")
        array = to_array(leaf)
        dtype = reduction_dtypes(array.dtype, op)[1] if num_replicas > 1 else array.dtype
        if (target_array.shape, target_array.dtype) != (array.shape, dtype):
            raise ValueError(
                f"out has {target_array.dtype}{target_array.shape}; expected {dtype}{array.shape}, as the result has"
            )
        if not target_array.flags.writeable:
            raise ValueError("out is read-only; expected arrays that can be written")


def outputs_for(value: Any, out: Any) -> list[Array]:
    """Return the arrays of ``out``, which has to have the structure of ``value``."""
    try:
        nest.assert_same_structure(value, out)
    except ValueError as error:
        raise ValueError(f"out does not fit the value: {error}") from None
    return [to_array(leaf, "out") for leaf in nest.flatten(out)]


def copy_into(out: Any, value: Any) -> Any:
    """Copy the leaves of ``value`` into the arrays of ``out`` and return ``out``."""
    nest.map_structure(lambda target, source: np.copyto(to_array(target, "out"), to_array(source)), out, value)
    return out


def check_can_reduce(leaves: Sequence[Any], op: ReduceOp) -> None:
    """Raise TypeError unless ``op`` can reduce each of ``leaves``, so that one replica refuses what several would."""
    for leaf in leaves:
        reduction_dtypes((leaf.values if isinstance(leaf, IndexedSlices) else to_array(leaf)).dtype, op)


def check_can_gather(value: Any, axis: int, method: str) -> None:
    """Raise unless ``value`` can be concatenated along ``axis``."""
    sample = value.values[0] if isinstance(value, DistributedValues) else value
    if isinstance(sample, IndexedSlices):
        raise NotImplementedError(f"{method} of IndexedSlices is not offered; gather their values and indices")
    array = to_array(sample)
    check_transportable(array.dtype, method)
    if array.ndim == 0:
        raise ValueError(f"{method} was given a scalar; expected an array with at least one axis: value[None]")
    if not isinstance(axis, (int, np.integer)) or not -array.ndim <= axis < array.ndim:
        raise ValueError(
            f"{method} along axis {axis!r} of an array of rank {array.ndim}; "
            f"expected an axis from {-array.ndim} to {array.ndim - 1}"
        )


def plain_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
    """Call ``fn`` with the single components of distributed values in its arguments."""
    if not args and not kwargs:
        return fn()
    return fn(*select_replica(0, tuple(args)), **select_replica(0, kwargs or {}))
