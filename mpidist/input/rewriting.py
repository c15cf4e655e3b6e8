"""Rewritten graphs: without first elements, with one worker's files, with hints filled in.

Nothing is read that need not be.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpidist.input.batching import Batched
from mpidist.input.choosing import Repeated, Shard, ShardHint, Shuffled, Skip, Sliced
from mpidist.input.graph import Form, GraphNode
from mpidist.input.interleaving import Interleaved
from mpidist.input.sources import FileNames, Files
from mpidist.input.steps import Mapped, Prefetched, Zipped


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


def other_source(node: GraphNode) -> GraphNode | None:
    """Return the first source of a graph that is not files, or None."""
    if isinstance(node, (Files, FileNames)):
        return None
    if not node.inputs:
        return node
    for before in node.inputs:
        other = other_source(before)
        if other is not None:
            return None if isinstance(node, Interleaved) and _makes_files(node) else other
    return None


def _makes_files(node: Interleaved) -> bool:
    """Return whether the datasets of the function read files and nothing else.

    Its elements come from elsewhere.
    """
    first = node.first()
    return first is not None and other_source(first) is None


def deal_files(node: GraphNode, num_workers: int, worker_id: int) -> GraphNode:
    """Return the graph of files with every ``num_workers``-th file only.

    Files are counted as the names come, but as they would come without shuffles and repetitions, which each worker has
    for its own files, as in TensorFlow.

    Raises:
        ValueError: There are fewer files than workers.
    """
    if isinstance(node, Files):
        _require_enough(node, len(node.paths), num_workers)
        return node.part(num_workers, worker_id)
    if node.form is Form.ROWS:
        return _deal_names(node, num_workers, worker_id)
    if isinstance(node, Interleaved) and other_source(node.source) is not None:
        return node.with_inputs([_deal_names(node.source, num_workers, worker_id)])
    return node.with_inputs([deal_files(before, num_workers, worker_id) for before in node.inputs])


def _deal_names(node: GraphNode, num_workers: int, worker_id: int) -> GraphNode:
    """Return every ``num_workers``-th name. Shuffles and repetitions of rows stay behind the choice."""
    if node.form is Form.ROWS and isinstance(node, (Mapped, Prefetched, Shuffled, Repeated)):
        return node.with_inputs([_deal_names(node.source, num_workers, worker_id)])
    _require_enough(node, node.cardinality, num_workers)
    return Shard((node,), num_workers, worker_id)


def _require_enough(node: GraphNode, count: int, num_workers: int) -> None:
    if 0 <= count < num_workers:
        raise ValueError(
            f"{node} has {count} files for {num_workers} ranks, and AutoShardPolicy.FILE, which AUTO is where all "
            "sources are files, deals whole files; expected a file for each rank at least: write more files, or let "
            "every rank read all and keep its part of each batch with "
            "dataset.with_options(auto_shard_policy=AutoShardPolicy.DATA)"
        )


def dealt_files(node: GraphNode) -> Iterator[str]:
    """Yield the paths that a graph with one worker's files reads.

    Those that differ from pass to pass are left out.
    """
    if isinstance(node, Shard) and isinstance(node.source, FileNames):
        yield from node.source.paths[node.index :: node.num_shards]
    elif isinstance(node, (Files, FileNames)):
        yield from node.files()
    elif not (isinstance(node, Sliced) and node.form is Form.ROWS):
        for each in node.inputs:
            yield from dealt_files(each)


def has_hint(node: GraphNode) -> bool:
    """Return whether the graph has a ``shard(SHARD_HINT, SHARD_HINT)``."""
    return any(isinstance(step, ShardHint) for step in node.graph())


def fill_in_hints(node: GraphNode, num_workers: int, worker_id: int) -> GraphNode:
    """Return the graph with each ``shard(SHARD_HINT, SHARD_HINT)`` filled in for a worker."""
    inputs = [fill_in_hints(before, num_workers, worker_id) for before in node.inputs]
    return Shard((inputs[0],), num_workers, worker_id) if isinstance(node, ShardHint) else node.with_inputs(inputs)
