"""SingleWriter: shared memory of a node, which the first rank writes while the others wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from mpidist.arrays.dtypes import Array
from mpidist.collectives.communicator import Communicator


class SingleWriter:
    """Allocates shared memory, and provides the blocks that write it. Reading needs no lock."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._is_writing = False
        self._count = 0

    def next_number(self) -> int:
        """Return 0, 1, ..., to number things that the ranks make in the same order."""
        self._count += 1
        return self._count - 1

    def shared_copy(self, array: Array, text: str) -> Array:
        """Return a copy of the first rank's ``array`` in shared memory, in C order (collective).

        The memory is freed when no rank holds an array over it. ``text`` names the array, and is equal on all ranks.
        Without room, all ranks raise MemoryError.
        """
        memory = self._comm.common_memory(array.nbytes, text)
        if memory is None:
            raise MemoryError(
                f"{text}: /dev/shm has no room for {array.nbytes} bytes, one copy of the variable. Make it larger "
                "(docker run --shm-size=8g, mount -o remount,size=8g /dev/shm), or use mpidist.MirroredStrategy(), "
                "which keeps a copy in the memory of each rank"
            )
        shared: Array = memory.view(array.dtype).reshape(array.shape)
        with self.write_block(text) as writes:
            if writes:
                shared[...] = array
        return shared

    @contextmanager
    def write_block(self, text: str) -> Iterator[bool]:
        """Provide a block in which one rank, given True, may write shared memory (collective).

        All ranks wait for each other before and after it. A nested block belongs to the outer one.
        """
        writes = self._comm.rank == 0
        if self._is_writing:
            yield writes
            return
        self._comm.meet(text)
        self._is_writing = True
        try:
            with self._comm.shared_errors(text):
                yield writes
        finally:
            self._is_writing = False
        self._comm.meet(text)

    def shared_errors(self, doing: str) -> AbstractContextManager[None]:
        """Return a block for work before a write, whose errors reach every rank."""
        return self._comm.shared_errors(doing)
