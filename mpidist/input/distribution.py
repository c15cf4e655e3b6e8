"""Passes over a dataset: agreement of the workers, positions of iterators, and resumed passes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain, islice, zip_longest
from typing import Any

from mpidist.core.context import StrategyLike
from mpidist.core.errors import MismatchError
from mpidist.core.seed import undisturbed
from mpidist.core.text import said_lines
from mpidist.input import rules
from mpidist.input.batching import Batched, last_batching
from mpidist.input.device_feed import fetch_places
from mpidist.input.elements import PerReplicaSpec, cut, flatten_spec, join, map_spec, row_count, with_rows
from mpidist.input.input_options import InputOptions, InputWorkers, WorkerLayout
from mpidist.input.local_batches import (
    MISSING,
    DealtBatches,
    LocalBatches,
    grouped,
    keeps_steps_whole,
    padded,
    skip_rows,
)
from mpidist.input.nodes import UNKNOWN, GraphNode, Pass, Seed, array_samples, combined, described
from mpidist.input.steps import Mapped, Prefetched
from mpidist.input.threads import Readers

FORMAT = "mpidist iterator"
VERSION = 1

_log = logging.getLogger("mpidist")
# Outline and seeds of a graph.
_Pipeline = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Position:
    """The progress of a pass, and all that the order of its elements depends on.

    The numbers count from the beginning of the pass: first ``rows``, then ``steps``, then ``elements``. They, the
    seeds and ``replica_counts`` belong to the ranks that began the pass, even if other ranks resume it.

    Attributes:
        pass_number: The number of the pass over the dataset, from 0.
        replica_counts: Local replicas of every worker.
        division: The text of the division rule.
        pipelines: Outlines of the pipelines of all workers in turn. Only one if all are equal.
        seeds: The seeds of each pipeline that the user did not choose.
        batch_size: The size of the last ``batch`` of the first pipeline, or None.
        own_orders: Whether each worker has its own order.
        rows: Rows that were taken in global batches of another size.
        steps: Steps that all replicas of ``replica_counts`` have taken.
        elements: Elements that were taken after these steps, in the order in which replicas would have got them.

    >>> position = Position(0, (1, 1), "global batches", ("range(0, 10).batch(*)",), ((),), 4, False, steps=2)
    >>> Position.from_json(position.to_json()) == position
    True
    """

    pass_number: int
    replica_counts: tuple[int, ...]
    division: str
    pipelines: tuple[str, ...]
    seeds: tuple[tuple[int, ...], ...]
    batch_size: int | None
    own_orders: bool
    rows: int = 0
    steps: int = 0
    elements: int = 0

    def pipeline(self, number: int) -> _Pipeline:
        """Return outline and seeds of pipeline ``number`` of all workers."""
        number = 0 if len(self.pipelines) == 1 else number
        return self.pipelines[number], self.seeds[number]

    def progress(self) -> str:
        """Return the progress as a text."""
        counts = {"row": self.rows, "step": self.steps, "element": self.elements}
        taken = [f"{count} {word}{'s' * (count != 1)}" for word, count in counts.items() if count or word == "step"]
        return f"pass {self.pass_number + 1}, {' and '.join(taken)} taken"

    def to_json(self) -> dict[str, object]:
        """Return the position in JSON types."""
        content: dict[str, object] = json.loads(json.dumps(asdict(self)))
        return {"format": FORMAT, "version": VERSION, **content}

    @staticmethod
    def from_json(content: object) -> Position:
        """Return the position that :meth:`to_json` has written, after checking it."""
        if not isinstance(content, dict):
            raise TypeError(
                f"state is {content!r} of type {type(content).__name__}. Pass the result of state() of an iterator"
            )
        if content.get("format") != FORMAT or content.get("version") != VERSION:
            raise ValueError(
                f"state has format {content.get('format')!r} and version {content.get('version')!r}; expected "
                f"{FORMAT!r} and {VERSION}, as state() of an iterator returns them"
            )
        for name, is_valid in _CHECKS.items():
            if name not in content or not is_valid(content[name]):
                raise ValueError(
                    f"state is damaged: its {name} is {content.get(name)!r}. Pass what state() of an iterator "
                    "returned, unchanged"
                )
        if len(content["pipelines"]) != len(content["seeds"]):
            raise ValueError("state is damaged: it has other numbers of pipelines and seeds")
        return Position(**{name: _frozen(content[name]) for name in _CHECKS})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_positive(value: object) -> bool:
    return _is_count(value) and value != 0


def _is_list(value: object, is_valid: Callable[[object], bool]) -> bool:
    return isinstance(value, list) and all(map(is_valid, value))


_CHECKS: dict[str, Callable[[object], bool]] = {
    "pass_number": _is_count,
    "replica_counts": lambda value: _is_list(value, _is_positive) and bool(value),
    "division": lambda value: isinstance(value, str),
    "pipelines": lambda value: _is_list(value, lambda text: isinstance(text, str)) and bool(value),
    "seeds": lambda value: _is_list(value, lambda seeds: _is_list(seeds, lambda seed: type(seed) is int and seed >= 0)),
    "batch_size": lambda value: value is None or _is_positive(value),
    "own_orders": lambda value: isinstance(value, bool),
    "rows": _is_count,
    "steps": _is_count,
    "elements": _is_count,
}


def outline(node: GraphNode, mask_batch_size: bool = True) -> str:
    """Return a text that is equal for graphs with the same order of rows.

    >>> from mpidist.input import Dataset
    >>> outline(Dataset.range(10).batch(4).prefetch(2)._node)
    'range(0, 10).batch(*)'
    """
    if isinstance(node, Prefetched):
        return outline(node.source, mask_batch_size)
    # The size of the last batching may change.
    inside = [outline(before, mask_batch_size and isinstance(node, Mapped)) for before in node.inputs]
    text = node.text_of_size("*") if mask_batch_size and isinstance(node, Batched) else node.identity or node.text
    return described(text, inside)


def _drawn_seeds(node: GraphNode) -> list[Seed]:
    """Return the seeds of a graph that the user did not choose."""
    return list(dict.fromkeys(seed for seed in node.seeds() if not seed.given))


def _pipelines_of(batches: LocalBatches) -> list[_Pipeline]:
    return [(outline(node), tuple(seed.number for seed in _drawn_seeds(node))) for node in batches.nodes]


def _pipeline_numbers(batches: LocalBatches) -> range:
    """Return the numbers of a worker's pipelines, counted over all workers."""
    first = batches.workers.worker_id * len(batches.nodes)
    return range(first, first + len(batches.nodes))


