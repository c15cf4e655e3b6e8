"""Which rows each replica gets: AutoShardPolicy, rule A and rule B.

Rule A cuts a global batch of B rows, which all workers have, into n parts of ceil(B / n) rows. The last parts may be
short or empty. Part j goes to worker j mod W as in TensorFlow, or, with the block assignment, to replica j.

Rule B cuts a stream that only one worker reads, across the borders of its batches, into sub-batches with a cycle of
sizes. All replicas together take the rows of one global batch in every step.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

from mpidist.input.combining import Interleaved
from mpidist.input.input_options import AutoShardPolicy, WorkerLayout
from mpidist.input.nodes import Form, GraphNode
from mpidist.input.sources import FileNames, Files, files_of
from mpidist.input.steps import Mapped, Prefetched, Repeated, Shard, ShardHint, Shuffled, Sliced

ASSIGNMENTS = ("tf", "block")
_log = logging.getLogger("mpidist")
_SHOWN_FILES = 3


def parts(batch_size: int, num_replicas: int) -> list[tuple[int, int]]:
    """Return the ``(start, stop)`` rows of each part of a batch (rule A).

    >>> parts(4, 3)
    [(0, 2), (2, 4), (4, 4)]
    """
    size = -(-batch_size // num_replicas)
    return [(min(j * size, batch_size), min((j + 1) * size, batch_size)) for j in range(num_replicas)]


@lru_cache
def local_rows(
    batch_size: int, replica_counts: tuple[int, ...], worker_id: int, assignment: str
) -> list[tuple[int, int]]:
    """Return the ``(start, stop)`` rows of a global batch for each local replica (rule A).

    Source: TensorFlow's autosharding by DATA after its rebatching.

    >>> [local_rows(4, (2, 2), worker, "tf") for worker in (0, 1)]
    [[(0, 1), (2, 3)], [(1, 2), (3, 4)]]
    """
    every, workers = parts(batch_size, sum(replica_counts)), len(replica_counts)
    first = sum(replica_counts[:worker_id])
    local = range(replica_counts[worker_id])
    return [every[replica * workers + worker_id if assignment == "tf" else first + replica] for replica in local]


def choose_assignment(assignment: str | None, replica_counts: Sequence[int]) -> str:
    """Return the assignment of parts. The default is TensorFlow's, if all workers have as many replicas."""
    if assignment not in (None, *ASSIGNMENTS):
        raise ValueError(f"assignment is {assignment!r}; expected 'tf', 'block' or None")
    equal = len(set(replica_counts)) == 1
    if assignment == "tf" and not equal:
        raise ValueError(
            f"assignment='tf' deals parts to workers in turn, and the workers have {tuple(replica_counts)} "
            "replicas. Use with_options(assignment='block') for unequal counts"
        )
    return assignment or ("tf" if equal else "block")


