"""Batches of a worker's own stream, cut anew for its replicas: rule B, or rule A where batches have no known size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any, Generic, TypeVar

from mpidist.input import dealing, row_indices
from mpidist.input.element_spec import with_rows
from mpidist.input.elements import as_element, cut, join, row_count
from mpidist.input.input_workers import WorkerLayout
from mpidist.input.local_batches import MISSING, LocalBatches, check_batched
from mpidist.input.pipeline import Items, Node, require_items
from mpidist.input.reordering import Pass
from mpidist.input.row_indices import RowIndex
from mpidist.input.skipping import last_batching, skip_elements

T = TypeVar("T")


class _Pieces(Generic[T]):
    """What batches are to the cutting: things of some length, that can be cut and joined."""

    def __init__(
        self, length: Callable[[T], int], part: Callable[[T, int, int], T], join: Callable[[Sequence[T]], T]
    ) -> None:
        self.length, self.part, self.join = length, part, join


_ROW_NUMBERS: _Pieces[RowIndex] = _Pieces(len, lambda index, start, stop: index[start:stop], row_indices.concatenate)
_ARRAYS: _Pieces[Any] = _Pieces(row_count, cut, join)


def recut(
    batches: Iterator[T], sizes: Sequence[int], pieces: _Pieces[T], rows_before: int = 0, first: int = 0
) -> Iterator[T]:
    """Yield the rows of all batches in parts of the given sizes, which repeat; the last part may be smaller.

    A part of size 0 is one without rows; none comes after the last row.

    Args:
        batches: The batches.
        sizes: Of the parts.
        pieces: What batches are.
        rows_before: So many rows are left out.
        first: The place in ``sizes`` of the first part after them.
    """
    batch, start, length = None, 0, 0
    while rows_before > length - start:
        rows_before -= length - start
        batch = next(batches, None)
        if batch is None:
            return
        start, length = 0, pieces.length(batch)
    start += rows_before
    for size in islice(cycle(sizes), first, None):
        parts: list[T] = []
        missing = size
        while missing or not parts:
            while start == length:
                batch = next(batches, None)
                if batch is None:
                    break
                start, length = 0, pieces.length(batch)
            if batch is None:
                break
            stop = min(start + missing, length)
            parts.append(pieces.part(batch, start, stop))
            missing -= stop - start
            start = stop
        if not parts:
            return
        yield parts[0] if len(parts) == 1 else pieces.join(parts)


class RecutBatches(LocalBatches):
    """What this worker's replicas get of the batches that the worker reads for itself.

    Where the batch size of the pipeline is known the stream is cut by rule B, so that all workers together take the
    rows of one global batch in a step. Where it is not, every batch is cut into a part for each replica of all workers
    (rule A), and the local ones take these in turn.

    Args:
        workers: Who shares the input.
        given: The pipeline as it was given.
        node: What of it this worker reads.
        division: See ``LocalBatches``.

    Attributes:
        sizes: The sizes of sub-batches, which repeat; None for rule A.
    """

    def __init__(self, workers: WorkerLayout, given: Node, node: Node, division: str) -> None:
        size = node.batch_size()
        counts = workers.replica_counts
        self.sizes = None if size is None else dealing.sub_batch_sizes(size, counts, workers.worker_id)
        rows = node.row_count() if self.sizes else node.cardinality
        if rows >= 0:
            parts = dealing.count_sub_batches(rows, self.sizes) if self.sizes else rows * workers.num_replicas_in_sync
            rows = -(-parts // workers.num_local_replicas)
        super().__init__(workers, (given,), rows)
        self.node = node
        self.division = division
        self._empty: Any = None

    def open(self, run: Pass, start: int = 0) -> Iterator[list[Any]]:
        """Yield groups of consecutive parts of a pass."""
        node, first = self.node, start * self.workers.num_local_replicas
        if isinstance(node, Items) and node.table is not None:
            return run.read_ahead(lambda: self._read_groups(node, run, first), node.read_ahead)
        return self._groups(self._parts(node, lambda same: map(as_element, same.elements(run)), _ARRAYS, first))

    def _parts(
        self, node: Node, batches_of: Callable[[Node], Iterator[T]], pieces: _Pieces[T], first: int
    ) -> Iterator[T]:
        if self.sizes is not None:
            return self._recut(node, batches_of, pieces, first)
        count = self.workers.num_replicas_in_sync
        batches, parts_more = divmod(first, count)
        parts = (
            pieces.part(batch, start, stop)
            for batch in batches_of(skip_elements(node, batches))
            for start, stop in dealing.parts(pieces.length(batch), count)
        )
        return islice(parts, parts_more, None)

    def _recut(
        self, node: Node, batches_of: Callable[[Node], Iterator[T]], pieces: _Pieces[T], first: int
    ) -> Iterator[T]:
        assert self.sizes is not None
        cycles, parts_more = divmod(first, len(self.sizes))
        rows = cycles * sum(self.sizes) + sum(self.sizes[:parts_more])
        made = last_batching(node)
        if made is not None:
            # All batches but the last have that size.
            node, rows = skip_elements(node, rows // made.size), rows % made.size
        return recut(batches_of(node), self.sizes, pieces, rows, parts_more)

    def _groups(self, parts: Iterator[Any]) -> Iterator[list[Any]]:
        replicas = self.workers.num_local_replicas
        while group := list(islice(parts, replicas)):
            yield group + [MISSING] * (replicas - len(group))

    def _read_groups(self, node: Items, run: Pass, first: int) -> Iterator[list[Any]]:
        """Yield the groups of batches that are known by row numbers; only rows that are used are read."""
        assert node.table is not None
        table = node.table.opened(run.readers)

        def read(index: RowIndex) -> Any:
            if len(index):
                batch = table.read(index)
                if self._empty is None:
                    self._empty = cut(batch, 0, 0)
                return batch
            if self._empty is None:
                self._empty = cut(table.read(range(1)), 0, 0)
            return self._empty

        parts = self._parts(node, lambda same: require_items(same).items(run), _ROW_NUMBERS, first)
        return self._groups(map(read, parts))

    def check_batched(self) -> None:
        """Raise ValueError if the elements are known to be single values, which nothing can split."""
        check_batched(self.node)

    def local_specs(self) -> list[Any] | None:
        """Return the specs; sizes of the batch axis are known where all parts of a replica have the same."""
        spec = self.node.spec()
        if spec is None:
            return None
        workers = self.workers
        fixed = workers.num_workers == 1 and self.sizes is not None and self.node.batched and not self.node.dynamic
        return [
            with_rows(spec, self.sizes[replica] if fixed and self.sizes is not None else None)
            for replica in range(workers.num_local_replicas)
        ]