def _last_batch_size(batches: LocalBatches) -> int | None:
    batch = last_batching(batches.nodes[0])
    return None if batch is None else batch.size


def _led_by(first: tuple[int, ...], own: tuple[int, ...]) -> tuple[int, ...]:
    """Return the seeds ``own``, replaced by the seeds ``first`` as far as there are any."""
    return first[: len(own)] + own[len(first) :]


def _first_position(batches: LocalBatches, every: Sequence[_Pipeline], own_orders: bool = False) -> Position:
    """Return the beginning of the first pass. All workers use the seeds of the first pipeline."""
    shared = [(text, _led_by(every[0][1], seeds)) for text, seeds in every]
    shared = shared[:1] if len(set(shared)) == 1 else shared
    texts, seeds = zip(*shared, strict=True)
    size = _last_batch_size(batches)
    return Position(0, batches.workers.replica_counts, batches.division, texts, seeds, size, own_orders)


def _seeds_for(batches: LocalBatches, position: Position) -> dict[Seed, tuple[int, ...]]:
    """Return the entropy of a worker's seeds in the pass of ``position``."""
    own = (batches.workers.worker_id,) if position.own_orders else ()
    found = {}
    for node, number in zip(batches.nodes, _pipeline_numbers(batches), strict=True):
        _, seeds = position.pipeline(number)
        found.update({seed: (number, *own) for seed, number in zip(_drawn_seeds(node), seeds, strict=True)})
    return found


