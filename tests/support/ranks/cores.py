"""The native core: a mark for tests that need it, and several cores that one thread drives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_void_p
from typing import Any

import numpy as np
import pytest

from mpidist.collectives.node import native
from mpidist.collectives.node.core import DONE
from mpidist.collectives.node.native import address_of

needs_core = pytest.mark.skipif(
    native.why_not() is not None, reason=f"each rank is a node of its own: {native.why_not()}"
)

_SMALL, _CHUNK, _SLICE, _LANES = 1 << 12, 1 << 14, 1 << 12, 2
_ALIGNMENT = 128
_KIND, _SUM, _FLOAT32 = 1, 0, 10
Calls = dict[str, Callable[..., Any]]


def _memory(nbytes: int) -> np.ndarray:
    whole = np.zeros(nbytes + _ALIGNMENT, np.uint8)
    start = -address_of(whole) % _ALIGNMENT
    return whole[start : start + nbytes]


@contextmanager
def cores(ranks: int) -> Iterator[list[Calls]]:
    """Provide the calls of the core of each rank of a node, all of them in this thread."""
    opener = native.opener()
    assert opener is not None
    control = _memory(native.library().nc_control_bytes(ranks))
    segments = [_memory(1 << 17) for _ in range(ranks)]
    bases = (c_void_p * ranks)(*map(address_of, segments))
    sizes = native.SlotSizes(_SMALL, _CHUNK, _SLICE, _LANES, _SLICE)
    assert sizes.nbytes <= segments[0].size
    calls = [opener(address_of(control), rank, ranks, 0, None, 0, ranks) for rank in range(ranks)]
    for each in calls:
        native.library().nc_room(each["address"], bases, byref(sizes))
    yield calls


def sums(inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Return the sum of float32 arrays, one of each rank of a node, as each rank gets it."""
    outs = [np.empty_like(array) for array in inputs]
    with cores(len(inputs)) as calls:
        states = [
            each["begin"](7, _KIND, _SUM, _FLOAT32, 0.0, 0, 1, 0, 0, [given], [out], None)
            for each, given, out in zip(calls, inputs, outs, strict=True)
        ]
        while any(state != DONE for state in states):
            states = [state if state == DONE else each["step"](0) for each, state in zip(calls, states, strict=True)]
    return outs
