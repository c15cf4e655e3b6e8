"""The board of a node, on which its ranks meet.

It consists of numbers of 8 bytes in shared memory, each written by one rank and read by all.

Every rank has a row: counters, each in a cache line of its own, that only grow and that the others wait for; and two
pages for the numbers that the rank tells the others before they meet. The pages alternate: a page is written again only
after the next meeting, to which nobody comes before having read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpidist.arrays.dtypes import Array, DType
from mpidist.collectives.mpi.waiting import LOOKS_BEFORE_YIELD, Steps, looks_before_yield, relax
from mpidist.topology import import_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

# The counters of a rank: meetings it came to; chunks whose input it has laid out, reduced, and taken the results of.
MET, FILLED, REDUCED, TAKEN = range(4)
_LINE = 8
_COUNTERS = 4 * _LINE
# A page: an identity, numbers in floating point, then whole numbers.
FLOATS = 256
WORDS = 2032
_PAGE = 1 + FLOATS + WORDS
_ROW = _COUNTERS + 2 * _PAGE
_LOOKS_AT_ARRIVAL = 60
# A rank that only looks at memory would not notice messages, nor the end of the job.
_LOOKS_BETWEEN_MPI = 1024


def bytes_needed(ranks: int) -> int:
    """Return the shared memory that the board of ``ranks`` ranks takes."""
    return 8 * _ROW * ranks


def sum_of_rows(rows: Array) -> Array:
    """Return the sum of the rows of a matrix, first to last.

    NumPy adds up rows in their order, but eight or more numbers of one column in pairs of pairs.

    Args:
        rows: Each with its numbers side by side.

    >>> sum_of_rows(np.array([[1.0, 2.0], [3.0, 4.0]]))
    array([4., 6.])
    """
    totals: Array = np.add.accumulate(rows)[-1] if rows.shape[1] == 1 else np.add.reduce(rows)
    return totals


class Board:
    """The board of one node (collective over its ranks).

    Args:
        comm: The ranks of the node.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._window, memory = self._make_memory()
        words = memory.view(np.int64)
        rows = words.reshape(self.size, _ROW)
        self._cells = words.data
        self._row = self.rank * _ROW
        self._others = [rank * _ROW for rank in range(self.size) if rank != self.rank]
        starts = [_COUNTERS + page * _PAGE for page in (0, 1)]
        self._identities = [[rank * _ROW + start for rank in range(self.size)] for start in starts]
        self._floats = [rows[:, start + 1 : start + 1 + FLOATS].view(np.float64) for start in starts]
        self._words = [rows[:, start + 1 + FLOATS : start + _PAGE] for start in starts]
        self._float_views: list[dict[int, Array]] = [{}, {}]
        self._meetings = 0
        self._page = 0
        self._patience = looks_before_yield()
        self.chunks = 0
        """Chunks that all reductions so far were cut into; the same on every rank."""

    def _make_memory(self) -> tuple[MPI.Win | None, Array]:
        nbytes = bytes_needed(self.size)
        if self.size == 1:
            return None, np.zeros(nbytes, np.uint8)
        mpi = import_mpi()
        window = mpi.Win.Allocate_shared(nbytes if self.rank == 0 else 0, 8, comm=self._comm)
        segment, _ = window.Shared_query(0)
        memory = np.frombuffer(segment, np.uint8, nbytes)
        if self.rank == 0:
            memory[:] = 0
        window.Lock_all(mpi.MODE_NOCHECK)
        window.Sync()
        self._comm.Barrier()
        return window, memory

    def fence(self) -> None:
        """Order the writes and reads of this rank before and after (MPI_Win_sync)."""
        if self._window is not None:
            self._window.Sync()

    # Telling ----------------------------------------------------------------------------------------------------

    def tell(self, words: Sequence[int]) -> None:
        """Put whole numbers on this rank's next page.

        The others read them after the next meeting.
        """
        self._words[1 - self._page][self.rank, : len(words)] = words

    def told(self, count: int) -> list[list[int]]:
        """Return the first ``count`` whole numbers that each rank told before the last meeting."""
        told: list[list[int]] = self._words[self._page][:, :count].tolist()
        return told

    def announce(self, identity: int) -> None:
        """Put an identity on this rank's next page."""
        self._cells[self._identities[1 - self._page][self.rank]] = identity

    def numbers(self, count: int) -> Array:
        """Return the place for ``count`` float64 on this rank's next page."""
        row: Array = self._views(1 - self._page, count)[self.rank]
        return row

    def all_announced(self, identity: int) -> bool:
        """Return whether every rank announced this identity before the last meeting."""
        cells = self._cells
        return all([cells[place] == identity for place in self._identities[self._page]])

    def sum_of_numbers(self, count: int, dtype: DType) -> Array:
        """Return the sums of the first ``count`` numbers of all ranks before the last meeting.

        They are formed in rank order and in ``dtype``, as all sums of a node are, whatever their size.
        """
        return sum_of_rows(self._views(self._page, count).astype(dtype, copy=False))

    def _views(self, page: int, count: int) -> Array:
        # Making a view costs as much as summing what it shows.
        views = self._float_views[page]
        if count not in views:
            views[count] = self._floats[page][:, :count]
        return views[count]

    # Meeting ----------------------------------------------------------------------------------------------------

    def meet(self) -> Steps[None]:
        """Yield until all ranks of the node have come.

        Each then sees all earlier writes of the others.
        """
        if not self.arrive():
            yield from self.rest_of_meeting()

    def arrive(self) -> bool:
        """Begin a meeting; return whether it is over already.

        The others often are there, or about to come. If not, ``rest_of_meeting`` has to follow.
        """
        self._meetings = meeting = self._meetings + 1
        self.count(MET, meeting)
        cells, at = self._cells, MET * _LINE
        for row in self._others:
            looks = self._patience and _LOOKS_AT_ARRIVAL
            while cells[row + at] < meeting:
                looks -= 1
                if looks < 0:
                    return False
        self.turn()
        return True

    def rest_of_meeting(self) -> Steps[None]:
        """Yield until all ranks have come to the meeting that this one has begun."""
        yield from self.until(MET, self._meetings)
        self.turn()

    def turn(self) -> None:
        """Turn to the pages that were written before a meeting that took place elsewhere."""
        self._page = 1 - self._page
        self.fence()

    def count(self, counter: int, value: int) -> None:
        """Set one of this rank's counters, after all its earlier writes."""
        self.fence()
        self._cells[self._row + counter * _LINE] = value

    def reached(self, counter: int, value: int, ranks: Sequence[int]) -> bool:
        """Return whether the counters of ``ranks`` have reached ``value``.

        Their earlier writes are then seen.
        """
        cells, at = self._cells, counter * _LINE
        for rank in ranks:
            if cells[rank * _ROW + at] < value:
                return False
        self.fence()
        return True

    def until(self, counter: int, value: int) -> Steps[None]:
        """Yield until the counters of all other ranks have reached ``value``."""
        cells, at, looks = self._cells, counter * _LINE, 0
        for row in self._others:
            while cells[row + at] < value:
                looks += 1
                self.pause(looks)
                yield

    def pause(self, looks: int, most_looks: int = LOOKS_BEFORE_YIELD) -> None:
        """Yield the core, and let MPI make progress, after so many looks in vain."""
        relax(looks, min(most_looks, self._patience))
        if looks % _LOOKS_BETWEEN_MPI == 0:
            self._comm.Iprobe()

    def close(self) -> None:
        """Free the memory (collective)."""
        self._cells = memoryview(b"")
        self._floats, self._words, self._float_views = [], [], [{}, {}]
        if self._window is not None:
            self._window.Unlock_all()
            self._window.Free()
