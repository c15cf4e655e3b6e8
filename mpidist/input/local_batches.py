"""The steps of this worker's replicas, before workers agree about the end.

Global batches are cut by rule A, batches of a worker's own stream by rule B, or by rule A where their size is unknown.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, islice, zip_longest
from typing import Generic

from mpidist.input import dealing, row_indices
from mpidist.input.batching import Batched, last_batching
from mpidist.input.choosing import Skip
from mpidist.input.element_spec import flatten_spec, with_rows
from mpidist.input.elements import as_element, cut, join, require_array, row_count, unbatched
from mpidist.input.graph import INFINITE, Form, GraphNode, Pass, T, combined
from mpidist.input.input_workers import WorkerLayout
from mpidist.input.row_indices import RowIndex
from mpidist.input.steps import Mapped, Prefetched, Zipped
from mpidist.input.tables import RowTable


class _Missing:
    """The type of MISSING."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING = _Missing()
"""Stands in a step for the batch of a replica whose data has run out."""


class LocalBatches(ABC):
    """The steps of one worker: lists with an element for each local replica.

    MISSING stands for an element of a replica without data.

    Attributes:
        workers: The workers that share the input, and the one whose part this is.
        nodes: The pipelines as they were given, before anything of them was dealt to a worker.
        steps: Number of steps that this worker has data for, -1 without end, -2 unknown.
        division: The part of each worker, as a text: the same words for the same rule.
        is_cut: Whether the parts of a step are rows of one global batch, and not whole elements.
        may_run_out: Whether a worker may have nothing left in a step for which others have data.
        elements_per_step: The elements of ``Position`` that all workers take in a step; None where they take a step.
    """

    division: str
    is_cut = True
    may_run_out = True
    elements_per_step: int | None = None

    def __init__(self, workers: WorkerLayout, nodes: Sequence[GraphNode], steps: int) -> None:
        self.workers = workers
        self.nodes = tuple(nodes)
        self.steps = steps

    @abstractmethod
    def open(self, run: Pass, start: int = 0) -> Iterator[list[object]]:
        """Yield the steps of a pass after the first ``start``.

        Data of skipped steps is read only where that cannot be avoided.
        """

    def open_alone(self, run: Pass, start: int = 0) -> Iterator[object]:
        """Yield the elements of the only replica of a lone worker, after the first ``start``."""
        return (element for (element,) in self.open(run, start))

    @abstractmethod
    def local_specs(self) -> list[object] | None:
        """Return the element spec for each local replica, or None without an element.

        May read an element.
        """


def in_steps(elements: Iterator[object], replicas: int, whole_only: bool = False) -> Iterator[list[object]]:
    """Yield the next elements of all replicas.

    At the end MISSING makes up a step, or ``whole_only`` drops it.
    """
    while step := list(islice(elements, replicas)):
        if len(step) == replicas or not whole_only:
            yield step + [MISSING] * (replicas - len(step))


_local_rows = lru_cache(dealing.local_rows)


# Of what is read for a batch.
_ROWS, _NOTHING, _SAMPLE = range(3)