def idle_replicas(batch_size: int, num_replicas: int) -> int:
    """Return the number of replicas without a row of a global batch (rule A)."""
    size = -(-batch_size // num_replicas)
    return num_replicas - -(-batch_size // size)


def sub_batch_sizes(batch_size: int, replica_counts: Sequence[int], worker_id: int) -> list[int]:
    """Return the cycle of sizes of a worker's sub-batches (rule B).

    Source: TensorFlow's ``batch_sizes_for_worker``.

    >>> sub_batch_sizes(7, (2, 2), 0), sub_batch_sizes(7, (2, 2), 1)
    ([2, 2, 2, 1], [2, 1, 2, 2])
    """
    # A global batch has n sizes, of which the first `larger` have one more row. In step s replica j gets size
    # j + s * R (mod n), for R replicas of a worker. R is 1 if workers have different numbers of replicas, so that
    # every replica gets every size.
    count = sum(replica_counts)
    least, larger = divmod(batch_size, count)
    equal = len(set(replica_counts)) == 1
    shift, steps = (replica_counts[0], len(replica_counts)) if equal else (1, count)
    first = sum(replica_counts[:worker_id])
    return [
        least + ((first + replica + step * shift) % count < larger)
        for step in range(steps)
        for replica in range(replica_counts[worker_id])
    ]


def count_sub_batches(rows: int, sizes: Sequence[int]) -> int:
    """Return the number of sub-batches in ``rows`` rows, for a cycle of sizes."""
    if rows == 0:
        return 0
    cycles, before = divmod(rows - 1, sum(sizes))  # the position of the last row. Sizes of 0 after it do not count.
    return cycles * len(sizes) + bisect_left(list(accumulate(sizes)), before + 1) + 1


def policy_in_force(node: GraphNode, policy: AutoShardPolicy, num_workers: int) -> AutoShardPolicy:
    """Return the policy for a dataset, which is OFF, FILE, DATA or HINT."""
    if any(isinstance(step, ShardHint) for step in node.graph()):
        if policy is not AutoShardPolicy.HINT:
            raise ValueError(
                f"{node} has a shard(SHARD_HINT, SHARD_HINT), and its auto_shard_policy is {policy.name}. Use "
                "dataset.with_options(auto_shard_policy=AutoShardPolicy.HINT), or shard() with numbers"
            )
        return policy
    if policy is AutoShardPolicy.HINT:  # without a hint to fill in
        return AutoShardPolicy.OFF
    if policy not in (AutoShardPolicy.AUTO, AutoShardPolicy.FILE):
        return policy
    other = other_source(node)
    if other is None:
        return AutoShardPolicy.FILE
    if policy is AutoShardPolicy.FILE:
        raise ValueError(
            f"{node} has the source {other}, which is no files, so there are no files to deal (AutoShardPolicy.FILE). "
            "Use Dataset.from_files(paths, reader) or Dataset.list_files(pattern) as every source, or "
            "AutoShardPolicy.DATA"
        )
    if num_workers > 1 and next(files_of(node), None) is not None:
        _log.warning(
            "mpidist: %s reads files and also %s, so AutoShardPolicy.AUTO is DATA: every rank reads all of the files "
            "and keeps its part of each batch. If that is intended, use with_options(auto_shard_policy="
            "AutoShardPolicy.DATA)",
            node,
            other,
        )
    return AutoShardPolicy.DATA


def other_source(node: GraphNode) -> GraphNode | None:
    """Return the first source of a graph that is not files, or None."""
    if isinstance(node, (Files, FileNames)):
        return None
    if not node.inputs:
        return node
    for before in node.inputs:
        other = other_source(before)
        if other is not None:
            # The datasets of the function may read only files.
            first = node.first() if isinstance(node, Interleaved) else None
            return other if first is None or other_source(first) is not None else None
    return None


def own_elements(node: GraphNode, policy: AutoShardPolicy, workers: WorkerLayout) -> GraphNode:
    """Return the pipeline of a worker, with its files only or its numbers in hints."""
    if policy is AutoShardPolicy.HINT:
        return _fill_in_hints(node, workers)
    return _deal_files(node, workers) if policy is AutoShardPolicy.FILE and workers.num_workers > 1 else node


def _fill_in_hints(node: GraphNode, workers: WorkerLayout) -> GraphNode:
    inputs = [_fill_in_hints(before, workers) for before in node.inputs]
    is_hint = isinstance(node, ShardHint)
    return Shard.of(inputs[0], workers.num_workers, workers.worker_id) if is_hint else node.with_inputs(inputs)


def _deal_files(node: GraphNode, workers: WorkerLayout) -> GraphNode:
    """Return the graph with every W-th file only.

    Files are counted in the order of their names. Each worker shuffles and repeats its own files, as in TensorFlow.
    """
    if isinstance(node, Files):
        _require_enough(node, len(node.paths), workers)
        return Files(node.paths[workers.worker_id :: workers.num_workers], node.reader)
    if node.form is Form.ROWS:
        return _deal_names(node, workers)
    if isinstance(node, Interleaved) and other_source(node.source) is not None:
        return node.with_inputs([_deal_names(node.source, workers)])
    return node.with_inputs([_deal_files(before, workers) for before in node.inputs])


def _deal_names(node: GraphNode, workers: WorkerLayout) -> GraphNode:
    if node.form is Form.ROWS and isinstance(node, (Mapped, Prefetched, Shuffled, Repeated)):
        return node.with_inputs([_deal_names(node.source, workers)])
    _require_enough(node, node.cardinality, workers)
    return Shard.of(node, workers.num_workers, workers.worker_id)


def _require_enough(node: GraphNode, count: int, workers: WorkerLayout) -> None:
    if 0 <= count < workers.num_workers:
        raise ValueError(
            f"{node} has {count} files for {workers.num_workers} ranks, and AutoShardPolicy.FILE, the default if all "
            "sources are files, deals whole files. Write at least one file for each rank, or let "
            "every rank read all files and keep its part of each batch: "
            "dataset.with_options(auto_shard_policy=AutoShardPolicy.DATA)"
        )


def dealt_files(node: GraphNode) -> Iterator[str]:
    """Yield the paths that a worker reads, without those that differ between passes."""
    if isinstance(node, Shard) and isinstance(node.source, FileNames):
        yield from node.source.paths[node.start :: node.step]
    elif isinstance(node, (Files, FileNames)):
        yield from files_of(node)
    elif not (isinstance(node, Sliced) and node.form is Form.ROWS):
        for each in node.inputs:
            yield from dealt_files(each)


def files_summary(own: GraphNode) -> str:
    """Return a text of the files that the pipeline of a worker reads."""
    names = [repr(name) for name in dealt_files(own)]
    more = f" and {len(names) - _SHOWN_FILES} more" if len(names) > _SHOWN_FILES else ""
    return f"{len(names)} files, {', '.join(names[:_SHOWN_FILES])}{more}" if names else "its files"