class ContinuedBatches(LocalBatches):
    """The remainder of a pass of other workers. Every worker reads the data of all of them, and uses its part."""

    def __init__(
        self, workers: WorkerLayout, previous: Sequence[LocalBatches], position: Position, assignment: str
    ) -> None:
        steps = combined(max, [batches.steps for batches in previous])
        self.is_cut = previous[0].is_cut
        self.is_beyond_end = self.is_cut and 0 <= steps < position.steps
        if not self.is_cut:
            self.elements_per_step = workers.num_replicas_in_sync
            nodes = [node for batches in previous for node in batches.nodes]
            self.whole_steps_only = keeps_steps_whole(workers, nodes)
        if steps >= 0:
            steps = steps - position.steps if self.is_cut else UNKNOWN
        super().__init__(workers, previous[0].nodes, steps, previous[0].division)
        self.previous = previous
        self.position = position
        self.assignment = assignment
        self.seeds = [_seeds_for(batches, position) for batches in previous]

    def _previous_steps(self, run: Pass, start: int) -> Iterator[list[object]]:
        """Yield the elements of all replicas of the original workers in each step."""
        runs = [replace(run, seeds=seeds) for seeds in self.seeds]
        first = self.position.steps + start
        steps = [batches.open(own, first) for batches, own in zip(self.previous, runs, strict=True)]
        for step in zip_longest(*steps, fillvalue=()):
            yield [part for parts in step for part in parts if part is not MISSING]

    def open(self, run: Pass, start: int = 0) -> Iterator[list[object]]:
        """Yield the rows of each original step by rule A, or the elements in turn."""
        layout = self.workers
        if not self.is_cut:
            yield from self._in_turn(run, start)
            return
        for parts in self._previous_steps(run, start):
            filled = [part for part in parts if row_count(part)] or parts[:1]
            batch = filled[0] if len(filled) == 1 else join(filled)
            rows = rules.local_rows(row_count(batch), layout.replica_counts, layout.worker_id, self.assignment)
            yield [cut(batch, first, stop) for first, stop in rows]

    def _in_turn(self, run: Pass, start: int) -> Iterator[list[object]]:
        count, ids = self.workers.num_replicas_in_sync, self.workers.local_replica_ids
        taken = self.position.elements + start * count
        for step in grouped(islice(chain.from_iterable(self._previous_steps(run, 0)), taken, None), count):
            if len(step) > ids[0] and (len(step) == count or not self.whole_steps_only):
                yield padded(step, count)[ids[0] : ids[-1] + 1]


@dataclass(frozen=True)
class Remainder:
    """The remainder of a pass."""

    batches: LocalBatches  # that this worker reads
    start: int  # number of its steps that have been taken
    position: Position  # before the next step

    def after(self, steps: int) -> Position:
        """Return the position after more steps."""
        per_step = self.batches.elements_per_step
        if per_step is None:
            return replace(self.position, steps=self.position.steps + steps)
        return replace(self.position, elements=self.position.elements + steps * per_step)

    def run(self, readers: Readers) -> Pass:
        """Return the pass, with ``readers`` for its threads."""
        # Continued batches have the seeds of the original workers.
        seeds = {} if isinstance(self.batches, ContinuedBatches) else _seeds_for(self.batches, self.position)
        return Pass((self.position.pass_number,), seeds, readers)

    def previous_pipelines(self) -> tuple[str, ...]:
        """Return the pipelines of the original workers. They must be equal on all workers."""
        previous = self.batches.previous if isinstance(self.batches, ContinuedBatches) else ()
        return tuple(f"{node}, {node.cardinality} elements" for batches in previous for node in batches.nodes)


