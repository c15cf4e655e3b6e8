"""Seeds of the shuffles that were given none: found in pipelines, and shared among workers."""

from __future__ import annotations

from collections.abc import Sequence

from mpidist.input.local_batches import LocalBatches
from mpidist.input.pipeline import Node
from mpidist.input.position import Position
from mpidist.input.reordering import Shuffle
from mpidist.input.skipping import last_batching, outline

# Outline and seeds of a pipeline.
Pipeline = tuple[str, tuple[int, ...]]


def drawn_shuffles(node: Node) -> list[Shuffle]:
    """Return the shuffles of a pipeline that were given no seed by the user."""
    return list({shuffle: None for shuffle in node.shuffles() if not shuffle.given})


def drawn_seeds(node: Node) -> tuple[int, ...]:
    """Return the seeds that were drawn for them."""
    return tuple(shuffle.seed for shuffle in drawn_shuffles(node))


def seeded_as(first: Sequence[tuple[int, ...]], own: Sequence[Pipeline]) -> list[Pipeline]:
    """Return pipelines that shuffle as those of another program do, as far as both have shuffles.

    >>> seeded_as([(1, 2)], [("a", (7,)), ("b", (8, 9))])
    [('a', (1,)), ('b', (8, 9))]
    """
    seeds = [*first, *[()] * len(own)]
    return [(text, given[: len(drawn)] + drawn[len(given) :]) for given, (text, drawn) in zip(seeds, own, strict=False)]


def pipelines_of(batches: LocalBatches) -> list[Pipeline]:
    """Return the pipelines of a worker."""
    return [(outline(node), drawn_seeds(node)) for node in batches.nodes]


def pipeline_numbers(batches: LocalBatches) -> range:
    """Return the numbers of the pipelines of a worker among those of all workers in turn."""
    first = batches.workers.worker_id * len(batches.nodes)
    return range(first, first + len(batches.nodes))


def last_batch_size(batches: LocalBatches) -> int | None:
    """Return the size of the ``batch`` that makes the elements of the first pipeline, None where it is not alone."""
    made = last_batching(batches.nodes[0])
    return None if made is None else made.size


def first_position(batches: LocalBatches, every: Sequence[Pipeline], own_orders: bool = False) -> Position:
    """Return where the first pass begins.

    All shuffle as the first pipeline does, which is also what a single process would do.

    Args:
        batches: Of the first worker, or of one like it.
        every: The pipelines of all workers.
        own_orders: Whether each worker has an order of its own.
    """
    first = every[0][1]
    shared = [(text, first[: len(seeds)] + seeds[len(first) :]) for text, seeds in every]
    shared = shared[:1] if len(set(shared)) == 1 else shared
    texts, seeds = zip(*shared, strict=True)
    size = last_batch_size(batches)
    return Position(0, batches.workers.replica_counts, batches.division, texts, seeds, size, own_orders)


def seeds_for(batches: LocalBatches, position: Position) -> dict[Shuffle, tuple[int, ...]]:
    """Return the seeds of a worker's shuffles in the pass of ``position``, or of one that follows it."""
    own = (batches.workers.worker_id,) if position.own_orders else ()
    found = {}
    for node, number in zip(batches.nodes, pipeline_numbers(batches), strict=True):
        _, seeds = position.pipeline(number)
        found.update({shuffle: (seed, *own) for shuffle, seed in zip(drawn_shuffles(node), seeds, strict=True)})
    return found
