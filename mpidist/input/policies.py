"""The AutoShardPolicy of a dataset: the elements of a worker, and the rule of cutting.

Graphs are rewritten for one worker's files and with hints filled in; nothing is read that need not be.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from mpidist.input.choosing import Repeated, Shard, ShardHint, Shuffled, Sliced
from mpidist.input.dealing import choose_assignment
from mpidist.input.graph import Form, GraphNode
from mpidist.input.input_options import AutoShardPolicy, DatasetOptions
from mpidist.input.input_workers import WorkerLayout
from mpidist.input.interleaving import Interleaved
from mpidist.input.local_batches import DealtBatches, LocalBatches, RecutBatches, check_batched
from mpidist.input.sources import FileNames, Files
from mpidist.input.steps import Mapped, Prefetched

_log = logging.getLogger("mpidist")
_SHOWN_FILES = 3


def dealt_batches(
    node: GraphNode, options: DatasetOptions, workers: WorkerLayout
) -> tuple[LocalBatches, AutoShardPolicy, str]:
    """Return a worker's batches of a shared dataset, the policy and a text.

    The policy in force is OFF, FILE, DATA or HINT. DATA cuts global batches by rule A, the others cut each worker's own
    stream by rule B.

    Raises:
        ValueError: The dataset is not batched, or the policy does not suit it.
    """
    policy = policy_in_force(node, options.auto_shard_policy, workers.num_workers)
    own = own_elements(node, policy, workers)
    batches: DealtBatches | RecutBatches
    if policy is AutoShardPolicy.DATA or workers.num_replicas_in_sync == 1:
        assignment = choose_assignment(options.assignment, workers.replica_counts)
        batches = DealtBatches(workers, own, assignment)
    else:
        batches = RecutBatches(workers, node, own, f"its rows by AutoShardPolicy.{policy.name}")
    if workers.num_replicas_in_sync > 1:
        check_batched(own)
    return batches, policy, f"{_summary(own, policy, batches)} of {node} (AutoShardPolicy.{policy.name})"


def batches_of_worker(node: GraphNode, options: DatasetOptions, workers: WorkerLayout) -> LocalBatches:
    """Return a worker's batches of a shared dataset; see :func:`dealt_batches`."""
    return dealt_batches(node, options, workers)[0]


def policy_in_force(node: GraphNode, policy: AutoShardPolicy, num_workers: int) -> AutoShardPolicy:
    """Return the policy in force for a dataset: OFF, FILE, DATA or HINT.

    Raises:
        ValueError: The policy does not suit the dataset.
    """
    if has_hint(node):
        if policy is not AutoShardPolicy.HINT:
            raise ValueError(
                f"{node} has a shard(SHARD_HINT, SHARD_HINT), and its auto_shard_policy is {policy.name}; expected "
                "dataset.with_options(auto_shard_policy=AutoShardPolicy.HINT), or shard() with numbers"
            )
        return policy
    if policy is AutoShardPolicy.HINT:  # with nothing to fill in
        return AutoShardPolicy.OFF
    if policy not in (AutoShardPolicy.AUTO, AutoShardPolicy.FILE):
        return policy
    other = other_source(node)
    if other is None:
        return AutoShardPolicy.FILE
    if policy is AutoShardPolicy.FILE:
        raise ValueError(
            f"{node} has the source {other}, which is no files, so there are no files to deal (AutoShardPolicy.FILE); "
            "expected Dataset.from_files(paths, reader) or Dataset.list_files(pattern) as every source, or "
            "AutoShardPolicy.DATA"
        )
    if num_workers > 1 and next(node.files(), None) is not None:
        _log.warning(
            "mpidist: %s reads files and also %s, so AutoShardPolicy.AUTO is DATA: every rank reads all of the files "
            "and keeps its part of each batch; if that is meant, say with_options(auto_shard_policy="
            "AutoShardPolicy.DATA)",
            node,
            other,
        )
    return AutoShardPolicy.DATA


def own_elements(node: GraphNode, policy: AutoShardPolicy, workers: WorkerLayout) -> GraphNode:
    """Return the pipeline of this worker."""
    if policy is AutoShardPolicy.HINT:
        return fill_in_hints(node, workers.num_workers, workers.worker_id)
    if policy is AutoShardPolicy.FILE and workers.num_workers > 1:
        return deal_files(node, workers.num_workers, workers.worker_id)
    return node


def _summary(own: GraphNode, policy: AutoShardPolicy, batches: DealtBatches | RecutBatches) -> str:
    workers, cut = batches.workers, ""
    if isinstance(batches, RecutBatches):
        sizes = ", ".join(map(str, batches.sizes or ()))
        whole = ", each batch cut into a part for each replica of all ranks"
        cut = f", in sub-batches of {sizes} rows" if sizes else whole
    elif policy is AutoShardPolicy.DATA and workers.num_replicas_in_sync > 1:
        return f"its part{'s' * (workers.num_local_replicas > 1)} of each global batch ({batches.assignment!r})"
    if policy is AutoShardPolicy.FILE:
        names = [repr(name) for name in dealt_files(own)]
        more = f" and {len(names) - _SHOWN_FILES} more" if len(names) > _SHOWN_FILES else ""
        return f"{len(names)} files, {', '.join(names[:_SHOWN_FILES])}{more},{cut[1:]}" if names else f"its files{cut}"
    return f"{'its shard' if policy is AutoShardPolicy.HINT else 'all elements'}{cut}"


def other_source(node: GraphNode) -> GraphNode | None:
    """Return the first source of a graph that is not files, or None."""
    if isinstance(node, (Files, FileNames)):
        return None
    if not node.inputs:
        return node
    for before in node.inputs:
        other = other_source(before)
        if other is not None:
            # The elements of the function come from elsewhere; its datasets may read files and nothing else.
            first = node.first() if isinstance(node, Interleaved) else None
            return other if first is None or other_source(first) is not None else None
    return None


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
