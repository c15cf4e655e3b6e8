"""Position: the saved state of an iterator, and the graphs and seeds that it names."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mpidist.input.batching import Batched, last_batching
from mpidist.input.graph import GraphNode, Seed, described
from mpidist.input.local_batches import LocalBatches
from mpidist.input.steps import Mapped, Prefetched

FORMAT = "mpidist iterator"
VERSION = 1

# Outline and seeds of a graph.
Pipeline = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Position:
    """The progress of a pass, and all that the order of its elements depends on.

    The numbers count from the beginning of the pass: first ``rows``, then ``steps``, then ``elements``. They, the
    seeds and ``replica_counts`` are those of the ranks that began the pass, also when others go on with it.

    Attributes:
        pass_number: The number of the pass over the dataset, from 0.
        replica_counts: Local replicas of every worker.
        division: The rule by which the workers divided the dataset, see ``LocalBatches``.
        pipelines: Outlines of the pipelines of all workers in turn; a single one where all are alike.
        seeds: The seeds that each of them drew for shuffles without a given one.
        batch_size: The size of the last ``batch`` of the first pipeline; None where there is none.
        own_orders: Whether each worker has an order of its own.
        rows: Rows that were taken by global batches of another size.
        steps: Steps that were taken by all replicas in ``replica_counts``.
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

    def pipeline(self, number: int) -> tuple[str, tuple[int, ...]]:
        """Return outline and seeds of the pipeline ``number`` of all workers."""
        number = 0 if len(self.pipelines) == 1 else number
        return self.pipelines[number], self.seeds[number]

    def progress(self) -> str:
        """Return the number of the pass and its progress, as a text."""
        counts = {"row": self.rows, "step": self.steps, "element": self.elements}
        taken = [f"{count} {word}{'s' * (count != 1)}" for word, count in counts.items() if count or word == "step"]
        return f"pass {self.pass_number + 1}, {' and '.join(taken)} taken"

    def to_json(self) -> dict[str, object]:
        """Return the position in types that JSON has."""
        content: dict[str, object] = json.loads(json.dumps(asdict(self)))
        return {"format": FORMAT, "version": VERSION, **content}

    @staticmethod
    def from_json(content: object) -> Position:
        """Return the position that :meth:`to_json` has written.

        Raises:
            TypeError: It is no dict.
            ValueError: It is not the state of an iterator, or that of another version.
        """
        if not isinstance(content, dict):
            raise TypeError(
                f"state is {content!r} of type {type(content).__name__}; expected what state() of an iterator returned"
            )
        if content.get("format") != FORMAT or content.get("version") != VERSION:
            raise ValueError(
                f"state has format {content.get('format')!r} and version {content.get('version')!r}; expected "
                f"{FORMAT!r} and {VERSION}, as state() of an iterator returns them"
            )
        for name, is_right in _CHECKS.items():
            if name not in content or not is_right(content[name]):
                raise ValueError(
                    f"state is damaged: its {name} is {content.get(name)!r}; expected what state() of an iterator "
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


def _is_list(value: object, is_right: Callable[[object], bool]) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_right, value))


def _are_seeds(value: object) -> bool:
    return isinstance(value, list) and all(type(seed) is int and seed >= 0 for seed in value)


_CHECKS = {
    "pass_number": _is_count,
    "replica_counts": lambda value: _is_list(value, _is_positive),
    "division": lambda value: isinstance(value, str),
    "pipelines": lambda value: _is_list(value, lambda text: isinstance(text, str)),
    "seeds": lambda value: _is_list(value, _are_seeds),
    "batch_size": lambda value: value is None or _is_positive(value),
    "own_orders": lambda value: isinstance(value, bool),
    "rows": _is_count,
    "steps": _is_count,
    "elements": _is_count,
}


