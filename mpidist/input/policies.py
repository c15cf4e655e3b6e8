"""What each AutoShardPolicy makes of a dataset: which elements a worker reads, and by which rule they are cut."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mpidist.input.dealing import choose_assignment
from mpidist.input.file_dealing import deal_files, dealt_files, fill_in_hints, has_hint, other_source
from mpidist.input.input_options import AutoShardPolicy, DatasetOptions
from mpidist.input.input_workers import WorkerLayout
from mpidist.input.local_batches import DealtBatches, LocalBatches
from mpidist.input.pipeline import Node
from mpidist.input.recut_batches import RecutBatches

if TYPE_CHECKING:
    from mpidist.input.dataset import Dataset

_log = logging.getLogger("mpidist")
_SHOWN_FILES = 3


def dealt_batches(
    node: Node, options: DatasetOptions, workers: WorkerLayout
) -> tuple[LocalBatches, AutoShardPolicy, str]:
    """Return what a worker reads of a dataset that all workers have, the policy in force, and a text of it.

    The policy in force is OFF, FILE, DATA or HINT. DATA cuts global batches by rule A, the others cut each worker's own
    stream by rule B.

    Raises:
        ValueError: The dataset is not batched, or the policy does not suit it.
    """
    policy = _policy_in_force(node, options.auto_shard_policy, workers.num_workers)
    own = _own_elements(node, policy, workers)
    batches: DealtBatches | RecutBatches
    if policy is AutoShardPolicy.DATA or workers.num_replicas_in_sync == 1:
        assignment = choose_assignment(options.assignment, workers.replica_counts)
        batches = DealtBatches(workers, own, assignment)
    else:
        batches = RecutBatches(workers, node, own, f"its rows by AutoShardPolicy.{policy.name}")
    batches.check_batched()
    return batches, policy, f"{_what(own, policy, batches)} of {node} (AutoShardPolicy.{policy.name})"


def share_of(dataset: Dataset, num_workers: int, worker_id: int) -> Dataset:
    """Return the part of one of several workers that take whole batches, each at its own pace.

    Raises:
        ValueError: The policy does not suit the dataset.

    >>> from mpidist.input import Dataset
    >>> [batch.tolist() for batch in share_of(Dataset.range(5).batch(2), 2, 0)]
    [[0, 1], [4]]
    """
    policy = _policy_in_force(dataset._node, dataset._options.auto_shard_policy, num_workers)
    if policy is AutoShardPolicy.DATA:
        return dataset.shard(num_workers, worker_id)
    node = _own_elements(dataset._node, policy, WorkerLayout(num_workers, worker_id, (1,) * num_workers))
    own = dataset._then(node)
    # No hint is left, and workers without hints would go through all of the data, in orders of their own.
    return own.with_options(auto_shard_policy=AutoShardPolicy.DATA) if policy is AutoShardPolicy.HINT else own


def _policy_in_force(node: Node, policy: AutoShardPolicy, num_workers: int) -> AutoShardPolicy:
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


def _own_elements(node: Node, policy: AutoShardPolicy, workers: WorkerLayout) -> Node:
    """Return the pipeline of this worker."""
    if policy is AutoShardPolicy.HINT:
        return fill_in_hints(node, workers.num_workers, workers.worker_id)
    if policy is AutoShardPolicy.FILE and workers.num_workers > 1:
        return deal_files(node, workers.num_workers, workers.worker_id)
    return node


def _what(own: Node, policy: AutoShardPolicy, batches: DealtBatches | RecutBatches) -> str:
    if isinstance(batches, RecutBatches):
        sizes = batches.sizes
        cut = (
            f", in sub-batches of {', '.join(map(str, sizes))} rows"
            if sizes
            else ", each batch cut into a part for each replica of all ranks"
        )
    elif policy is AutoShardPolicy.DATA and batches.workers.num_replicas_in_sync > 1:
        workers = batches.workers
        return f"its part{'s' * (workers.num_local_replicas > 1)} of each global batch ({batches.assignment!r})"
    else:
        cut = ""
    if policy is AutoShardPolicy.FILE:
        names = [repr(name) for name in dealt_files(own)]
        more = f" and {len(names) - _SHOWN_FILES} more" if len(names) > _SHOWN_FILES else ""
        return f"{len(names)} files, {', '.join(names[:_SHOWN_FILES])}{more},{cut[1:]}" if names else f"its files{cut}"
    return f"{'its shard' if policy is AutoShardPolicy.HINT else 'all elements'}{cut}"
