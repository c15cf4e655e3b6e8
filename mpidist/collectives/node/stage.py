"""The places inside a node of inputs and of reduced slices.

The input of another rank is read out of shared memory where mpidist allocated it, out of the rank's own memory where
the kernel allows that, and otherwise out of slots in shared memory that the rank copies it to, chunk by chunk.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.chunks import pieces
from mpidist.collectives.node.neighbours_memory import address_of
from mpidist.collectives.node.node import Node
from mpidist.collectives.node.packing import PackedReduction

Places = list[list[int]]


class SliceBuffers(Protocol):
    """The memory of reduced slices of the chunks on their way."""

    depth: int
    """How many chunks may be on their way."""

    def reduced(self, chunk: int, nbytes: int) -> Array:
        """Return the bytes of this rank's reduced slice of a chunk."""

    def read(self, rank: int, chunk: int, first: int, target: Array) -> None:
        """Copy ``rank``'s reduced slice of a chunk, from byte ``first`` on, into ``target``."""


class ChunkBuffers:
    """Shared memory of a node for the inputs and results of ``depth`` chunks.

    Args:
        rank: In the node.
        segments: Of every rank.
        chunk_bytes: Size of a chunk.
        slice_bytes: Bytes of a chunk that one rank reduces, at most.
    """

    def __init__(self, rank: int, segments: list[Array], chunk_bytes: int, slice_bytes: int) -> None:
        self._rank = rank
        self._segments = segments
        self._chunk_bytes = chunk_bytes
        self._stride = chunk_bytes + slice_bytes
        self.depth = segments[0].size // self._stride

    def input(self, rank: int, chunk: int, nbytes: int) -> Array:
        """Return the bytes of a rank's copy of its input to a chunk."""
        start = chunk % self.depth * self._stride
        return self._segments[rank][start : start + nbytes]

    def reduced(self, chunk: int, nbytes: int) -> Array:
        """See ``SliceBuffers``."""
        start = chunk % self.depth * self._stride + self._chunk_bytes
        return self._segments[self._rank][start : start + nbytes]

    def read(self, rank: int, chunk: int, first: int, target: Array) -> None:
        """See ``SliceBuffers``."""
        start = chunk % self.depth * self._stride + self._chunk_bytes + first
        target.view(np.uint8)[:] = self._segments[rank][start : start + target.nbytes]


class Scratch:
    """Memory for elements of other ranks that are used at once.

    Args:
        nbytes: Read in one go, at most.
    """

    def __init__(self, nbytes: int) -> None:
        self._rooms = [np.empty(nbytes, np.uint8) for _ in range(2)]
        self._addresses = [address_of(room) for room in self._rooms]

    def room(self, is_first: bool) -> tuple[Array, int]:
        """Return bytes and their address.

        ``is_first`` keeps the first of several out of the way of the others.
        """
        return self._rooms[is_first], self._addresses[is_first]


