"""Destinations of a reduction: which devices of this rank get a copy."""

from __future__ import annotations

from typing import Any

from mpidist.arrays.convert import is_array_like
from mpidist.core.devices import canonical_device
from mpidist.values import DistributedValues, IndexedSlices, Variable
from mpidist.values.component import Component

HOST = "cpu:0"


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
    if isinstance(destinations, DistributedValues):
        return tuple(f"cpu:{i}" for i in range(len(destinations.values)))
    if isinstance(destinations, str) and destinations:
        return (HOST if destinations == "host" else canonical_device(destinations),)
    if isinstance(destinations, IndexedSlices) or (is_array_like(destinations) and not isinstance(destinations, str)):
        return (HOST,)
    raise ValueError(
        f"destinations is {destinations!r} of type {type(destinations).__name__}; expected a variable, a distributed "
        "value, an array, or a device string such as 'cpu:0'"
    )