class DealtBatches(LocalBatches):
    """This worker's parts of global batches that are the same on all workers (rule A).

    Where a batch is known by the numbers of its rows only the rows of the local replicas are read. A lone
    replica gets the elements as they are.
    """

    division = "its part of each global batch"
    may_run_out = False

    def __init__(self, workers: WorkerLayout, node: GraphNode, assignment: str) -> None:
        super().__init__(workers, (node,), node.cardinality)
        self.node = node
        self.assignment = assignment
        self._empty: object = None

    def open(self, run: Pass, start: int = 0) -> Iterator[list[object]]:
        """Yield the parts of each global batch of a pass."""
        if self.workers.num_replicas_in_sync == 1:
            return ([element] for element in self.open_alone(run, start))
        node = skip_elements(self.node, start)
        if node.form is Form.BATCHES:
            return node.reading(run, lambda table: self._read_parts(table, node.items(run)))
        return (
            [cut(batch, start, stop) for start, stop in self._local_rows(row_count(batch))]
            for batch in map(as_element, node.elements(run))
        )

    def open_alone(self, run: Pass, start: int = 0) -> Iterator[object]:
        """Yield the elements as they are."""
        return map(as_element, skip_elements(self.node, start).elements(run))

    def _local_rows(self, batch_size: int) -> list[tuple[int, int]]:
        workers = self.workers
        return _local_rows(batch_size, workers.replica_counts, workers.worker_id, self.assignment)

    def _read_parts(self, table: RowTable, batches: Iterator[RowIndex]) -> Iterator[list[object]]:
        """Yield the parts of each batch.

        They are asked for in one call, as workers of a DataLoader read ahead of it. A part without rows is cut from a
        batch of one, the first time.
        """
        plan: deque[int] = deque()  # _ROWS and _NOTHING are parts, _SAMPLE tells what a part without rows looks like
        asked: deque[RowIndex] = deque()
        has_sample = self._empty is not None

        def advance(is_ahead: bool) -> bool:
            nonlocal has_sample
            index = next(batches, None)
            if index is None:
                return False
            parts = self._local_rows(len(index))
            rows = [index[start:stop] for start, stop in parts if start < stop]
            # One that reads ahead gets something of each batch: there may be no end of batches without rows for it.
            if (len(rows) < len(parts) and not has_sample) or (is_ahead and not rows):
                has_sample = True
                plan.append(_SAMPLE)
                asked.append(index[:1])
            plan.extend([_ROWS if start < stop else _NOTHING for start, stop in parts])
            asked.extend(rows)
            return True

        def wanted() -> Iterator[RowIndex]:
            while asked or advance(True):
                yield asked.popleft()

        def in_turn() -> Iterator[object]:
            read = table.each_batch(wanted())
            while plan or advance(False):
                kind = plan.popleft()
                if kind == _NOTHING:
                    yield self._empty
                elif kind == _ROWS:
                    yield next(read)
                else:
                    self._empty = _without_rows(next(read))

        return map(list, zip(*[in_turn()] * self.workers.num_local_replicas, strict=True))

    def local_specs(self) -> list[object] | None:
        """Return the specs.

        Sizes of the batch axis are known where every global batch has the same.
        """
        spec = self.node.spec()
        count = self.workers.num_local_replicas
        if spec is None or self.workers.num_replicas_in_sync == 1:
            return None if spec is None else [spec] * count
        if self.workers.num_workers > 1 or self.node.dynamic:
            return [with_rows(spec, None)] * count
        rows = next((leaf.shape[0] for leaf in flatten_spec(spec) if leaf.shape), None)
        return [with_rows(spec, stop - start) for start, stop in self._local_rows(rows or 0)]


def _without_rows(batch: object) -> object:
    # A collate_fn may have made something else than batches, which is an error with the reason here.
    row_count(batch)
    return cut(batch, 0, 0)


def check_batched(node: GraphNode) -> None:
    """Raise ValueError if ``node`` is known to give single values, which cannot be split."""
    if node.batched or not node.cardinality:
        return
    for leaf in flatten_spec(node.spec() or ()):
        if not leaf.shape:
            require_array(leaf.dtype)
            raise unbatched(f"single values of {leaf.dtype}")


@dataclass(frozen=True)
class _Pieces(Generic[T]):
    """The operations on batches for cutting: open, length, part and join."""

    batches: Callable[[GraphNode, Pass], Iterator[T]]
    length: Callable[[T], int]
    part: Callable[[T, int, int], T]
    join: Callable[[Sequence[T]], T]


_ROW_NUMBERS = _Pieces[RowIndex](
    lambda node, run: node.items(run), len, lambda index, start, stop: index[start:stop], row_indices.concatenate
)
_ARRAYS = _Pieces[object](lambda node, run: map(as_element, node.elements(run)), row_count, cut, join)