@dataclass(eq=False, repr=False)
class Distribution:
    """The common state of all passes over a dataset."""

    batches: LocalBatches  # that this worker reads
    workers: InputWorkers
    deal: Callable[[WorkerLayout], LocalBatches]  # returns the batches of any worker, to resume its pass
    assignment: str | None = None
    strategy: StrategyLike | None = None  # None for a dataset of this process alone
    options: InputOptions | None = None
    spec: object = field(init=False, default=None)  # of a local batch, None until it is known
    passes: int = field(init=False, default=0)  # begun

    def __post_init__(self) -> None:
        # UNKNOWN: the workers vote in each step. Equal on all workers after agree().
        self.steps = self.batches.steps
        # None: batches stay on the host.
        self.places = fetch_places(self.workers, self.options)

    @cached_property
    def beginning(self) -> Position:
        """The beginning of the next pass, apart from its number. ``agree`` replaces it."""
        return _first_position(self.batches, _pipelines_of(self.batches))

    def agree(self, same_everywhere: bool, own_orders: bool = False) -> None:
        """Let all workers agree on seeds, steps and spec (collective, at most two small exchanges).

        ``same_everywhere``: raise MismatchError if the graphs differ. ``own_orders``: each worker reads all of a graph
        that is the same everywhere, in its own order.
        """
        batches, workers = self.batches, self.workers
        mine = _pipelines_of(batches)
        if workers.communicator is None:
            if workers.first_given is not None and not own_orders and any(seeds for _, seeds in mine):
                first = [*workers.first_given([seeds for _, seeds in mine]), *[()] * len(mine)]
                mine = [(text, _led_by(seeds, own)) for seeds, (text, own) in zip(first, mine, strict=False)]
                self.beginning = _first_position(batches, mine)
            return
        text = " | ".join(f"{node}, {node.cardinality} batches" for node in batches.nodes)
        samples = [sample for node in batches.nodes for sample in array_samples(node)]
        gathered: list[tuple[str, int, list[_Pipeline], int | None, list[int]]] = (
            workers.communicator.all_gather_object((text, batches.steps, mine, _last_batch_size(batches), samples))
        )
        same = len({text for text, *_ in gathered}) == 1
        if same_everywhere and not same:
            plans = {rank: text for rank, (text, *_) in enumerate(gathered)}
            lines = "\n".join(["", *said_lines(plans.items(), "  ")])
            raise MismatchError(
                "experimental_distribute_dataset() got different datasets on different ranks. Pass the same "
                "dataset on every rank. If each rank has its own data, use "
                f"distribute_datasets_from_function(dataset_fn):{lines}",
                plans,
            )
        if same_everywhere and workers.worker_id == 0 and any(samples != gathered[0][-1] for *_, samples in gathered):
            _log.warning(
                "mpidist: experimental_distribute_dataset() was given arrays of the same shape with other rows on "
                "other ranks. Each rank takes its part of its own, so some rows may be seen twice and others never. "
                "Give the same arrays on all ranks (seed what shuffles or splits them), or use "
                "distribute_datasets_from_function()"
            )
        steps = [count for _, count, *_ in gathered]
        # With own orders: workers that read the same elements would do the same work in every step. Different graphs
        # may each take a part of one order.
        every = [pipeline for _, _, pipelines, *_ in gathered for pipeline in pipelines]
        self.beginning = replace(_first_position(batches, every, own_orders and same), batch_size=gathered[0][3])
        self.steps = combined(max, steps)
        if self.steps not in (0, UNKNOWN) and 0 in steps:
            self.learn_spec()

    def learn_spec(self) -> None:
        """Send the spec of a worker with data to all workers (collective)."""
        with self.workers.shared_errors("reading an element to learn its spec"):
            specs = self.batches.local_specs() if self.batches.steps else None
            self.spec = None if specs is None else with_rows(specs[0], None)
        self.gather_spec()

    def gather_spec(self) -> None:
        """Send the first known spec to workers that know none (collective)."""
        assert self.workers.communicator is not None
        gathered = self.workers.communicator.all_gather_object(self.spec)
        if self.spec is None:
            self.spec = next((spec for spec in gathered if spec is not None), None)

    def element_spec(self) -> object:
        """Return the nest of PerReplicaSpec of an element, or of ArraySpec without wrapper."""
        specs = self.batches.local_specs()
        if specs is None:
            raise ValueError(f"{self.batches.nodes[0]} has no elements on this rank, so its element_spec is unknown")
        if not self.workers.wrap:
            return specs[0]
        leaves = zip(*map(flatten_spec, specs), strict=True)
        return map_spec(lambda _: PerReplicaSpec(tuple(next(leaves))), specs[0])

    def next_pass(self) -> Remainder:
        """Begin the next pass."""
        self.passes += 1
        return Remainder(self.batches, 0, replace(self.beginning, pass_number=self.passes - 1))

    def resume(self, remainder: Remainder) -> None:
        """Let the next passes follow the pass of ``remainder``."""
        position, own = remainder.position, self.beginning.seeds
        self.passes = position.pass_number + 1
        same_pipelines = len(position.seeds) == len(own)
        seeds = position.seeds if same_pipelines else tuple(_led_by(position.seeds[0], each) for each in own)
        self.beginning = replace(self.beginning, seeds=seeds)

    def remainder(self, state: object) -> Remainder:
        """Return the remainder of the pass of a ``state()``.

        In the same layout every worker continues its own part. In another one, global batches that all workers know are
        dealt by their rows. Otherwise each worker reads the data of all original workers.
        """
        position, current = Position.from_json(state), self.batches
        counts = position.replica_counts
        same_layout = counts == current.workers.replica_counts
        layouts = [WorkerLayout(len(counts), worker, counts) for worker in range(len(counts))]
        with undisturbed():
            previous = [current] if same_layout else [self.deal(layouts[0])]
            division = previous[0].division
            if division != position.division:
                raise ValueError(
                    f"the state belongs to another division: each rank got {position.division}, and here it gets "
                    f"{division}. Use the same method of the strategy, and the same AutoShardPolicy"
                )
            if position.elements or not (same_layout or isinstance(previous[0], DealtBatches)):
                previous = [self.deal(layout) for layout in layouts]
        for batches in previous:
            _require_same_pipelines(position, batches)
        position = _for_batch_size(position, previous[0])
        remainder = self._remainder(position, previous)
        rest = remainder.batches
        steps = self.steps if rest is current else rest.steps
        rows = previous[0].nodes[0].row_count() if position.rows else -1
        beyond = isinstance(rest, ContinuedBatches) and rest.is_beyond_end
        if 0 <= steps < remainder.start or 0 <= rows < position.rows or beyond:
            raise ValueError(
                f"the state is behind the end of this dataset: {position.rows} rows and {position.steps} steps have "
                "been taken. Use the same data"
            )
        return remainder

    def _remainder(self, position: Position, previous: list[LocalBatches]) -> Remainder:
        first, here = previous[0], self.batches.workers
        if first is self.batches and not position.rows:
            return Remainder(first, position.steps, position)
        assignment = rules.choose_assignment(self.assignment, here.replica_counts) if first.is_cut else ""
        if isinstance(first, DealtBatches):
            rest = DealtBatches(here, skip_rows(first.node, position.rows), assignment)
            return Remainder(rest, position.steps, position)
        return Remainder(ContinuedBatches(here, previous, position, assignment), 0, position)

    def __str__(self) -> str:
        first, *more = self.batches.nodes
        return f"{first} and {len(more)} more" if more else str(first)


