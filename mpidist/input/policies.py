"""The AutoShardPolicy of a dataset: the elements of a worker, and the rule of cutting."""

from __future__ import annotations

import logging

from mpidist.input.dealing import choose_assignment
from mpidist.input.graph import GraphNode
from mpidist.input.input_options import AutoShardPolicy, DatasetOptions
from mpidist.input.input_workers import WorkerLayout
from mpidist.input.local_batches import DealtBatches, LocalBatches, RecutBatches, check_batched
from mpidist.input.rewriting import deal_files, dealt_files, fill_in_hints, has_hint, other_source

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
