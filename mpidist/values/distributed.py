"""Values with one component per replica: PerReplica (they differ) and Mirrored (they are equal)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.arrays.device_ops import is_device_array
from mpidist.values.operators import ReadsAsArray, refusal
from mpidist.values.placement import array_of


class DistributedValues:
    """A value per replica of this rank (tf.distribute.DistributedValues).

    Args:
        values: The components of this rank's replicas, in order.
        replica_ids: Their global replica ids; 0, 1, ... by default.

    >>> PerReplica((1, 2), replica_ids=(2, 3))
    PerReplica:{2: 1, 3: 2}
    """

    def __init__(self, values: Sequence[Any], replica_ids: Sequence[int] | None = None) -> None:
        if len(values) == 0:
            raise ValueError(f"{type(self).__name__} was given no values; expected one per local replica")
        self.values = tuple(values)
        self.replica_ids = tuple(range(len(self.values)) if replica_ids is None else replica_ids)
        if len(self.replica_ids) != len(self.values):
            raise ValueError(f"{len(self.values)} values were given with {len(self.replica_ids)} replica ids")

    def __repr__(self) -> str:
        parts = ", ".join(f"{i}: {value!r}" for i, value in zip(self.replica_ids, self.values, strict=True))
        return f"{type(self).__name__}:{{{parts}}}"


def _per_replica_message(value: PerReplica) -> str:
    return (
        f"a PerReplica value of {len(value.values)} replicas was used as one array; "
        "use it inside strategy.run(fn, args=(value,)), combine it with strategy.reduce('SUM', value, axis=None), "
        "or take it apart with strategy.experimental_local_results(value)"
    )


_refuse = refusal(_per_replica_message)


def _refuse_attribute(value: PerReplica) -> Any:
    # An AttributeError, so that hasattr() says no.
    raise AttributeError(_per_replica_message(value))


def _refuse_format(value: PerReplica, spec: str) -> str:
    if spec:
        raise ValueError(_per_replica_message(value))
    return repr(value)


_REFUSED = """
__array__ __array_ufunc__ __array_function__ __bool__ __len__ __iter__ __getitem__ __float__ __int__ __index__
__complex__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__
__rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __matmul__ __rmatmul__ __neg__ __pos__ __abs__ __invert__
__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__ __lshift__ __rshift__
"""


class PerReplica(DistributedValues):
    """Components that differ between replicas; an array only inside ``strategy.run``.

    Using it as an array in cross-replica context raises ValueError, since nobody could say which replica is
    meant.
    """


for _name in _REFUSED.split():
    setattr(PerReplica, _name, _refuse)
for _name in ("shape", "dtype", "ndim", "size", "T", "numpy"):
    setattr(PerReplica, _name, property(_refuse_attribute))
PerReplica.__hash__ = object.__hash__  # type: ignore[method-assign]
setattr(PerReplica, "__format__", _refuse_format)  # noqa: B010 - as the others


class Mirrored(DistributedValues, ReadsAsArray):
    """Components that are equal on all replicas; behaves as an array by way of the first local copy.

    >>> Mirrored((np.array([1.0, 2.0]), np.array([1.0, 2.0]))) + 1
    array([2., 3.])
    """

    def _read(self) -> Array:
        return array_of(self.values[0])

    def _is_on_device(self) -> bool:
        return is_device_array(self.values[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one copy."""
        return self._read().shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of one copy."""
        return self._read().dtype
