"""SingleWriter: memory that all ranks share, and the first writes while the others wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from mpidist.arrays.dtypes import Array
from mpidist.collectives.array_collectives import ArrayCollectives


class SingleWriter:
    """Hands out shared memory, and the blocks in which it is written.

    Reading it needs no care: it changes in a block alone, to which every rank comes, and which none leaves before the
    first rank has written.

    Args:
        comm: The ranks that share it.
    """

    def __init__(self, comm: ArrayCollectives) -> None:
        self._comm = comm
        self._is_writing = False
        self._count = 0

    def next_number(self) -> int:
        """Return 0, 1, ..., to number things that the ranks make in the same order."""
        self._count += 1
        return self._count - 1

    def shared_copy(self, array: Array, text: str) -> Array:
        """Return a copy of the first rank's ``array`` in shared memory, in C order (collective).

        The memory is given back when no rank holds an array over it any more.

        Args:
            array: In host memory, of the same shape and dtype on every rank.
            text: Name of the array, for reports; the same on every rank.

        Raises:
            MismatchError: Ranks gave different texts, or do something else.
            MemoryError: There is no room; on all ranks.
        """
        memory = self._comm.common_memory(array.nbytes, text)
        if memory is None:
            raise MemoryError(
                f"{text}: there is no room in /dev/shm for {array.nbytes} bytes; expected room for one copy of all "
                "variables: make it larger (docker run --shm-size=8g, mount -o remount,size=8g /dev/shm), or use "
                "mpidist.MirroredStrategy(), which keeps a copy in the memory of each rank"
            )
        shared: Array = memory.view(array.dtype).reshape(array.shape)
        with self.write_block(text) as writes:
            if writes:
                shared[...] = array
        return shared

    @contextmanager
    def write_block(self, text: str) -> Iterator[bool]:
        """Provide a block in which one rank, given True, may write shared memory (collective).

        All meet, the first rank writes, and all meet again. A block inside it belongs to it.

        Args:
            text: Name of the act, for reports; the same on every rank.

        Raises:
            MismatchError: Another rank is about to do something else.
            PeerError: Another rank failed on its way here, or in the block.
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
