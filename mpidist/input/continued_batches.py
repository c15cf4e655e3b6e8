"""The rest of a pass that other ranks began: what their replicas would have got, dealt to those there are now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, zip_longest
from typing import Any

from mpidist.input import dealing
from mpidist.input.elements import cut, join, row_count
from mpidist.input.input_workers import WorkerLayout
from mpidist.input.local_batches import MISSING, LocalBatches, longest
from mpidist.input.reordering import INFINITE, UNKNOWN, Pass, Shuffle


class ContinuedBatches(LocalBatches):
    """What is left of a pass, read as the workers that began it would have read it.

    Every worker reads what is left for all of them, and uses its part.

    Args:
        workers: Who shares the rest.
        previous: What each of the workers that began the pass reads.
        seeds: Of each of them, what stands in for the seeds of shuffles.
        taken: Steps that they have taken.
        steps: Number of steps that are left, -1 without end, -2 unknown.

    Attributes:
        is_beyond_end: Whether more has been taken than there is.
    """

    is_beyond_end = False

    def __init__(
        self,
        workers: WorkerLayout,
        previous: Sequence[LocalBatches],
        seeds: Sequence[Mapping[Shuffle, tuple[int, ...]]],
        taken: int,
        steps: int,
    ) -> None:
        super().__init__(workers, previous[0].nodes, steps)
        self.division = previous[0].division
        self.is_cut = previous[0].is_cut
        self.previous = previous
        self.seeds = seeds
        self.taken = taken

    def _previous_steps(self, run: Pass, start: int) -> Iterator[list[Any]]:
        """Yield what all replicas together would have got in each step, without what is missing."""
        runs = [replace(run, seeds=seeds) for seeds in self.seeds]
        steps = [batches.open(own, self.taken + start) for batches, own in zip(self.previous, runs, strict=True)]
        for step in zip_longest(*steps, fillvalue=()):
            yield [part for parts in step for part in parts if part is not MISSING]

    def local_specs(self) -> list[Any] | None:
        """Return nothing: the dataset itself tells."""
        return None


class RejoinedBatches(ContinuedBatches):
    """Each step has the rows that it would have had, cut anew (rule A)."""

    def __init__(
        self,
        workers: WorkerLayout,
        previous: Sequence[LocalBatches],
        seeds: Sequence[Mapping[Shuffle, tuple[int, ...]]],
        taken: int,
        assignment: str,
    ) -> None:
        steps = longest([batches.steps for batches in previous])
        super().__init__(workers, previous, seeds, taken, steps - taken if steps >= 0 else steps)
        self.assignment = assignment
        self.is_beyond_end = 0 <= steps < taken

    def open(self, run: Pass, start: int = 0) -> Iterator[list[Any]]:
        """Yield the parts of the rows of each step."""
        layout = self.workers
        for parts in self._previous_steps(run, start):
            filled = [part for part in parts if row_count(part)] or parts[:1]
            batch = filled[0] if len(filled) == 1 else join(filled)
            rows = dealing.local_rows(row_count(batch), layout.replica_counts, layout.worker_id, self.assignment)
            yield [cut(batch, first, stop) for first, stop in rows]


class RedealtElements(ContinuedBatches):
    """The next elements go to all replicas in turn, as they are."""

    def __init__(
        self,
        workers: WorkerLayout,
        previous: Sequence[LocalBatches],
        seeds: Sequence[Mapping[Shuffle, tuple[int, ...]]],
        taken: int,
        elements: int,
    ) -> None:
        steps = INFINITE if INFINITE in [batches.steps for batches in previous] else UNKNOWN
        super().__init__(workers, previous, seeds, taken, steps)
        self.elements = elements
        # As in a whole pass: the steps of a lone worker whose batches all have one shape keep theirs.
        self.whole_steps_only = workers.num_workers == 1 and not any(
            node.dynamic for batches in previous for node in batches.nodes
        )
        self.elements_per_step = workers.num_replicas_in_sync

    def open(self, run: Pass, start: int = 0) -> Iterator[list[Any]]:
        """Yield the elements of the local replicas."""
        count, ids = self.workers.num_replicas_in_sync, self.workers.local_replica_ids
        elements = islice(chain.from_iterable(self._previous_steps(run, 0)), self.elements + start * count, None)
        while step := list(islice(elements, count)):
            if len(step) < count and self.whole_steps_only:
                return
            own = step[ids[0] : ids[-1] + 1]
            if own or self.workers.num_workers == 1:
                yield own + [MISSING] * (len(ids) - len(own))
