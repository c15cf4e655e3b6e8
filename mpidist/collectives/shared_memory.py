"""Shared memory of the ranks of one node: windows that every rank sees, and arrays found in them again.

Allocation is collective and symmetric: every rank of the node gets as much, at the same place of its own segment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.collectives.memory import is_held
from mpidist.collectives.neighbours_memory import address_of
from mpidist.topology import import_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

# What MPI puts its shared windows into; where it does not exist, or is no file system, nothing is known to be free.
_BACKING = "/dev/shm"
# Left to others: the MPI library itself needs some.
_RESERVE_BYTES = 8 << 20
_WINDOW_SHIFT = 44
_ALIGNMENT = 64
_SMALLEST_WINDOW = 1 << 20


@dataclass
class _Window:
    window: MPI.Win
    segments: list[Array]
    is_heap: bool
    used: int = 0
    starts: list[int] = field(default_factory=list)


class SharedMemory:
    """Windows of one node, and what lies where in them.

    Args:
        comm: The ranks of the node.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._rank = comm.Get_rank()
        self._size = comm.Get_size()
        self._windows: list[_Window] = []

    @property
    def has_arrays(self) -> bool:
        """Whether anything has been allocated."""
        return any(place.is_heap for place in self._windows)

    def allocate(self, nbytes: int) -> Array | None:
        """Return ``nbytes`` of this rank's segment, or None on every rank where there is no room (collective).

        The memory lives as long as this object.
        """
        needed = -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        for place in self._windows:
            # Windows made for other purposes are not the same size on every rank.
            if place.is_heap and place.segments[self._rank].size - place.used >= needed:
                break
        else:
            made = self._make_window([max(needed, _SMALLEST_WINDOW)] * self._size, is_heap=True)
            if made is None:
                return None
            place = self._windows[made]
        start = place.used
        place.used += needed
        return place.segments[self._rank][start : start + nbytes]

    def make_window(self, sizes: list[int]) -> int | None:
        """Make a window with segments of ``sizes`` bytes; returns its number, or None without room (collective)."""
        return self._make_window(sizes, is_heap=False)

    def _make_window(self, sizes: list[int], is_heap: bool) -> int | None:
        room = self._comm.bcast(free_bytes() if self._rank == 0 else None)
        if room is not None and sum(sizes) + _RESERVE_BYTES > room:
            return None
        window = import_mpi().Win.Allocate_shared(sizes[self._rank], 1, comm=self._comm)
        segments = []
        for rank, size in enumerate(sizes):
            memory, _ = window.Shared_query(rank)
            segments.append(np.frombuffer(memory, np.uint8, size) if size else np.empty(0, np.uint8))
        place = _Window(window, segments, is_heap, starts=[address_of(segment) for segment in segments])
        self._windows.append(place)
        return len(self._windows) - 1

    def segment(self, window: int, rank: int) -> Array:
        """Return the bytes of a rank's segment."""
        return self._windows[window].segments[rank]

    def locate(self, array: Array) -> int | None:
        """Return a number that tells every rank of the node where ``array`` lies; None if it is not shared."""
        address = address_of(array)
        for number, place in enumerate(self._windows):
            offset = address - place.starts[self._rank]
            if offset >= 0 and offset + array.nbytes <= place.segments[self._rank].size:
                return (number << _WINDOW_SHIFT) + offset
        return None

    def at(self, location: int, rank: int, nbytes: int) -> Array:
        """Return the bytes of ``rank`` that it located at ``location``."""
        offset = location & ((1 << _WINDOW_SHIFT) - 1)
        return self._windows[location >> _WINDOW_SHIFT].segments[rank][offset : offset + nbytes]

    def close(self) -> None:
        """Free the windows (collective); one that any rank still holds arrays of stays until the process ends."""
        for place in self._windows:
            held = any(is_held(place.segments, rank) for rank in range(self._size))
            if not self._comm.allreduce(held):
                place.segments.clear()
                place.window.Free()
        self._windows.clear()


def free_bytes() -> int | None:
    """Return the free space of what shared windows are put into, None where that is not known."""
    try:
        info = os.statvfs(_BACKING)
    except OSError:
        return None
    return info.f_bavail * info.f_frsize
