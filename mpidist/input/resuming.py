"""Resuming a pass, on the ranks that began it or on others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest

from mpidist.core.seed import undisturbed
from mpidist.input import dealing
from mpidist.input.elements import cut, join, row_count
from mpidist.input.graph import INFINITE, UNKNOWN, Pass, combined
from mpidist.input.input_workers import WorkerLayout
from mpidist.input.local_batches import MISSING, DealtBatches, LocalBatches, in_steps, keeps_steps_whole, skip_rows
from mpidist.input.position import Position, drawn_seeds, last_batch_size, outline, pipeline_numbers, seeds_for
from mpidist.input.threads import Readers


class ContinuedBatches(LocalBatches):
    """The rest of a pass, read as its original workers would have read it.

    Every worker reads the rest for all of them, and uses its part.

    Args:
        workers: The workers that share the rest.
        previous: The batches of each of the workers that began the pass.
        position: The position of these workers.
        steps: Number of steps that are left, -1 without end, -2 unknown.

    Attributes:
        is_beyond_end: Whether more has been taken than there is, as far as that is known.
    """

    is_beyond_end = False

    def __init__(self, workers: WorkerLayout, previous: Sequence[LocalBatches], position: Position, steps: int) -> None:
        super().__init__(workers, previous[0].nodes, steps)
        self.division = previous[0].division
        self.is_cut = previous[0].is_cut
        self.previous = previous
        self.position = position
        self.seeds = [seeds_for(batches, position) for batches in previous]

    def previous_steps(self, run: Pass, start: int) -> Iterator[list[object]]:
        """Yield the elements of all replicas of the original workers in each step.

        Missing ones are left out.
        """
        runs = [replace(run, seeds=seeds) for seeds in self.seeds]
        first = self.position.steps + start
        steps = [batches.open(own, first) for batches, own in zip(self.previous, runs, strict=True)]
        for step in zip_longest(*steps, fillvalue=()):
            yield [part for parts in step for part in parts if part is not MISSING]

    def local_specs(self) -> list[object] | None:
        """Return None: the specs are those of the dataset."""
        return None


class RejoinedBatches(ContinuedBatches):
    """Steps with the rows that they would have had, cut anew (rule A)."""

    def __init__(
        self, workers: WorkerLayout, previous: Sequence[LocalBatches], position: Position, assignment: str
    ) -> None:
        steps, taken = combined(max, [batches.steps for batches in previous]), position.steps
        super().__init__(workers, previous, position, steps - taken if steps >= 0 else steps)
        self.assignment = assignment
        self.is_beyond_end = 0 <= steps < taken

    def open(self, run: Pass, start: int = 0) -> Iterator[list[object]]:
        """Yield the parts of the rows of each step."""
        layout = self.workers
        for parts in self.previous_steps(run, start):
            filled = [part for part in parts if row_count(part)] or parts[:1]
            batch = filled[0] if len(filled) == 1 else join(filled)
            rows = dealing.local_rows(row_count(batch), layout.replica_counts, layout.worker_id, self.assignment)
            yield [cut(batch, first, stop) for first, stop in rows]


class RedealtElements(ContinuedBatches):
    """Steps in which the next elements go to all replicas in turn, uncut."""

    def __init__(self, workers: WorkerLayout, previous: Sequence[LocalBatches], position: Position) -> None:
        steps = INFINITE if INFINITE in [batches.steps for batches in previous] else UNKNOWN
        super().__init__(workers, previous, position, steps)
        self.whole_steps_only = keeps_steps_whole(workers, [node for batches in previous for node in batches.nodes])
        self.elements_per_step = workers.num_replicas_in_sync

    def open(self, run: Pass, start: int = 0) -> Iterator[list[object]]:
        """Yield the elements of the local replicas."""
        count, ids = self.workers.num_replicas_in_sync, self.workers.local_replica_ids
        taken = self.position.elements + start * count
        elements = islice(chain.from_iterable(self.previous_steps(run, 0)), taken, None)
        for step in in_steps(elements, count, self.whole_steps_only):
            if step[ids[0]] is not MISSING:
                yield step[ids[0] : ids[-1] + 1]


@dataclass(frozen=True)
class Remainder:
    """The rest of a pass.

    Args:
        batches: The batches that this worker reads.
        start: The number of its steps taken.
        position: The position of the pass before any step that is taken from here on.
    """

    batches: LocalBatches
    start: int
    position: Position

    def after(self, steps: int) -> Position:
        """Return the position after ``steps`` more steps."""
        per_step = self.batches.elements_per_step
        if per_step is None:
            return replace(self.position, steps=self.position.steps + steps)
        return replace(self.position, elements=self.position.elements + steps * per_step)

    def run(self, readers: Readers) -> Pass:
        """Return the pass that continues, with ``readers`` for its threads."""
        # Those of another layout have seeds of their own.
        continued = isinstance(self.batches, ContinuedBatches)
        seeds = {} if continued else seeds_for(self.batches, self.position)
        return Pass((self.position.pass_number,), seeds, readers)

    def previous_pipelines(self) -> tuple[str, ...]:
        """Return the pipelines of the original workers, if others continue their pass.

        All workers must see the same.
        """
        previous = self.batches.previous if isinstance(self.batches, ContinuedBatches) else ()
        return tuple(f"{node}, {node.cardinality} elements" for batches in previous for node in batches.nodes)


@dataclass(frozen=True)
class Dealing:
    """The division of a dataset over any workers.

    Args:
        deal: Returns the batches of a worker of a layout.
        assignment: That of the dataset's options.
    """

    deal: Callable[[WorkerLayout], LocalBatches]
    assignment: str | None = None

    def remainder(self, position: Position, current: LocalBatches, total: int) -> Remainder:
        """Return the rest of a pass from ``position`` on.

        In the layout that began it every worker goes on in its own part. In another one, global batches that all
        workers know are dealt by the numbers of their rows; else each worker reads the rest for all.

        Args:
            position: The position of a pass over the same graph.
            current: The batches that this worker reads of a whole pass.
            total: Steps of a whole pass.

        Raises:
            ValueError: The position is that of another dataset or division, of another batch size where that cannot
                change, or behind the end.
        """
        counts = position.replica_counts
        same_layout = counts == current.workers.replica_counts
        layouts = [WorkerLayout(len(counts), worker, counts) for worker in range(len(counts))]
        with undisturbed():
            previous = [current] if same_layout else [self.deal(layouts[0])]
            division = previous[0].division
            if division != position.division:
                raise ValueError(
                    f"the state is that of a dataset of which each rank got {position.division}, and of this one it "
                    f"would have got {division}; expected the same method of the strategy, and the same AutoShardPolicy"
                )
            if position.elements or not (same_layout or isinstance(previous[0], DealtBatches)):
                previous = [self.deal(layout) for layout in layouts]
        for batches in previous:
            _require_same_pipelines(position, batches)
        position = _for_batch_size(position, previous[0])
        remainder = self._rest(position, current, previous)
        rest = remainder.batches
        steps = total if rest is current else rest.steps
        rows = previous[0].nodes[0].row_count() if position.rows else -1
        beyond = isinstance(rest, ContinuedBatches) and rest.is_beyond_end
        if 0 <= steps < remainder.start or 0 <= rows < position.rows or beyond:
            raise ValueError(
                f"the state is behind the end of this dataset: {position.rows} rows and {position.steps} steps have "
                "been taken; expected the same data"
            )
        return remainder

    def _rest(self, position: Position, current: LocalBatches, previous: list[LocalBatches]) -> Remainder:
        first, here = previous[0], current.workers
        if first is current and not position.rows:
            return Remainder(current, position.steps, position)
        if not first.is_cut:
            return Remainder(RedealtElements(here, previous, position), 0, position)
        assignment = dealing.choose_assignment(self.assignment, here.replica_counts)
        if isinstance(first, DealtBatches):
            rest = DealtBatches(here, skip_rows(first.node, position.rows), assignment)
            return Remainder(rest, position.steps, position)
        return Remainder(RejoinedBatches(here, previous, position, assignment), 0, position)


def _require_same_pipelines(position: Position, batches: LocalBatches) -> None:
    numbers = pipeline_numbers(batches)
    if numbers[-1] >= len(position.pipelines) > 1:
        raise ValueError(
            f"the state is that of {len(position.pipelines)} pipelines, and there are more of them now; expected the "
            "same number from dataset_fn"
        )
    for node, number in zip(batches.nodes, numbers, strict=True):
        text, seeds = position.pipeline(number)
        found, shuffles = outline(node), len(drawn_seeds(node))
        if found != text or shuffles != len(seeds):
            raise ValueError(
                f"the state is that of another dataset, with {len(seeds)} shuffles without a seed:\n  {text}\nThis one "
                f"has {shuffles}:\n  {found}\nExpected the same steps over the same data; only prefetch(), and the "
                "size of a batch() that nothing but map() and prefetch() follows, may differ"
            )


def _for_batch_size(position: Position, first: LocalBatches) -> Position:
    """Return the same position, counted in batches of the present size."""
    old, new = position.batch_size, last_batch_size(first)
    if old == new:
        return position
    if not isinstance(first, DealtBatches) or old is None or new is None:
        raise ValueError(
            f"the state is that of a dataset with batch({old}), and this one has batch({new}); expected the same size, "
            "as only AutoShardPolicy.DATA can go on with another one in the middle of a pass: keep "
            f"batch({old}) until the pass ends"
        )
    return replace(position, rows=position.rows + position.steps * old, steps=0, batch_size=new)