class Inputs:
    """The inputs of all ranks of a node to one reduction.

    Args:
        node: The node.
        job: The reduction.
        places: Of every rank, where each piece of its input lies: an address, or a shared location counted down
            from -1.
        slots: Memory that private input passes through; None where it is read out of the ranks' memory.
        scratch: Memory for elements of other ranks.
    """

    def __init__(
        self, node: Node, job: PackedReduction, places: Places, slots: ChunkBuffers | None, scratch: Scratch
    ) -> None:
        self._node = node
        self._job = job
        self._places = places
        self.slots = slots
        self._scratch = scratch
        private = [any(place >= 0 for place in rank) for rank in places]
        self.pass_slots = slots is not None and any(private)
        """Whether any rank has to copy its input to the slots."""
        self.fills = self.pass_slots and private[node.rank]
        """Whether this rank has to."""
        self.are_read_in_place = slots is None or any(place < 0 for rank in places for place in rank)
        """Whether some rank reads another's arrays themselves."""

    def fill(self, chunk: int, chunk_start: int, start: int, stop: int) -> None:
        """Copy this rank's elements ``start`` to ``stop`` to its slot for ``chunk``.

        The first element of the chunk is ``chunk_start``.
        """
        assert self.slots is not None
        job, rank = self._job, self._node.rank
        places, itemsize = self._places[rank], job.dtype.itemsize
        for piece, begin, count, offset in pieces(job.counts, start, stop, stop - start):
            if places[piece] >= 0:
                first = (offset - chunk_start) * itemsize
                slot = self.slots.input(rank, chunk, first + count * itemsize)[first:]
                slot.view(job.dtype)[:] = job.pieces[piece][begin : begin + count]

    def value(self, rank: int, chunk: int, chunk_start: int, piece: tuple[int, int, int, int], is_first: bool) -> Array:
        """Return a rank's elements of ``piece``, in place or as a copy.

        Args:
            rank: In the node.
            chunk: Its number.
            chunk_start: The first element of the chunk.
            piece: See ``pieces``.
            is_first: Whether a copy has to outlast that of the next rank's elements.
        """
        node, job = self._node, self._job
        part, begin, count, offset = piece
        if rank == node.rank:
            return job.pieces[part][begin : begin + count]
        itemsize = job.dtype.itemsize
        place = self._places[rank][part]
        if place < 0:
            return node.shared.at(-1 - place + begin * itemsize, rank, count * itemsize).view(job.dtype)
        if self.slots is None:
            memory, address = self._scratch.room(is_first)
            node.memory.read(node.pids[rank], place + begin * itemsize, address, count * itemsize)
            return memory[: count * itemsize].view(job.dtype)
        first = (offset - chunk_start) * itemsize
        return self.slots.input(rank, chunk, first + count * itemsize)[first:].view(job.dtype)


class Results(Protocol):
    """The places of reduced slices, and their way to the other ranks of the node."""

    def target(self, chunk: int, slice_start: int, piece: tuple[int, int, int, int]) -> Array:
        """Return the memory for a piece of this rank's slice of a chunk."""

    def flat(self, chunk: int, start: int, stop: int) -> Array:
        """Return this rank's slice of a chunk, ``start`` to ``stop``, in one piece."""

    def collect(self, rank: int, chunk: int, start: int, stop: int) -> None:
        """Copy the slice of a chunk that ``rank`` has reduced to this rank's result."""


class InTargets:
    """Results of which the others read each rank's slices in place.

    Args:
        node: The node.
        job: The reduction.
        targets: This rank's result, in pieces.
        places: Of every rank, the addresses of the pieces of its result.
    """

    def __init__(self, node: Node, job: PackedReduction, targets: list[Array], places: Places) -> None:
        self._node = node
        self._job = job
        self._targets = targets
        self._places = places

    def target(self, chunk: int, slice_start: int, piece: tuple[int, int, int, int]) -> Array:
        """See ``Results``."""
        part, begin, count, _ = piece
        return self._targets[part][begin : begin + count]

    def flat(self, chunk: int, start: int, stop: int) -> Array:
        """See ``Results``; only where it lies in one piece of the result."""
        found = in_one_piece(self._job, self._targets, start, stop)
        assert found is not None
        return found

    def collect(self, rank: int, chunk: int, start: int, stop: int) -> None:
        """See ``Results``."""
        node, itemsize = self._node, self._job.dtype.itemsize
        if rank == node.rank:
            return
        for part, begin, count, _ in pieces(self._job.counts, start, stop, stop - start):
            first = begin * itemsize
            source, target = self._places[rank][part] + first, self._places[node.rank][part] + first
            node.memory.read(node.pids[rank], source, target, count * itemsize)


class InShared:
    """One result in shared memory for all ranks of the node.

    Args:
        flat: The result.
    """

    def __init__(self, flat: Array) -> None:
        self._flat = flat

    def target(self, chunk: int, slice_start: int, piece: tuple[int, int, int, int]) -> Array:
        """See ``Results``."""
        _, _, count, offset = piece
        return self._flat[offset : offset + count]

    def flat(self, chunk: int, start: int, stop: int) -> Array:
        """See ``Results``."""
        return self._flat[start:stop]

    def collect(self, rank: int, chunk: int, start: int, stop: int) -> None:
        """See ``Results``: it is there."""


