"""Distribution of datasets, datasets of functions, and values of functions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from mpidist.core import context
from mpidist.core.context import StrategyLike
from mpidist.input.batching import Batched
from mpidist.input.combining import Interleaved
from mpidist.input.dataset import Dataset, graph_and_options
from mpidist.input.distributed_dataset import DistributedDataset
from mpidist.input.distribution import Distribution
from mpidist.input.input_options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    InputWorkers,
    ValueContext,
    WorkerLayout,
)
from mpidist.input.iteration import E_co
from mpidist.input.local_batches import (
    DealtBatches,
    LocalBatches,
    OwnBatches,
    RecutBatches,
    batches_of_worker,
    dealt_batches,
)
from mpidist.input.nodes import ArrayRows, Form, GraphNode
from mpidist.input.rules import files_summary, idle_replicas, own_elements, policy_in_force
from mpidist.input.sources import files_of
from mpidist.input.torch_loader import check_shared, is_loader, unbatched_source
from mpidist.values import regroup
from mpidist.values.placement import place_at

_log = logging.getLogger("mpidist")

# Pipelines that every rank reads as a whole, and that have been warned of.
_warned_of: set[str] = set()

_HOW_TO_MAKE_ONE = (
    "expected an mpidist.Dataset: Dataset.from_tensor_slices(arrays).batch(global_batch_size), or "
    "Dataset.from_source(object) for a PyTorch or other dataset; or a DataLoader of PyTorch"
)


def distribute_dataset(
    dataset: object, workers: InputWorkers, strategy: StrategyLike, options: InputOptions | None = None
) -> DistributedDataset:
    """Divide a dataset over the replicas of all ranks (experimental_distribute_dataset).

    Collective: call it on every rank, in the same order, with the same dataset. Its AutoShardPolicy determines the
    division. Shuffles without a seed get one that all ranks share. Each rank logs a line "rank r of W reads ..."
    (logger ``mpidist``, level INFO). Rank 0 warns of arrays that are not batched, of a batch size that leaves
    replicas without rows, and of streams that all ranks read as a whole although no policy was given.

    Args:
        dataset: A Dataset, or a DataLoader of PyTorch; batched with the global batch size.
        workers: The workers that share it.
        strategy: The strategy of the replicas.
        options: An InputOptions or None.

    Raises:
        TypeError: ``dataset`` is no Dataset, or ``options`` no InputOptions.
        ValueError: The dataset is not batched; ``assignment="tf"`` with unequal numbers of local replicas; with FILE,
            fewer files than ranks, or sources other than files.
        NotImplementedError: PER_REPLICA.
        MismatchError: The ranks gave different datasets, and the policy is not OFF; on all ranks.

    >>> dataset, workers = Dataset.range(3).batch(3), InputWorkers(1, 0, (2,), None, True)
    >>> list(distribute_dataset(dataset, workers, context.get_strategy()))
    [PerReplica:{0: array([0, 1]), 1: array([2])}]
    """
    if replication_mode(options) is InputReplicationMode.PER_REPLICA:
        raise NotImplementedError(
            "experimental_distribute_dataset() divides one pipeline over all replicas and cannot take "
            "InputReplicationMode.PER_REPLICA. Use distribute_datasets_from_function(dataset_fn, options)"
        )
    with workers.shared_errors("inspecting the dataset"):
        node, dataset_options = graph_and_options(_as_dataset(dataset))
        check_shared(node)
        batches, policy = dealt_batches(node, dataset_options, workers)
        reads = f"{_summary(batches, policy)} of {node} (AutoShardPolicy.{policy.name})"
    deal = partial(batches_of_worker, node, dataset_options)
    distribution = Distribution(batches, workers, deal, dataset_options.assignment, strategy, options)
    off = policy is AutoShardPolicy.OFF
    distribution.agree(same_everywhere=not off, own_orders=off)
    _log.info("rank %d of %d reads %s", workers.worker_id, workers.num_workers, reads)
    if workers.worker_id == 0 and workers.num_replicas_in_sync > 1:
        if _yields_single_rows(node):
            _log.warning(
                "mpidist: %s has no batch(), so each row of its arrays is taken for a global batch and dealt to %d "
                "replicas in parts. Use dataset.batch(global_batch_size). If the rows are batches already, pass a "
                "sequence of them: Dataset.from_source(list(array))",
                *(node, workers.num_replicas_in_sync),
            )
        elif isinstance(batches, DealtBatches):
            _warn_of_idle_replicas(node.batch_size(), workers.num_replicas_in_sync)
    is_default = dataset_options.auto_shard_policy is AutoShardPolicy.AUTO and policy is AutoShardPolicy.DATA
    if workers.worker_id == 0 and workers.num_workers > 1 and is_default:
        _warn_of_whole_streams(node, workers.num_workers)
    return DistributedDataset(distribution)


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Dataset],
    workers: InputWorkers,
    strategy: StrategyLike,
    options: InputOptions | None = None,
    per_replica_allowed: bool = False,
) -> DistributedDataset:
    """Give each rank's replicas the batches of the rank's own dataset (distribute_datasets_from_function).

    Collective: call it on every rank, in the same order. Nothing is cut or divided: the next batches go to the
    local replicas in turn. Ranks may have different amounts of data.

    Args:
        dataset_fn: Called outside of any strategy's scope with an InputContext; returns a Dataset that is
            batched with the batch size of one replica.
        workers: The workers that share the input.
        strategy: The strategy of the replicas.
        options: An InputOptions or None.
        per_replica_allowed: Whether the strategy supports PER_REPLICA.

    Raises:
        TypeError: ``dataset_fn`` is not callable or returns no Dataset, or ``options`` is no InputOptions.
        NotImplementedError: PER_REPLICA if the strategy does not support it.

    >>> workers = InputWorkers(1, 0, (2,), None, True)
    >>> list(distribute_from_function(lambda _: Dataset.range(3).batch(1), workers, context.get_strategy()))
    [PerReplica:{0: array([0]), 1: array([1])}, PerReplica:{0: array([2]), 1: array([], dtype=int64)}]
    """
    if not callable(dataset_fn):
        raise TypeError(
            f"dataset_fn is {dataset_fn!r} of type {type(dataset_fn).__name__}; expected a function that "
            "takes an InputContext and returns a Dataset. Pass a Dataset itself to "
            "experimental_distribute_dataset()"
        )
    per_replica = replication_mode(options) is InputReplicationMode.PER_REPLICA
    if per_replica and not per_replica_allowed:
        raise per_replica_refused(strategy)

    def deal(layout: WorkerLayout) -> LocalBatches:
        replicas = layout.num_replicas_in_sync
        contexts = (
            [InputContext(replicas, i, replicas) for i in layout.local_replica_ids]
            if per_replica
            else [InputContext(layout.num_workers, layout.worker_id, replicas)]
        )
        return OwnBatches(layout, [_call(dataset_fn, each) for each in contexts], per_replica)

    with workers.shared_errors("dataset_fn"):
        batches = deal(workers)
    distribution = Distribution(batches, workers, deal, None, strategy, options)
    distribution.agree(same_everywhere=False)
    reads = ", ".join(map(str, batches.nodes))
    _log.info("rank %d of %d reads %s (from a function)", workers.worker_id, workers.num_workers, reads)
    return DistributedDataset(distribution)


def share_of(dataset: Dataset[E_co], num_workers: int, worker_id: int) -> Dataset[E_co]:
    """Return the share of a worker that takes whole batches at its own pace."""
    node, options = graph_and_options(dataset)
    policy = policy_in_force(node, options.auto_shard_policy, num_workers)
    if policy is AutoShardPolicy.DATA:
        return dataset.shard(num_workers, worker_id)
    own = own_elements(node, policy, WorkerLayout(num_workers, worker_id, (1,) * num_workers))
    shared: Dataset[E_co] = Dataset(own, options)
    # Its hint is filled in. With HINT, a worker would now read all of the data, in its own order.
    return shared.with_options(auto_shard_policy=AutoShardPolicy.DATA) if policy is AutoShardPolicy.HINT else shared


def distribute_values(value_fn: Callable[[ValueContext], object], workers: InputWorkers) -> Any:
    """Return the results of a function for the local replicas, as PerReplica values.

    Without communication (experimental_distribute_values_from_function).

    Args:
        value_fn: Called outside of any strategy's scope with a ValueContext, with the replica's device current;
            returns anything.
        workers: The workers with the replicas.

    Raises:
        TypeError: ``value_fn`` is not callable.
        ValueError: It returns different structures for different replicas.

    >>> distribute_values(lambda ctx: ctx.replica_id_in_sync_group, InputWorkers(1, 0, (2,), None, True))
    PerReplica:{0: 0, 1: 1}
    """
    if not callable(value_fn):
        raise TypeError(f"value_fn is {value_fn!r}; expected a function that takes a ValueContext")
    ids = workers.local_replica_ids
    values = []
    with context.outside():
        for i, device in zip(ids, workers.devices or ("cpu:0",) * len(ids), strict=True):
            with place_at(device).current():
                values.append(value_fn(ValueContext(i, workers.num_replicas_in_sync)))
    return regroup(values, ids, always_wrap=True)


def _summary(batches: DealtBatches | RecutBatches, policy: AutoShardPolicy) -> str:
    """Return a text of the part of a worker."""
    workers, cut = batches.workers, ""
    if isinstance(batches, RecutBatches):
        sizes = ", ".join(map(str, batches.sizes or ()))
        whole = ", each batch cut into a part for each replica of all ranks"
        cut = f", in sub-batches of {sizes} rows" if sizes else whole
    elif policy is AutoShardPolicy.DATA and workers.num_replicas_in_sync > 1:
        return f"its part{'s' * (workers.num_local_replicas > 1)} of each global batch ({batches.assignment!r})"
    if policy is AutoShardPolicy.FILE:
        return files_summary(batches.node) + cut
    return f"{'its shard' if policy is AutoShardPolicy.HINT else 'all elements'}{cut}"


def _yields_single_rows(node: GraphNode) -> bool:
    """Return whether each element is a row of arrays. Elements of other sources may be batches."""
    for step in node.graph():
        is_row = isinstance(step, ArrayRows) and step.is_cut_from_arrays()
        if isinstance(step, (Batched, Interleaved)) or not (step.inputs or is_row):
            return False
    return True


def _warn_of_idle_replicas(batch_size: int | None, replicas: int) -> None:
    """Warn if full global batches leave some replicas without rows."""
    if batch_size is None or not idle_replicas(batch_size, replicas):
        return
    # A multiple of the number of replicas is always near.
    sizes = (batch_size + sign * step for step in range(1, replicas) for sign in (1, -1))
    near = next(size for size in sizes if size > 0 and not idle_replicas(size, replicas))
    _log.warning(
        "mpidist: a global batch of %d rows is dealt to %d replicas by %d, and %d of them get none in any full batch. "
        "Use a batch size that gives every replica rows, such as batch(%d)",
        *(batch_size, replicas, -(-batch_size // replicas), idle_replicas(batch_size, replicas), near),
    )


def _warn_of_whole_streams(node: GraphNode, num_workers: int) -> None:
    """Warn once if all ranks read a whole stream by default."""
    streams = any(
        isinstance(step, Interleaved) or (not step.inputs and step.form is Form.ELEMENTS) for step in node.graph()
    )
    text = str(node)
    # There is another warning for files together with other sources.
    if not streams or next(files_of(node), None) is not None or text in _warned_of:
        return
    _warned_of.add(text)
    _log.warning(
        "mpidist: each of the %d ranks goes through all of %s and keeps its part of every batch, because it has "
        "neither files nor rows that are read by number. If that is intended, use "
        "dataset.with_options(auto_shard_policy=AutoShardPolicy.DATA). If each rank must read a part, use "
        "strategy.distribute_datasets_from_function(dataset_fn), where dataset_fn(context) returns part "
        "context.input_pipeline_id of context.num_input_pipelines, batched with the size of one replica",
        *(num_workers, text),
    )


def _as_dataset(dataset: object) -> Dataset:
    if isinstance(dataset, DistributedDataset):
        raise TypeError("experimental_distribute_dataset() got a dataset that is distributed already. Iterate over it")
    if is_loader(dataset):
        return Dataset.from_source(dataset)
    if not isinstance(dataset, Dataset):
        batches = unbatched_source(dataset)
        expected = (
            _HOW_TO_MAKE_ONE
            if batches is None
            else (
                f"its elements are rows, not batches; expected {batches}, or for NumPy arrays "
                "mpidist.Dataset.from_source(dataset).batch(global_batch_size). If each element is a global batch "
                "already, use DataLoader(dataset, batch_size=None)"
            )
        )
        raise TypeError(
            f"experimental_distribute_dataset() got {dataset!r} of type {type(dataset).__name__}; {expected}"
        )
    return dataset


def per_replica_refused(strategy: StrategyLike) -> NotImplementedError:
    """Return the error of a strategy without PER_REPLICA input."""
    return NotImplementedError(
        f"InputReplicationMode.PER_REPLICA is not offered by {type(strategy).__name__}, only by a MirroredStrategy of "
        "one process. Use InputReplicationMode.PER_WORKER"
    )


def replication_mode(options: InputOptions | None) -> InputReplicationMode:
    """Return the replication mode of ``options``, after checking that they fit together."""
    if options is None:
        return InputReplicationMode.PER_WORKER
    if not isinstance(options, InputOptions):
        raise TypeError(
            f"options is {options!r} of type {type(options).__name__}; expected None or mpidist.InputOptions(...)"
        )
    mode = options.experimental_replication_mode
    if options.experimental_place_dataset_on_device:
        if mode is not InputReplicationMode.PER_REPLICA:
            raise ValueError(
                "experimental_place_dataset_on_device=True needs a pipeline for each replica. Add "
                "experimental_replication_mode=InputReplicationMode.PER_REPLICA"
            )
        if options.experimental_fetch_to_device is not False:
            raise ValueError(
                "experimental_place_dataset_on_device=True leaves nothing to fetch to the device. Add "
                "experimental_fetch_to_device=False"
            )
    return mode


def _call(dataset_fn: Callable[[InputContext], Dataset], input_context: InputContext) -> GraphNode:
    with context.outside():
        dataset: object = dataset_fn(input_context)
    if is_loader(dataset):
        dataset = Dataset.from_source(dataset)
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"dataset_fn returned {dataset!r} of type {type(dataset).__name__} for {input_context}; {_HOW_TO_MAKE_ONE}"
        )
    return graph_and_options(dataset)[0]
