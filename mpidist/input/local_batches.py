"""The steps of one worker's replicas, before the workers agree on the last step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, zip_longest
from typing import Any, Generic

from mpidist.input import row_indices, rules
from mpidist.input.batching import Batched, last_batching
from mpidist.input.combining import Zipped
from mpidist.input.elements import as_element, cut, flatten_spec, join, require_array, row_count, unbatched, with_rows
from mpidist.input.input_options import AutoShardPolicy, DatasetOptions, WorkerLayout
from mpidist.input.nodes import INFINITE, Form, GraphNode, Pass, T, combined
from mpidist.input.row_indices import RowIndex
from mpidist.input.steps import Mapped, Prefetched, skip


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING: Any = _Missing()
"""The element of a replica without data in a step."""


class LocalBatches(ABC):
    """The steps of one worker: lists with an element, or MISSING, for each local replica.

    ``nodes`` are the pipelines of the user. Saved positions contain ``division``, a text of the division rule.
    """

    is_cut = True  # the parts of a step are rows of one global batch, not whole elements
    may_run_out = True  # a worker may have no data in a step in which others have some
    elements_per_step: int | None = None  # that all workers take in a step. None: positions count steps.

    def __init__(self, workers: WorkerLayout, nodes: Sequence[GraphNode], steps: int, division: str) -> None:
        self.workers = workers
        self.nodes = tuple(nodes)
        self.steps = steps
        self.division = division

    @abstractmethod
    def open(self, run: Pass, start: int = 0) -> Iterator[list[object]]:
        """Yield the steps of a pass after the first ``start``. Skipped data is read only if necessary."""

    def open_alone(self, run: Pass, start: int = 0) -> Iterator[object]:
        """Yield the elements of the only replica of a single worker, after the first ``start``."""
        return (element for (element,) in self.open(run, start))

    def local_specs(self) -> list[object] | None:
        """Return the element spec for each local replica, or None if unknown. May read an element."""
        return None


def grouped(elements: Iterator[T], size: int) -> Iterator[list[T]]:
    """Yield lists of ``size`` elements, the last one maybe shorter."""
    while group := list(islice(elements, size)):
        yield group


def padded(group: Sequence[T], size: int) -> list[T]:
    """Return ``group`` with MISSING up to ``size``."""
    return [*group, *[MISSING] * (size - len(group))]


def check_batched(node: GraphNode) -> None:
    """Raise ValueError if ``node`` is known to yield single values, which cannot be split."""
    if node.batched or not node.cardinality:
        return
    for leaf in flatten_spec(node.spec() or ()):
        if not leaf.shape:
            require_array(leaf.dtype)
            raise unbatched(f"single values of {leaf.dtype}")


@dataclass(frozen=True)
class _Pieces(Generic[T]):
    """Operations on batches, or on their row numbers: open, measure, cut and join them."""

    open: Callable[[GraphNode, Pass], Iterator[T]]
    length: Callable[[T], int]
    part: Callable[[T, int, int], T]
    join: Callable[[Sequence[T]], T]


_ROW_NUMBERS = _Pieces[RowIndex](
    lambda node, run: node.items(run), len, lambda index, start, stop: index[start:stop], row_indices.concatenate
)
_ARRAYS = _Pieces[object](lambda node, run: map(as_element, node.elements(run)), row_count, cut, join)


class CutBatches(LocalBatches):
    """Batches of ``node``, of which each replica gets some rows. Rows with numbers are cut before they are read."""

    def __init__(self, workers: WorkerLayout, given: GraphNode, node: GraphNode, steps: int, division: str) -> None:
        super().__init__(workers, (given,), steps, division)
        self.node = node
        self._empty: object = None

    @abstractmethod
    def parts(self, run: Pass, start: int, pieces: _Pieces[T]) -> Iterator[list[T]]:
        """Yield the parts of each step after the first ``start``. The last step may have fewer."""

    def open(self, run: Pass, start: int = 0) -> Iterator[list[object]]:
        """Yield the parts of each step."""
        if self.node.form is not Form.BATCHES:
            steps: Iterator[list[object]] = self.parts(run, start, _ARRAYS)
        else:
            steps = run.read_ahead(lambda: self._read(self.parts(run, start, _ROW_NUMBERS), run), self.node.read_ahead)
        count = self.workers.num_local_replicas
        return (step if len(step) == count else padded(step, count) for step in steps)

    def _read(self, steps: Iterator[list[RowIndex]], run: Pass) -> Iterator[list[object]]:
        table = self.node.table
        for step in table.each_step(steps, run):
            if any(part is None for part in step):
                if self._empty is None:
                    # Any row has the structure of a part without rows.
                    batch = next((part for part in step if part is not None), None)
                    batch = table.read(range(1), run) if batch is None else batch
                    # A collate_fn may return something else than batches, which is an error here.
                    row_count(batch)
                    self._empty = cut(batch, 0, 0)
                step = [self._empty if part is None else part for part in step]
            yield step


class DealtBatches(CutBatches):
    """A worker's parts of global batches, which are the same on all workers (rule A)."""

    may_run_out = False

    def __init__(self, workers: WorkerLayout, node: GraphNode, assignment: str) -> None:
        super().__init__(workers, node, node, node.cardinality, "its part of each global batch")
        self.assignment = assignment

    def _local_rows(self, batch_size: int) -> list[tuple[int, int]]:
        workers = self.workers
        return rules.local_rows(batch_size, workers.replica_counts, workers.worker_id, self.assignment)

    def parts(self, run: Pass, start: int, pieces: _Pieces[T]) -> Iterator[list[T]]:
        """Yield the local parts of each global batch."""
        for batch in pieces.open(skip_elements(self.node, start), run):
            yield [pieces.part(batch, first, stop) for first, stop in self._local_rows(pieces.length(batch))]

    def open(self, run: Pass, start: int = 0) -> Iterator[list[object]]:
        """Yield the parts of each step. A single replica gets the elements unchanged."""
        if self.workers.num_replicas_in_sync == 1:
            return ([element] for element in self.open_alone(run, start))
        return super().open(run, start)

    def open_alone(self, run: Pass, start: int = 0) -> Iterator[object]:
        """Yield the elements unchanged."""
        return map(as_element, skip_elements(self.node, start).elements(run))

    def local_specs(self) -> list[object] | None:
        """Return the specs. The batch axis is known if every global batch has the same size."""
        spec, count = self.node.spec(), self.workers.num_local_replicas
        if spec is None or self.workers.num_replicas_in_sync == 1:
            return None if spec is None else [spec] * count
        if self.workers.num_workers > 1 or self.node.dynamic:
            return [with_rows(spec, None)] * count
        rows = next((leaf.shape[0] for leaf in flatten_spec(spec) if leaf.shape), None)
        return [with_rows(spec, stop - start) for start, stop in self._local_rows(rows or 0)]