class InSliceBuffers:
    """Results that all ranks copy out of slice buffers, one per chunk.

    Args:
        job: The reduction.
        targets: This rank's result, in pieces.
        buffers: The slice buffers.
    """

    def __init__(self, job: PackedReduction, targets: list[Array], buffers: SliceBuffers) -> None:
        self._job = job
        self._targets = targets
        self._buffers = buffers

    def target(self, chunk: int, slice_start: int, piece: tuple[int, int, int, int]) -> Array:
        """See ``Results``."""
        _, _, count, offset = piece
        first = offset - slice_start
        return self._buffer(chunk, first + count)[first:]

    def flat(self, chunk: int, start: int, stop: int) -> Array:
        """See ``Results``."""
        return self._buffer(chunk, stop - start)

    def _buffer(self, chunk: int, count: int) -> Array:
        dtype = self._job.dtype
        return self._buffers.reduced(chunk, count * dtype.itemsize).view(dtype)

    def collect(self, rank: int, chunk: int, start: int, stop: int) -> None:
        """See ``Results``."""
        for part, begin, count, offset in pieces(self._job.counts, start, stop, stop - start):
            target = self._targets[part][begin : begin + count]
            self._buffers.read(rank, chunk, (offset - start) * self._job.dtype.itemsize, target)


class InOwnTargets(InSliceBuffers):
    """The result of a lone rank, whose slices often lie there already.

    Args:
        job: The reduction.
        targets: The result, in pieces.
        buffers: For slices that do not lie in one piece of it.
    """

    def flat(self, chunk: int, start: int, stop: int) -> Array:
        """See ``Results``."""
        found = in_one_piece(self._job, self._targets, start, stop)
        return super().flat(chunk, start, stop) if found is None else found

    def collect(self, rank: int, chunk: int, start: int, stop: int) -> None:
        """See ``Results``."""
        if len(pieces(self._job.counts, start, stop, stop - start)) > 1:
            super().collect(rank, chunk, start, stop)


def in_one_piece(job: PackedReduction, arrays: list[Array], start: int, stop: int) -> Array | None:
    """Return elements ``start`` to ``stop`` of the input or result, or None.

    None if they lie in several pieces.
    """
    (part, begin, count, _), *others = pieces(job.counts, start, stop, stop - start)
    return None if others else arrays[part][begin : begin + count]


class PrivateSliceBuffers:
    """Slice buffers in each rank's own memory, for nodes whose ranks read one another's.

    Args:
        node: The node.
        memory: The buffers of this rank, in bytes.
        addresses: Where those of each rank lie.
        slice_bytes: Size of a buffer.
    """

    def __init__(self, node: Node, memory: Array, addresses: list[int], slice_bytes: int) -> None:
        self.depth = memory.size // slice_bytes
        self._node = node
        self._slice_bytes = slice_bytes
        self._memory = memory
        self._addresses = addresses

    @classmethod
    def made(cls, node: Node, slice_bytes: int, depth: int) -> Steps[PrivateSliceBuffers]:
        """Return new ones (collective over the node)."""
        memory = np.empty(depth * slice_bytes, np.uint8)
        node.board.tell([address_of(memory)])
        yield from node.board.meet()
        return cls(node, memory, [address for (address,) in node.board.told(1)], slice_bytes)

    def reduced(self, chunk: int, nbytes: int) -> Array:
        """See ``SliceBuffers``."""
        start = chunk % self.depth * self._slice_bytes
        return self._memory[start : start + nbytes]

    def read(self, rank: int, chunk: int, first: int, target: Array) -> None:
        """See ``SliceBuffers``."""
        start = chunk % self.depth * self._slice_bytes + first
        if rank == self._node.rank:
            target.view(np.uint8)[:] = self._memory[start : start + target.nbytes]
        else:
            source = self._addresses[rank] + start
            self._node.memory.read(self._node.pids[rank], source, address_of(target), target.nbytes)