def _recut(batches: Iterator[T], sizes: Sequence[int], pieces: _Pieces[T], rows_before: int, first: int) -> Iterator[T]:
    """Yield the rows of all batches in parts of the given sizes, which repeat.

    The last part may be smaller. A part of size 0 is one without rows; none comes after the last row.

    Args:
        batches: The batches.
        sizes: The sizes of the parts.
        pieces: The operations on batches.
        rows_before: So many rows are left out.
        first: The place in ``sizes`` of the first part after them.
    """
    batch: T | None = None
    start = length = 0
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
    """Batches that the worker reads for itself, cut for its replicas.

    Where the batch size of the pipeline is known the stream is cut by rule B, so that all workers together take the
    rows of one global batch in a step. Where it is not, every batch is cut into a part for each replica of all workers
    (rule A), and the local ones take these in turn.

    Args:
        workers: The workers that share the input.
        given: The pipeline as it was given.
        node: The part of it that this worker reads.
        division: See ``LocalBatches``.

    Attributes:
        sizes: The sizes of sub-batches, which repeat; None for rule A.
    """

    def __init__(self, workers: WorkerLayout, given: GraphNode, node: GraphNode, division: str) -> None:
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
        self._empty: object = None

    def open(self, run: Pass, start: int = 0) -> Iterator[list[object]]:
        """Yield groups of consecutive parts of a pass."""
        node, replicas = self.node, self.workers.num_local_replicas
        first = start * replicas
        if node.form is not Form.BATCHES:
            return in_steps(self._parts(run, _ARRAYS, first), replicas)

        def read(table: RowTable) -> Iterator[list[object]]:
            parts = self._parts(run, _ROW_NUMBERS, first)
            return in_steps((self._read(table, index) for index in parts), replicas)

        return node.reading(run, read)

    def _parts(self, run: Pass, pieces: _Pieces[T], first: int) -> Iterator[T]:
        """Yield the parts of a pass from number ``first`` on."""
        node = self.node
        if self.sizes is None:
            count = self.workers.num_replicas_in_sync
            batches, more = divmod(first, count)
            parts = (
                pieces.part(batch, start, stop)
                for batch in pieces.batches(skip_elements(node, batches), run)
                for start, stop in dealing.parts(pieces.length(batch), count)
            )
            return islice(parts, more, None)
        cycles, more = divmod(first, len(self.sizes))
        rows = cycles * sum(self.sizes) + sum(self.sizes[:more])
        made = last_batching(node)
        if made is not None:
            # All batches but the last have that size.
            node, rows = skip_elements(node, rows // made.size), rows % made.size
        return _recut(pieces.batches(node, run), self.sizes, pieces, rows, more)

    def _read(self, table: RowTable, index: RowIndex) -> object:
        """Return the rows of a part, which may have none. Only the rows in use are read."""
        batch = table.read(index) if len(index) else self._empty
        if self._empty is None:
            self._empty = cut(table.read(range(1)) if batch is None else batch, 0, 0)
        return self._empty if batch is None else batch

    def local_specs(self) -> list[object] | None:
        """Return the specs.

        Sizes of the batch axis are known where all parts of a replica have the same.
        """
        spec = self.node.spec()
        if spec is None:
            return None
        workers = self.workers
        fixed = workers.num_workers == 1 and self.sizes is not None and self.node.batched and not self.node.dynamic
        return [
            with_rows(spec, self.sizes[replica] if fixed and self.sizes is not None else None)
            for replica in range(workers.num_local_replicas)
        ]


class OwnBatches(LocalBatches):
    """Batches of datasets that a function made, which replicas get whole.

    A lone worker whose batches all have one shape keeps it so: a step short of batches is dropped.
    """

    is_cut = False

    def __init__(self, workers: WorkerLayout, nodes: Sequence[GraphNode], steps: int) -> None:
        super().__init__(workers, nodes, steps)
        self.whole_steps_only = keeps_steps_whole(workers, nodes)

    def local_specs(self) -> list[object] | None:
        """Return the specs of the datasets.

        The batch axis is unknown where empty batches may come.
        """
        specs = [node.spec() for node in self.nodes]
        if any(spec is None for spec in specs):
            return None
        if not (self.whole_steps_only or self.steps == INFINITE):
            specs = [with_rows(spec, None) for spec in specs]
        return specs * (self.workers.num_local_replicas // len(specs))


def keeps_steps_whole(workers: WorkerLayout, nodes: Sequence[GraphNode]) -> bool:
    """Return whether a step with too few batches is dropped.

    So all batches have one shape.
    """
    return workers.num_workers == 1 and not any(node.dynamic for node in nodes)


class ConsecutiveBatches(OwnBatches):
    """The worker's own dataset; the local replicas take the next batches in turn."""

    division = "what a function made for it"

    def __init__(self, workers: WorkerLayout, node: GraphNode) -> None:
        steps, replicas = node.cardinality, workers.num_local_replicas
        if steps >= 0:
            steps = steps // replicas if keeps_steps_whole(workers, [node]) else -(-steps // replicas)
        super().__init__(workers, (node,), steps)

    def open(self, run: Pass, start: int = 0) -> Iterator[list[object]]:
        """Yield groups of consecutive batches of a pass."""
        replicas = self.workers.num_local_replicas
        elements = skip_elements(self.nodes[0], start * replicas).elements(run)
        return in_steps(map(as_element, elements), replicas, self.whole_steps_only)


class ReplicaPipelines(OwnBatches):
    """A dataset of its own for each local replica (PER_REPLICA)."""

    division = "what a function made for each of its replicas"

    def __init__(self, workers: WorkerLayout, nodes: Sequence[GraphNode]) -> None:
        counts = [node.cardinality for node in nodes]
        shortest = min((count for count in counts if count != INFINITE), default=INFINITE)
        super().__init__(workers, nodes, shortest if keeps_steps_whole(workers, nodes) else combined(max, counts))

    def open(self, run: Pass, start: int = 0) -> Iterator[list[object]]:
        """Yield the next batch of each pipeline of a pass."""
        streams = [map(as_element, skip_elements(node, start).elements(run)) for node in self.nodes]
        if self.whole_steps_only:
            return (list(step) for step in zip(*streams, strict=False))
        return (list(step) for step in zip_longest(*streams, fillvalue=MISSING))


def skip_elements(node: GraphNode, count: int) -> GraphNode:
    """Return the graph without its first ``count`` elements.

    Rows that are known by number are not read, and functions after ``batch`` are not called for those that are skipped;
    elements of a stream have to be read. Shuffles and repetitions give the same order as without skipping.

    >>> from mpidist.input import Dataset
    >>> print(skip_elements(Dataset.range(10).batch(2).map(len)._node, 3))
    range(0, 10).skip(6).batch(2).map
    """
    if count == 0:
        return node
    if isinstance(node, (Mapped, Prefetched, Zipped)):
        return node.with_inputs([skip_elements(before, count) for before in node.inputs])
    if isinstance(node, Batched):
        return node.with_inputs([skip_elements(node.source, count * node.size)])
    return Skip((node,), count)


def skip_rows(node: GraphNode, count: int) -> GraphNode:
    """Return the graph whose batches begin after ``count`` rows.

    Args:
        node: With a ``last_batching``.
        count: Rows, or elements of a stream, before ``batch``.

    >>> from mpidist.input import Dataset
    >>> print(skip_rows(Dataset.range(10).batch(4).map(len)._node, 3))
    range(0, 10).skip(3).batch(4).map
    """
    if count == 0:
        return node
    skip = skip_elements if isinstance(node, Batched) else skip_rows
    return node.with_inputs([skip(node.source, count)])