class RecutBatches(CutBatches):
    """Batches that a worker reads for itself, cut for its replicas.

    By rule B if the batch size of the pipeline is known. Otherwise by rule A: every batch is cut into a part for each
    replica of all workers, and the local replicas take these parts in turn.
    """

    def __init__(self, workers: WorkerLayout, given: GraphNode, node: GraphNode, division: str) -> None:
        size, counts = node.batch_size(), workers.replica_counts
        # The cycle of sub-batch sizes, or None for rule A.
        self.sizes = None if size is None else rules.sub_batch_sizes(size, counts, workers.worker_id)
        steps = node.row_count() if self.sizes else node.cardinality
        if steps >= 0:
            parts = rules.count_sub_batches(steps, self.sizes) if self.sizes else steps * workers.num_replicas_in_sync
            steps = -(-parts // workers.num_local_replicas)
        super().__init__(workers, given, node, steps, division)

    def parts(self, run: Pass, start: int, pieces: _Pieces[T]) -> Iterator[list[T]]:
        """Yield groups of consecutive parts."""
        replicas = self.workers.num_local_replicas
        return grouped(self._stream(run, start * replicas, pieces), replicas)

    def _stream(self, run: Pass, first: int, pieces: _Pieces[T]) -> Iterator[T]:
        """Yield the parts of a pass from number ``first`` on."""
        node = self.node
        if self.sizes is None:
            count = self.workers.num_replicas_in_sync
            batches, more = divmod(first, count)
            parts = (
                pieces.part(batch, start, stop)
                for batch in pieces.open(skip_elements(node, batches), run)
                for start, stop in rules.parts(pieces.length(batch), count)
            )
            return islice(parts, more, None)
        cycles, more = divmod(first, len(self.sizes))
        rows = cycles * sum(self.sizes) + sum(self.sizes[:more])
        batch = last_batching(node)
        if batch is not None:  # all batches but the last have its size
            node, rows = skip_elements(node, rows // batch.size), rows % batch.size
        return _recut(pieces.open(node, run), islice(cycle(self.sizes), more, None), pieces, rows)

    def local_specs(self) -> list[object] | None:
        """Return the specs. The batch axis is known if all parts of a replica have the same size."""
        spec, workers = self.node.spec(), self.workers
        if spec is None:
            return None
        sizes: Sequence[int | None] = [None] * workers.num_local_replicas
        if workers.num_workers == 1 and self.sizes is not None and self.node.batched and not self.node.dynamic:
            sizes = self.sizes[: workers.num_local_replicas]
        return [with_rows(spec, size) for size in sizes]


def _recut(batches: Iterator[T], sizes: Iterator[int], pieces: _Pieces[T], dropped: int) -> Iterator[T]:
    """Yield all rows but the first ``dropped`` ones in parts of the given sizes."""
    batch: T | None = None
    start = length = 0

    def advance() -> bool:
        nonlocal batch, start, length
        batch = next(batches, None)
        if batch is None:
            return False
        start, length = 0, pieces.length(batch)
        return True

    while dropped > length - start:
        dropped -= length - start
        if not advance():
            return
    start += dropped
    for missing in sizes:
        parts: list[T] = []
        # A part of size 0 is a batch without rows. After the last row there are no more parts.
        while missing or not parts:
            while start == length:
                if not advance():
                    break
            if batch is None:
                break
            stop = min(start + missing, length)
            parts.append(pieces.part(batch, start, stop))
            missing -= stop - start
            start = stop
        if not parts:
            return
        yield parts[0] if len(parts) == 1 else pieces.join(parts)


def dealt_batches(
    node: GraphNode, options: DatasetOptions, workers: WorkerLayout
) -> tuple[DealtBatches | RecutBatches, AutoShardPolicy]:
    """Return a worker's batches of a shared dataset, and the policy for it."""
    policy = rules.policy_in_force(node, options.auto_shard_policy, workers.num_workers)
    own = rules.own_elements(node, policy, workers)
    batches: DealtBatches | RecutBatches
    if policy is AutoShardPolicy.DATA or workers.num_replicas_in_sync == 1:
        batches = DealtBatches(workers, own, rules.choose_assignment(options.assignment, workers.replica_counts))
    else:
        batches = RecutBatches(workers, node, own, f"its rows by AutoShardPolicy.{policy.name}")
    if workers.num_replicas_in_sync > 1:
        check_batched(own)
    return batches, policy


def batches_of_worker(node: GraphNode, options: DatasetOptions, workers: WorkerLayout) -> LocalBatches:
    """Return a worker's batches of a shared dataset."""
    return dealt_batches(node, options, workers)[0]


class OwnBatches(LocalBatches):
    """Whole batches of datasets that a function made, one for the worker or each replica.

    A single worker whose batches all have one shape drops a last step with too few batches.
    """

    is_cut = False

    def __init__(self, workers: WorkerLayout, nodes: Sequence[GraphNode], per_replica: bool) -> None:
        self.each = workers.num_local_replicas // len(nodes)
        self.whole_steps_only = keeps_steps_whole(workers, nodes)
        counts = [node.cardinality for node in nodes]
        if self.whole_steps_only:
            counts = [count if count < 0 else count // self.each for count in counts]
            steps = min((count for count in counts if count != INFINITE), default=INFINITE)
        else:
            steps = combined(max, [count if count < 0 else -(-count // self.each) for count in counts])
        made_for = "each of its replicas" if per_replica else "it"
        super().__init__(workers, nodes, steps, f"what a function made for {made_for}")

    def open(self, run: Pass, start: int = 0) -> Iterator[list[object]]:
        """Yield the next batches of each pipeline."""
        nodes = [skip_elements(node, start * self.each) for node in self.nodes]
        streams = [grouped(map(as_element, node.elements(run)), self.each) for node in nodes]
        for groups in zip_longest(*streams, fillvalue=()):
            step = [part for group in groups for part in padded(group, self.each)]
            if self.whole_steps_only and any(part is MISSING for part in step):
                return
            yield step

    def local_specs(self) -> list[object] | None:
        """Return the specs of the datasets. The batch axis is unknown if empty batches may occur."""
        specs = [node.spec() for node in self.nodes]
        if any(spec is None for spec in specs):
            return None
        if not (self.whole_steps_only or self.steps == INFINITE):
            specs = [with_rows(spec, None) for spec in specs]
        return specs * self.each


def keeps_steps_whole(workers: WorkerLayout, nodes: Sequence[GraphNode]) -> bool:
    """Return whether incomplete steps are dropped, so that all batches have one shape."""
    return workers.num_workers == 1 and not any(node.dynamic for node in nodes)


def skip_elements(node: GraphNode, count: int) -> GraphNode:
    """Return the graph without its first ``count`` elements.

    Rows with numbers are not read, and functions after ``batch`` are not called for skipped elements. Streams are read.
    Shuffles keep their order.

    >>> from mpidist.input import Dataset
    >>> print(skip_elements(Dataset.range(10).batch(2).map(len)._node, 3))
    range(0, 10).skip(6).batch(2).map
    """
    if count == 0:
        return node
    if isinstance(node, (Mapped, Prefetched, Zipped)) and not node.is_source:
        return node.with_inputs([skip_elements(before, count) for before in node.inputs])
    if isinstance(node, Batched):
        return node.with_inputs([skip_elements(node.source, count * node.size)])
    return skip(node, count)


def skip_rows(node: GraphNode, count: int) -> GraphNode:
    """Return the graph whose ``last_batching`` begins after ``count`` rows."""
    if count == 0:
        return node
    skip_input = skip_elements if isinstance(node, Batched) else skip_rows
    return node.with_inputs([skip_input(node.source, count)])
