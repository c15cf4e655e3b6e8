"""Shared memory of the ranks of one node: segments that every rank maps.

MPI makes shared windows by blocking calls only, and one that fails on a rank leaves the others waiting. So memory that
is needed later is made here: files in /dev/shm whose pages are reserved before anybody relies on them, and which lose
their names as soon as all ranks have mapped them, so that a job that is killed leaves nothing behind. The leftovers of
one that is killed in that very moment are removed by the next that makes one: makers hold locks on theirs.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.chunks import slices
from mpidist.collectives.node.core import Core
from mpidist.collectives.node.mapping import address_of, map_shared
from mpidist.core.files import open_regular
from mpidist.topology import import_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

NO_ROOM, NOT_SHARED = 1, 2
"""Why ranks of a node cannot share memory."""
_DIRECTORY = "/dev/shm"
# Left to others: the MPI library itself needs some.
_RESERVE_BYTES = 8 << 20
_ALIGNMENT = 64
_MAP_ALIGNMENT = mmap.ALLOCATIONGRANULARITY
# Memory for arrays grows by half of what there is, within these bounds: making a piece takes three meetings.
_SMALLEST_GROWTH, _LARGEST_GROWTH = 1 << 20, 64 << 20
_numbers = itertools.count(1)


@dataclass
class _Heap:
    """Segments for arrays, one per rank, of which every rank takes the same parts."""

    segments: list[Array]
    used: int = 0


class SharedMemory:
    """The segments of one node.

    Args:
        core: Of the node; None for a rank that is alone there.
    """

    def __init__(self, core: Core | None) -> None:
        self._core = core
        self._rank, self._size = (0, 1) if core is None else (core.rank, core.size)
        self._heaps: list[_Heap] = []

    @property
    def has_arrays(self) -> bool:
        """Return whether any array has been allocated."""
        return bool(self._heaps)

    def allocate(self, nbytes: int) -> Steps[Array | None]:
        """Return ``nbytes`` of this rank's segment, or None (collective).

        None, on every rank, where there is no room. Every rank of the node gets as much, at the same place of its own
        segment.
        """
        needed = -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        heap = next((heap for heap in self._heaps if heap.segments[0].size - heap.used >= needed), None)
        if heap is None:
            so_far = sum(heap.segments[0].size for heap in self._heaps)
            growth = min(max(so_far // 2, _SMALLEST_GROWTH), _LARGEST_GROWTH)
            segments = yield from self.segments(max(needed, growth))
            if segments is None:
                return None
            heap = _Heap(segments)
            self._heaps.append(heap)
            if self._core is not None:
                self._core.know(segments)
        start = heap.used
        heap.used += needed
        return heap.segments[self._rank][start : start + nbytes]

    def segments(self, nbytes: int) -> Steps[list[Array] | None]:
        """Return a new segment of ``nbytes`` for every rank, or None (collective).

        None, on all ranks, where there is no room.
        """
        stride = -(-nbytes // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
        whole = yield from self._make(stride * self._size, self._rank * stride, self._rank * stride + nbytes)
        if whole is None:
            return None
        return [whole[rank * stride : rank * stride + nbytes] for rank in range(self._size)]

    def common(self, nbytes: int) -> Steps[Array | None]:
        """Return one new segment for all ranks, or None (collective).

        Each rank reserves an equal share of its pages, so they lie near the rank that reduces that share. None, on all
        ranks, where there is no room.
        """
        whole = yield from self.unlisted(nbytes)
        if whole is not None and self._core is not None:
            self._core.know([whole])
        return whole

    def unlisted(self, nbytes: int) -> Steps[Array | None]:
        """Return a segment like ``common``, but one that goes once nobody holds it.

        Arrays in it are not read in place.
        """
        return (yield from self._make(nbytes, *slices(nbytes, self._size)[self._rank]))

    def close(self) -> None:
        """Let go of the segments; each stays while any array over it is there."""
        self._heaps.clear()

    # Making -----------------------------------------------------------------------------------------------------

    def _make(self, nbytes: int, start: int, stop: int) -> Steps[Array | None]:
        """Map a new file of ``nbytes``, of which this rank reserves bytes ``start`` to ``stop``."""
        core = self._core
        with _temporary_file(nbytes if self._rank == 0 else 0) as number:
            pid, number = (yield from _told_by_all(core, [os.getpid(), number]))[0]
            whole = _mapped(_name(pid, number), nbytes, start, stop) if number else None
            mapped = yield from _told_by_all(core, [whole is not None])
            return whole if all(is_mapped for (is_mapped,) in mapped) else None


def _told_by_all(core: Core | None, words: list[int]) -> Steps[list[list[int]]]:
    """Return the whole numbers that each rank of the node tells here."""
    if core is None:
        return [words]
    core.tell(words)
    yield from core.meeting()
    return core.told(len(words))


def control_memory(comm: MPI.Intracomm, nbytes: int) -> tuple[Array | None, int]:
    """Return zeroed memory that a node's ranks share, or None with a reason (collective).

    The reason, ``NO_ROOM`` or ``NOT_SHARED``, is this rank's. MPI_Win_allocate_shared is not used, because Open MPI
    crashes in it if a rank has a ``/dev/shm`` of its own, as in a container.
    """
    if comm.Get_size() == 1:
        return aligned_zeros(nbytes), 0
    is_first = comm.Get_rank() == 0
    with _temporary_file(nbytes if is_first else 0) as mine:
        pid, number = comm.bcast((os.getpid(), mine))
        whole = _mapped(_name(pid, number), nbytes, 0, nbytes if is_first else 0) if number else None
        # The file has its name until all ranks have mapped it.
        reason = 0 if whole is not None else NOT_SHARED if number else NO_ROOM
        return (None, reason) if comm.allreduce(reason, import_mpi().MAX) else (whole, 0)


def aligned_zeros(nbytes: int) -> Array:
    """Return zeroed memory of this process, aligned to a cache line."""
    memory = np.zeros(nbytes + _ALIGNMENT, np.uint8)
    start = -address_of(memory) % _ALIGNMENT
    return memory[start : start + nbytes]


def _name(pid: int, number: int) -> str:
    return f"{_DIRECTORY}/mpidist-{pid}-{number}"


@contextmanager
def _temporary_file(nbytes: int) -> Iterator[int]:
    """Make a file that exists while the block runs; gives its number.

    That is 0 where there is no room or none is wanted.
    """
    room = free_bytes()
    number, descriptor = 0, -1
    if nbytes and (room is None or nbytes + _RESERVE_BYTES <= room):
        number, descriptor = _create(nbytes)
    try:
        yield number
    finally:
        if number:
            os.unlink(_name(os.getpid(), number))
            os.close(descriptor)


def _create(nbytes: int) -> tuple[int, int]:
    """Make a file, and return its number and its locked descriptor.

    0 and -1 where that fails.
    """
    remove_leftovers()
    for number in _numbers:
        path = _name(os.getpid(), number)
        try:
            descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue  # left over from a process that had this number
        except OSError:
            break
        try:
            if not _lock(descriptor) or not os.fstat(descriptor).st_nlink:
                os.close(descriptor)
                continue  # another process took it for something left over, and removes it
            os.truncate(descriptor, nbytes)
        except OSError:
            os.unlink(path)
            os.close(descriptor)
            break
        return number, descriptor
    return 0, -1


@cache
def remove_leftovers() -> None:
    """Remove this user's files whose makers were killed while they made them; once."""
    for path in Path(_DIRECTORY).glob("mpidist-*-*"):
        # Of another user, or removed by its maker meanwhile.
        with contextlib.suppress(OSError):
            descriptor = open_regular(path, os.O_RDWR)
            try:
                if _lock(descriptor):
                    path.unlink()
            finally:
                os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Take the lock of a file; return whether nobody else has it.

    It ends with its process.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _mapped(name: str, nbytes: int, start: int, stop: int) -> Array | None:
    """Map a file after reserving some of its bytes, or return None.

    So a lack of memory is no error later, but None here, which all ranks then report together.
    """
    try:
        descriptor = open_regular(name, os.O_RDWR)
        try:
            if stop > start:
                os.posix_fallocate(descriptor, start, stop - start)
            return map_shared(descriptor, nbytes)
        finally:
            os.close(descriptor)
    except OSError:
        return None


# Free space -------------------------------------------------------------------------------------------------------


def room_for_segments() -> int | None:
    """Return the bytes that segments may still take, or None if unknown."""
    room = free_bytes()
    return None if room is None else max(0, room - _RESERVE_BYTES)


def free_bytes() -> int | None:
    """Return the free bytes of the folder of shared memory, or None if unknown."""
    try:
        info = os.statvfs(_DIRECTORY)
    except OSError:
        return None
    return info.f_bavail * info.f_frsize
