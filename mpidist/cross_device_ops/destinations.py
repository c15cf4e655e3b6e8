"""Destinations of a reduction: which devices of this rank get a copy."""

from __future__ import annotations

from typing import Any

from mpidist.arrays.convert import is_array_like, restorer, to_array
from mpidist.arrays.device_ops import device_name, is_device_array
from mpidist.core.devices import canonical_device
from mpidist.values import IndexedSlices, Mirrored, ReplicaValues, Variable
from mpidist.values.component import Component
from mpidist.values.placement import place_at

HOST = "cpu:0"
# A number is nowhere; ``np.generic`` comes out of reductions, and goes into them as a destination again.
_PYTHON = (bool, int, float, complex, str)


def destination_devices(destinations: Any) -> tuple[str, ...]:
    """Return the local devices that ``destinations`` stands for.

    Args:
        destinations: A variable, a distributed value, an array, a device string or ``"host"``.

    Raises:
        ValueError: None of these, or a list or tuple of them.
    """
    if isinstance(destinations, Variable):
        return destinations.devices
    if isinstance(destinations, Component):
        return (destinations.device,)
    if isinstance(destinations, ReplicaValues):
        return tuple(device_of(value, f"cpu:{i}") for i, value in enumerate(destinations.values))
    if isinstance(destinations, str) and destinations:
        return (HOST if destinations == "host" else canonical_device(destinations),)
    is_array = is_array_like(destinations) and not isinstance(destinations, _PYTHON)
    if is_array or isinstance(destinations, IndexedSlices):
        return (device_of(destinations),)
    raise ValueError(
        f"destinations is {destinations!r} of type {type(destinations).__name__}; expected a variable, a distributed "
        "value, an array, or a device string such as 'cpu:0'"
    )


def device_of(value: Any, on_host: str = HOST) -> str:
    """Return the device on which ``value`` lies, a number, an array or IndexedSlices; ``on_host`` for the CPU."""
    array = value.values if isinstance(value, IndexedSlices) else value
    if is_device_array(array):
        return device_name(array)
    if hasattr(array, "__dlpack_device__") and is_device_array(array := to_array(array)):
        return device_name(array)
    return on_host


def place(value: Any, devices: tuple[str, ...]) -> Any:
    """Return ``value`` on one device, a Mirrored with a copy on each of several; itself where it is there already."""
    first = put(value, devices[0])
    if len(devices) == 1:
        return first
    return Mirrored((first, *(put(value, device, copies=True) for device in devices[1:])))


def put(value: Any, device: str, copies: bool = False) -> Any:
    """Return ``value`` on ``device``, itself if it is there, unless ``copies``."""
    if isinstance(value, IndexedSlices):
        return IndexedSlices(put(value.values, device, copies), put(value.indices, device, copies), value.dense_shape)
    array, destination = to_array(value), place_at(device)
    moved = destination.copies(array) if copies else destination.brings(array)
    if moved is array:
        return value
    restore = restorer(value)
    return moved if restore is None else restore(moved)