def _require_same_pipelines(position: Position, batches: LocalBatches) -> None:
    numbers = _pipeline_numbers(batches)
    if numbers[-1] >= len(position.pipelines) > 1:
        raise ValueError(
            f"the state has {len(position.pipelines)} pipelines, and this dataset has more. Return the same number of "
            "datasets from dataset_fn"
        )
    for node, number in zip(batches.nodes, numbers, strict=True):
        text, seeds = position.pipeline(number)
        found, shuffles = outline(node), len(_drawn_seeds(node))
        if found != text or shuffles != len(seeds):
            raise ValueError(
                f"the state belongs to another dataset, with {len(seeds)} shuffles without a seed:\n  {text}\nThis "
                f"dataset has {shuffles}:\n  {found}\nUse the same steps over the same data. Only prefetch(), "
                "and the size of a batch() before map() and prefetch(), may differ"
            )


def _for_batch_size(position: Position, first: LocalBatches) -> Position:
    """Return the same position, counted in batches of the present size."""
    old, new = position.batch_size, _last_batch_size(first)
    if old == new:
        return position
    if not isinstance(first, DealtBatches) or old is None or new is None:
        raise ValueError(
            f"the state belongs to a dataset with batch({old}), and this dataset has batch({new}). Only "
            f"AutoShardPolicy.DATA can change the size during a pass. Keep batch({old}) until the pass ends"
        )
    return replace(position, rows=position.rows + position.steps * old, steps=0, batch_size=new)
