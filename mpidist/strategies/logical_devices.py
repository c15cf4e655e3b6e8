"""Logical devices, TensorFlow's way to spread one replica over several.

Here a replica has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeVar

from mpidist.arrays.convert import to_array

Value = TypeVar("Value")

LOGICAL_DEVICES_PER_REPLICA = 1


def assign(tensor: Value, logical_device_id: int) -> Value:
    """Return ``tensor``.

    Raises:
        ValueError: There is no logical device of that number.
    """
    if not 0 <= logical_device_id < LOGICAL_DEVICES_PER_REPLICA:
        raise ValueError(
            f"logical_device_id is {logical_device_id}; expected 0: a replica has {LOGICAL_DEVICES_PER_REPLICA} "
            "logical device"
        )
    return tensor


def split(tensor: Value, partition_dimensions: Sequence[int]) -> Value:
    """Return ``tensor``.

    Raises:
        ValueError: The partition has another rank than the tensor, a dimension does not divide, or the parts are
            not as many as there are logical devices.
    """
    shape = to_array(tensor).shape
    if len(partition_dimensions) != len(shape):
        raise ValueError(
            f"partition_dimensions {list(partition_dimensions)} for a tensor of shape {shape}; "
            f"expected {len(shape)} numbers, one per axis"
        )
    for axis, (size, parts) in enumerate(zip(shape, partition_dimensions, strict=True)):
        if parts < 1 or size % parts:
            raise ValueError(f"axis {axis} of size {size} cannot be cut into {parts} equal parts")
    if prod(partition_dimensions) != LOGICAL_DEVICES_PER_REPLICA:
        raise ValueError(
            f"partition_dimensions {list(partition_dimensions)} make {prod(partition_dimensions)} parts; expected "
            f"{LOGICAL_DEVICES_PER_REPLICA}, the number of logical devices of a replica"
        )
    return tensor
