"""Host memory of one node: reused blocks, shared segments, and slices of ranks.

Shared segments are files in /dev/shm. MPI can create shared windows by blocking calls only, and a failure on one rank
leaves the others waiting. The pages of a file are reserved before any rank relies on them. The file loses its name as
soon as all ranks have mapped it, so a killed job leaves no files. If a process is killed before that, the
next process that creates a segment removes the file. Running processes hold locks on theirs.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpidist.arrays.dtypes import Array, DType
from mpidist.collectives.mpi.exchange import agreed_minimum, broadcast_flat
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.core import Core
from mpidist.collectives.node.native import address_of, map_shared
from mpidist.core.files import open_regular

if TYPE_CHECKING:
    from mpi4py import MPI

SMALLEST = 64 << 10
"""Size of the smallest block of a pool. The allocator keeps smaller blocks itself."""
# A block is idle if it was free during this number of requests.
_IDLE_REQUESTS = 64
_PAGE = 4096

NO_ROOM, NOT_SHARED = 1, 2
"""Reasons why ranks of a node cannot share memory."""
_DIRECTORY = "/dev/shm"
# The MPI library itself needs some of /dev/shm.
_RESERVE_BYTES = 8 << 20
_ALIGNMENT = 64
_MAP_ALIGNMENT = mmap.ALLOCATIONGRANULARITY
# Heaps grow by half of their size, within these bounds, because each new segment costs two collectives.
_SMALLEST_GROWTH, _LARGEST_GROWTH = 1 << 20, 64 << 20
# Bits of SharedResults.held(), which travels in the header of a call.
MAX_SLOTS = 32
_numbers = itertools.count(1)

Piece = tuple[int, int, int, int]


# Elements of each rank ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def slices(count: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """Return the range of elements that each rank reduces. Lengths differ by at most one.

    >>> slices(5, 2)
    ((0, 3), (3, 5))
    """
    return tuple(pairwise(borders(count, ranks)))


@lru_cache(maxsize=256)
def borders(count: int, ranks: int) -> tuple[int, ...]:
    """Return the start of each slice, and the end of the last.

    >>> borders(5, 2)
    (0, 3, 5)
    """
    length, more = divmod(count, ranks)
    return tuple([rank * length + min(rank, more) for rank in range(ranks + 1)])


@lru_cache(maxsize=1024)
def pieces(counts: tuple[int, ...], start: int, stop: int) -> tuple[Piece, ...]:
    """Cut elements ``start`` to ``stop`` of concatenated parts into pieces of one part each.

    A piece is a tuple of part, first element in the part, length, and offset.

    >>> pieces((3, 4), 1, 6)
    ((0, 1, 2, 1), (1, 0, 3, 3))
    """
    found = []
    first = 0
    for part, count in enumerate(counts):
        begin, end = max(start, first), min(stop, first + count)
        if begin < end:
            found.append((part, begin - first, end - begin, begin))
        first += count
    return tuple(found)


# Reused blocks ------------------------------------------------------------------------------------------------------


def _references(holder: Sequence[object], index: int) -> int:
    return sys.getrefcount(holder[index])


# References to an object that only a list refers to. The number depends on the version of Python.
_IDLE_REFERENCES = _references([object()], 0)


def is_held(holder: Sequence[object], index: int) -> bool:
    """Return whether anything but the list ``holder``, such as a view, refers to its element."""
    return _references(holder, index) > _IDLE_REFERENCES


@dataclass
class _Shelf:
    """Blocks of one size."""

    blocks: list[Array] = field(default_factory=list)
    last_request: int = 0
    # Requests and the highest index of a used block since idle blocks were dropped.
    requests: int = 0
    highest: int = 0


class Pool:
    """Allocate arrays in reused blocks, so that no step waits for page faults.

    A block is reused when the caller has dropped all arrays in it. Requests of the same size free its idle blocks.
    New blocks free the blocks of sizes that are no longer requested.
    """

    def __init__(self) -> None:
        self._shelves: dict[int, _Shelf] = {}
        self._requests = 0

    def take(self, shape: int | tuple[int, ...], dtype: DType) -> Array:
        """Return an uninitialized array."""
        nbytes: int = (shape if isinstance(shape, int) else math.prod(shape)) * dtype.itemsize
        if nbytes < SMALLEST:
            return np.empty(shape, dtype)
        # At most an eighth more than requested, so that similar sizes share blocks.
        step = max(SMALLEST, 1 << max(0, nbytes.bit_length() - 4))
        size = -(-nbytes // step) * step
        shelf = self._shelves.get(size)
        if shelf is None:
            shelf = self._shelves[size] = _Shelf()
        self._requests += 1
        shelf.last_request = self._requests
        blocks, index = shelf.blocks, 0
        while index < len(blocks) and is_held(blocks, index):
            index += 1
        if index == len(blocks):
            oldest = self._requests - _IDLE_REQUESTS
            self._shelves = {size: each for size, each in self._shelves.items() if each.last_request > oldest}
            blocks.append(np.empty(size, np.uint8))
            # Touch each page here. Otherwise a peer's first write would allocate it on the peer's NUMA node.
            blocks[index][::_PAGE] = 0
        array: Array = np.ndarray(shape, dtype, blocks[index])
        shelf.requests += 1
        shelf.highest = max(shelf.highest, index)
        if shelf.requests > max(_IDLE_REQUESTS, 2 * len(blocks)):
            for idle in reversed(range(shelf.highest + 1, len(blocks))):
                if not is_held(blocks, idle):
                    del blocks[idle]
            shelf.requests = shelf.highest = 0
        return array


# Shared segments ----------------------------------------------------------------------------------------------------


@dataclass
class _Heap:
    """Segments for arrays, one per rank. All ranks use the same offsets."""

    segments: list[Array]
    used: int = 0


class SharedMemory:
    """Segments of the ranks of one node, which are private memory for a single rank."""

    def __init__(self, comm: MPI.Intracomm, core: Core | None) -> None:
        self._comm, self._core = comm, core
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        self._heaps: list[_Heap] = []

    @property
    def has_arrays(self) -> bool:
        """Return whether any array has been allocated."""
        return bool(self._heaps)

    def allocate(self, nbytes: int) -> Steps[Array | None]:
        """Return ``nbytes`` of this rank's segment, or None on all ranks without room (collective).

        Every rank of the node must pass the same size, and gets the same offset in its own segment.
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
                self._core.add_segments(segments)
        start = heap.used
        heap.used += needed
        return heap.segments[self._rank][start : start + nbytes]

    def segments(self, nbytes: int) -> Steps[list[Array] | None]:
        """Return a new segment per rank, or None on all ranks without room (collective)."""
        stride = -(-nbytes // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
        start = self._rank * stride
        whole, _ = yield from shared_memory(self._comm, stride * self._size, start, start + nbytes)
        if whole is None:
            return None
        return [whole[rank * stride : rank * stride + nbytes] for rank in range(self._size)]

    def common(self, nbytes: int, *, in_place: bool) -> Steps[Array | None]:
        """Return one new segment for all ranks, or None on all ranks without room (collective).

        ``in_place``: the core reads arrays in it in place, so it stays mapped until the core is closed.
        """
        # Each rank reserves the pages of its own slice, so that they are local to the rank that reduces the slice.
        whole, _ = yield from shared_memory(self._comm, nbytes, *slices(nbytes, self._size)[self._rank])
        if whole is not None and in_place and self._core is not None:
            self._core.add_segments([whole])
        return whole

    def close(self) -> None:
        """Drop the segments. Each stays mapped until the last array in it is dropped."""
        self._heaps.clear()


class SharedResults:
    """Results that all ranks of a node share, in slots of shared memory.

    A slot is reused when every rank has dropped its array. Every rank has the same slots in the same order.
    """

    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared
        self._slots: list[Array] = []

    def held(self) -> int:
        """Return a mask of the slots that this rank still uses."""
        return sum(1 << index for index in range(len(self._slots)) if is_held(self._slots, index))

    def free(self, nbytes: int, held: list[int]) -> Array | None:
        """Return a slot that no rank uses, or None. ``held``: the masks of all ranks."""
        for index, slot in enumerate(self._slots):
            if slot.size >= nbytes and not any(bits >> index & 1 for bits in held):
                return self._slots[index][:nbytes]
        return None

    def add(self, nbytes: int) -> Steps[bool]:
        """Add a slot. Return False on all ranks without room (collective)."""
        if len(self._slots) == MAX_SLOTS:
            return False
        made = yield from self._shared.common(nbytes, in_place=True)
        if made is not None:
            # Through a memoryview, because views of the slot must refer to the slot itself, see is_held.
            self._slots.append(np.frombuffer(made.data, np.uint8))
        return made is not None

    def close(self) -> None:
        """Drop the slots. Each stays mapped until the caller drops its arrays."""
        self._slots.clear()


def shared_memory(comm: MPI.Intracomm, nbytes: int, start: int, stop: int) -> Steps[tuple[Array | None, int]]:
    """Return zeroed memory that a node's ranks share, or None and a reason (collective).

    This rank reserves bytes ``start`` to ``stop``. All ranks get the same reason, ``NO_ROOM`` or ``NOT_SHARED``.
    """
    if comm.Get_size() == 1:
        return aligned_zeros(nbytes), 0
    # Not MPI_Win_allocate_shared. Open MPI crashes in it if a rank has a /dev/shm of its own, as in a container.
    with _temporary_file(nbytes if comm.Get_rank() == 0 else 0) as number:
        place = np.array([os.getpid(), number], np.int64)
        yield from broadcast_flat(comm, place, 0)
        pid, number = place.tolist()
        whole = _mapped(_name(pid, number), nbytes, start, stop) if number else None
        reason = 0 if whole is not None else NOT_SHARED if number else NO_ROOM
        # The file keeps its name until this agreement, because all ranks have mapped it then.
        reason = -(yield from agreed_minimum(comm, -reason))
        return (None, reason) if reason else (whole, 0)


def aligned_zeros(nbytes: int) -> Array:
    """Return zeroed memory of this process, aligned to a cache line."""
    memory = np.zeros(nbytes + _ALIGNMENT, np.uint8)
    start = -address_of(memory) % _ALIGNMENT
    return memory[start : start + nbytes]


def _name(pid: int, number: int) -> str:
    return f"{_DIRECTORY}/mpidist-{pid}-{number}"


@contextmanager
def _temporary_file(nbytes: int) -> Iterator[int]:
    """Create a file for the duration of the block. Yield its number, or 0 without room or for 0 bytes."""
    number, descriptor = 0, -1
    if nbytes and nbytes <= room_for_segments():
        number, descriptor = _create(nbytes)
    try:
        yield number
    finally:
        if number:
            os.unlink(_name(os.getpid(), number))
            os.close(descriptor)


def _create(nbytes: int) -> tuple[int, int]:
    """Create a file. Return its number and its locked descriptor, or (0, -1) on failure."""
    remove_leftovers()
    for number in _numbers:
        path = _name(os.getpid(), number)
        try:
            descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue  # left by an earlier process with this pid
        except OSError:
            break
        try:
            # Before the lock, another process may have taken the file for a leftover and removed it.
            if not _lock(descriptor) or not os.fstat(descriptor).st_nlink:
                os.close(descriptor)
                continue
            os.truncate(descriptor, nbytes)
        except OSError:
            os.unlink(path)
            os.close(descriptor)
            break
        return number, descriptor
    return 0, -1


@cache
def remove_leftovers() -> None:
    """Remove this user's files of killed processes, once per process."""
    for path in Path(_DIRECTORY).glob("mpidist-*-*"):
        # OSError: a file of another user, or removed by its owner in the meantime.
        with contextlib.suppress(OSError):
            descriptor = open_regular(path, os.O_RDWR)
            try:
                if _lock(descriptor):
                    path.unlink()
            finally:
                os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock a file until this process ends. Return False if another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _mapped(name: str, nbytes: int, start: int, stop: int) -> Array | None:
    """Reserve bytes ``start`` to ``stop`` of a file and map it. Return None on failure.

    Without the reservation, a full /dev/shm would raise SIGBUS at a later write.
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


def room_for_segments() -> int:
    """Return the bytes available for segments."""
    return max(0, free_bytes() - _RESERVE_BYTES)


def free_bytes() -> int:
    """Return the free bytes of /dev/shm. They count as unlimited if they are unknown."""
    try:
        info = os.statvfs(_DIRECTORY)
    except OSError:
        return sys.maxsize
    return info.f_bavail * info.f_frsize
