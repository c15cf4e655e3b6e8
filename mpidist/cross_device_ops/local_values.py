"""The values of one rank: their devices, and the sums of its replicas, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpidist.arrays.convert import is_array_like, restorer, to_array
from mpidist.arrays.device_ops import device_name, is_device_array
from mpidist.arrays.dtypes import Array, reduction_dtypes
from mpidist.collectives.mpi.mpi_types import NUMPY_OPS
from mpidist.core.options import ReduceOp
from mpidist.core.text import parse_device
from mpidist.values import IndexedSlices, Mirrored, ReplicaValues, Variable
from mpidist.values.component import Component
from mpidist.values.placement import HOST, place_at, place_of

AccumulationFn = Callable[[Sequence[Array]], Array]

# Types without a device. ``np.generic`` has one, because a result may be the next destination.
_PYTHON = (bool, int, float, complex, str)


def destination_devices(destinations: object) -> tuple[str, ...]:
    """Return the local devices of a variable, distributed value, array or device string. ``"host"`` is the CPU."""
    if isinstance(destinations, Variable):
        return destinations.devices
    if isinstance(destinations, Component):
        return (destinations.device,)
    if isinstance(destinations, ReplicaValues):
        return tuple(device_of(value, f"cpu:{i}") for i, value in enumerate(destinations.values))
    if isinstance(destinations, str) and destinations:
        return (HOST.device if destinations == "host" else str(parse_device(destinations)),)
    is_array = is_array_like(destinations) and not isinstance(destinations, _PYTHON)
    if is_array or isinstance(destinations, IndexedSlices):
        return (device_of(destinations),)
    raise ValueError(
        f"destinations is {destinations!r} of type {type(destinations).__name__}; expected a variable, a distributed "
        "value, an array, or a device string such as 'cpu:0'"
    )


def device_of(value: Any, on_host: str = HOST.device) -> str:
    """Return the device of a number, an array or IndexedSlices; ``on_host`` for the CPU."""
    array = value.values if isinstance(value, IndexedSlices) else value
    if is_device_array(array):
        return device_name(array)
    if hasattr(array, "__dlpack_device__") and is_device_array(array := to_array(array)):
        return device_name(array)
    return on_host


def place(value: object, devices: tuple[str, ...]) -> Any:
    """Return ``value`` itself or copied to a device, or a Mirrored of several devices."""
    first = put(value, devices[0])
    if len(devices) == 1:
        return first
    return Mirrored((first, *(put(value, device, copies=True) for device in devices[1:])))


def put(value: object, device: str, copies: bool = False) -> Any:
    """Return ``value`` on ``device``, itself if it is there, unless ``copies``."""
    if isinstance(value, IndexedSlices):
        return IndexedSlices(put(value.values, device, copies), put(value.indices, device, copies), value.dense_shape)
    array, destination = to_array(value), place_at(device)
    moved = destination.copies(array) if copies else destination.brings(array)
    if moved is array:
        return value
    restore = restorer(value)
    return moved if restore is None else restore(moved)


def check_alike(arrays: Sequence[Array]) -> None:
    """Raise ValueError unless all arrays have one shape and one dtype."""
    kinds = [(array.shape, array.dtype) for array in arrays]
    if any(kind != kinds[0] for kind in kinds):
        shown = ", ".join(f"{dtype}{shape}" for shape, dtype in kinds)
        raise ValueError(
            f"the values of the replicas differ in shape or dtype: {shown}; expected the same on every replica "
            "(strategy.reduce(..., axis=0) combines replicas with different numbers of rows)"
        )


def formed(array: Array, op: ReduceOp) -> Array:
    """Return ``array`` in the dtype in which ``op`` computes."""
    return place_of(array).casts(array, reduction_dtypes(array.dtype, op)[0])


def accumulate(arrays: Sequence[Array], op: ReduceOp) -> Array:
    """Combine equal-shaped arrays, first to last, on the device of the first. A MEAN is a SUM."""
    combine = NUMPY_OPS[op]
    if len(arrays) == 1:
        return arrays[0]
    place = place_of(arrays[0])
    with place.current():
        total = to_array(combine(arrays[0], place.brings(arrays[1])))
        for array in arrays[2:]:
            combine(total, place.brings(array), out=total)
    return total


def divided(total: Array, divisor: int) -> Array:
    """Return ``total / divisor`` on the same device."""
    with place_of(total).current():
        return to_array(total / divisor)
