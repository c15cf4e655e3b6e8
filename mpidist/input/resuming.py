"""Going on in the middle of a pass, on the ranks that began it or on others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mpidist.core.seed import undisturbed
from mpidist.input.continued_batches import ContinuedBatches, RedealtElements, RejoinedBatches
from mpidist.input.dealing import choose_assignment
from mpidist.input.input_workers import WorkerLayout
from mpidist.input.local_batches import DealtBatches, LocalBatches
from mpidist.input.pipeline_seeds import drawn_seeds, last_batch_size, pipeline_numbers, seeds_for
from mpidist.input.position import Position
from mpidist.input.skipping import outline, skip_rows


@dataclass(frozen=True)
class Dealing:
    """How a dataset is divided, whoever shares it.

    Args:
        deal: Returns what a worker of a layout reads.
        assignment: That of the dataset's options.
    """

    deal: Callable[[WorkerLayout], LocalBatches]
    assignment: str | None = None


@dataclass(frozen=True)
class Remainder:
    """What is left of a pass.

    Args:
        batches: What this worker reads.
        start: How many of its steps have been taken.
        position: Where the pass stands, before any step that is taken from here on.
    """

    batches: LocalBatches
    start: int
    position: Position

    def after(self, steps: int) -> Position:
        """Return the position after so many more steps."""
        per_step = self.batches.elements_per_step
        if per_step is None:
            return replace(self.position, steps=self.position.steps + steps)
        return replace(self.position, elements=self.position.elements + steps * per_step)

    @property
    def is_beyond_end(self) -> bool:
        """Whether more has been taken than there is, as far as that is known."""
        return isinstance(self.batches, ContinuedBatches) and self.batches.is_beyond_end

    def previous_pipelines(self) -> tuple[str, ...]:
        """Return what the workers read that began the pass, if others go on with it: all must see the same."""
        previous = self.batches.previous if isinstance(self.batches, ContinuedBatches) else ()
        return tuple(f"{node}, {node.cardinality} elements" for batches in previous for node in batches.nodes)


def remainder_from(position: Position, dealing: Dealing, current: LocalBatches, total: int) -> Remainder:
    """Return how a pass goes on from ``position``.

    In the layout that began it every worker goes on in its own part. In another one, global batches that all workers
    know are dealt by the numbers of their rows; else each worker reads what is left for all.

    Args:
        position: Of a pass over the same pipeline.
        dealing: How the dataset is divided.
        current: What this worker reads of a whole pass.
        total: Steps of a whole pass.

    Raises:
        ValueError: The position is that of another dataset or division, of another batch size where that cannot change,
            or behind the end.
    """
    counts = position.replica_counts
    same_layout = counts == current.workers.replica_counts
    layouts = [WorkerLayout(len(counts), worker, counts) for worker in range(len(counts))]
    with undisturbed():
        previous = [current] if same_layout else [dealing.deal(layouts[0])]
        _require_same_division(position, previous[0])
        if position.elements or not (same_layout or isinstance(previous[0], DealtBatches)):
            previous = [dealing.deal(layout) for layout in layouts]
    for batches in previous:
        _require_same_pipelines(position, batches)
    position = _for_batch_size(position, previous[0])
    remainder = _remainder(position, dealing, current, previous)
    steps = total if remainder.batches is current else remainder.batches.steps
    rows = previous[0].nodes[0].row_count() if position.rows else -1
    if 0 <= steps < remainder.start or 0 <= rows < position.rows or remainder.is_beyond_end:
        raise ValueError(
            f"the state is behind the end of this dataset: {position.rows} rows and {position.steps} steps have been "
            "taken; expected the same data"
        )
    return remainder


def _remainder(position: Position, dealing: Dealing, current: LocalBatches, previous: list[LocalBatches]) -> Remainder:
    first, here = previous[0], current.workers
    if first is current and not position.rows:
        return Remainder(current, position.steps, position)
    if isinstance(first, DealtBatches):
        node = skip_rows(first.node, position.rows)
        assignment = choose_assignment(dealing.assignment, here.replica_counts)
        return Remainder(DealtBatches(here, node, assignment), position.steps, position)
    seeds = [seeds_for(batches, position) for batches in previous]
    rest: ContinuedBatches
    if first.is_cut:
        assignment = choose_assignment(dealing.assignment, here.replica_counts)
        rest = RejoinedBatches(here, previous, seeds, position.steps, assignment)
    else:
        rest = RedealtElements(here, previous, seeds, position.steps, position.elements)
    return Remainder(rest, 0, position)


def going_on(beginning: Position, position: Position) -> Position:
    """Return the beginning of the passes that follow the one of ``position``, in the layout of ``beginning``."""
    if len(position.seeds) == len(beginning.seeds):
        seeds = position.seeds
    else:
        first = position.seeds[0]
        seeds = tuple(first[: len(own)] + own[len(first) :] for own in beginning.seeds)
    return replace(beginning, seeds=seeds)


def _require_same_division(position: Position, first: LocalBatches) -> None:
    if first.division != position.division:
        raise ValueError(
            f"the state is that of a dataset of which each rank got {position.division}, and of this one it would have "
            f"got {first.division}; expected the same method of the strategy, and the same AutoShardPolicy"
        )


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
    """Return the same position, counted in batches of the size that there is now."""
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