def outline(node: GraphNode, mask_batch_size: bool = True) -> str:
    """Return a text that is equal for graphs with equally ordered rows.

    Args:
        node: The graph.
        mask_batch_size: Whether the size of its ``last_batching`` does not count.

    >>> from mpidist.input import Dataset
    >>> outline(Dataset.range(10).batch(4).prefetch(2)._node)
    'range(0, 10).batch(*)'
    """
    if isinstance(node, Prefetched):
        return outline(node.source, mask_batch_size)
    inside = [outline(before, mask_batch_size and isinstance(node, Mapped)) for before in node.inputs]
    return described(node.text_of_size("*") if mask_batch_size and isinstance(node, Batched) else node.identity, inside)


def drawn_seeds(node: GraphNode) -> list[Seed]:
    """Return the seeds of a graph that the user has not given."""
    return list(dict.fromkeys(seed for seed in node.seeds() if not seed.given))


def seeded_as(first: Sequence[tuple[int, ...]], own: Sequence[Pipeline]) -> list[Pipeline]:
    """Return pipelines with the shuffles of another program, as far as both have shuffles.

    >>> seeded_as([(1, 2)], [("a", (7,)), ("b", (8, 9))])
    [('a', (1,)), ('b', (8, 9))]
    """
    seeds = [*first, *[()] * len(own)]
    return [(text, _led_by(given, drawn)) for given, (text, drawn) in zip(seeds, own, strict=False)]


def pipelines_of(batches: LocalBatches) -> list[Pipeline]:
    """Return the pipelines of a worker."""
    return [(outline(node), tuple(seed.number for seed in drawn_seeds(node))) for node in batches.nodes]


def pipeline_numbers(batches: LocalBatches) -> range:
    """Return the numbers of a worker's pipelines among those of all workers."""
    first = batches.workers.worker_id * len(batches.nodes)
    return range(first, first + len(batches.nodes))


def last_batch_size(batches: LocalBatches) -> int | None:
    """Return the size of the ``batch`` that makes the elements of the first pipeline.

    None where other steps choose among its batches.
    """
    made = last_batching(batches.nodes[0])
    return None if made is None else made.size


def first_position(batches: LocalBatches, every: Sequence[Pipeline], own_orders: bool = False) -> Position:
    """Return the beginning of the first pass.

    All shuffle as the first pipeline does, and as a single process would.

    Args:
        batches: The batches of the first worker, or of one like it.
        every: The pipelines of all workers.
        own_orders: Whether each worker has an order of its own.
    """
    shared = [(text, _led_by(every[0][1], seeds)) for text, seeds in every]
    shared = shared[:1] if len(set(shared)) == 1 else shared
    texts, seeds = zip(*shared, strict=True)
    size = last_batch_size(batches)
    return Position(0, batches.workers.replica_counts, batches.division, texts, seeds, size, own_orders)


def next_beginning(beginning: Position, position: Position) -> Position:
    """Return the beginning of the passes that follow the one of ``position``.

    The layout is that of ``beginning``.
    """
    if len(position.seeds) == len(beginning.seeds):
        return replace(beginning, seeds=position.seeds)
    return replace(beginning, seeds=tuple(_led_by(position.seeds[0], own) for own in beginning.seeds))


def _led_by(first: tuple[int, ...], own: tuple[int, ...]) -> tuple[int, ...]:
    """Return as many seeds as ``own`` has, those of ``first`` as far as they go."""
    return first[: len(own)] + own[len(first) :]


def seeds_for(batches: LocalBatches, position: Position) -> dict[Seed, tuple[int, ...]]:
    """Return the entropy of a worker's seeds in the pass of ``position``.

    The passes that follow it have the same.
    """
    own = (batches.workers.worker_id,) if position.own_orders else ()
    found = {}
    for node, number in zip(batches.nodes, pipeline_numbers(batches), strict=True):
        _, seeds = position.pipeline(number)
        found.update({seed: (number, *own) for seed, number in zip(drawn_seeds(node), seeds, strict=True)})
    return found
