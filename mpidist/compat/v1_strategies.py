"""The strategies of ``tf.compat.v1``: ``reduce`` without an axis, restartable iterators, ``experimental_run``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from mpidist.cluster_resolver import ClusterResolver
from mpidist.core import context, settings
from mpidist.core.errors import MismatchError
from mpidist.core.options import ReduceOp
from mpidist.input import (
    Dataset,
    InputContext,
    InputOptions,
    InputReplicationMode,
    InputWorkers,
    distribute_dataset,
    distribute_from_function,
)
from mpidist.input.batching import last_batching
from mpidist.input.dataset import graph_and_options
from mpidist.input.distribute import share_of
from mpidist.input.distributed_dataset import DistributedDataset, DistributedIterator
from mpidist.input.elements import as_element, row_count
from mpidist.input.iteration import Optional
from mpidist.input.nodes import INFINITE, Form, Pass, PassThrough
from mpidist.input.sources import StreamSource
from mpidist.parameter_server.link import EVERY_WORKER, Link, link_of, resolver_of
from mpidist.parameter_server.parameter_server_extended import ParameterServerExtended
from mpidist.strategies.base import Strategy, Value
from mpidist.strategies.central_storage import CentralStorageExtended, CentralStorageStrategy
from mpidist.strategies.default import default_strategy
from mpidist.strategies.mirrored import MirroredStrategy, MultiWorkerMirroredStrategy, OneDeviceStrategy
from mpidist.strategies.replica_devices import check_devices
from mpidist.topology import world_topology
from mpidist.values.placement import HOST

_END = object()


class InputIterator:
    """Restartable iterator over a distributed dataset (tf.distribute.InputIterator).

    ``initialize`` begins a new pass. Strategies of ``mpidist.v1`` create it. Its methods are collective: call them on
    every rank, in the same order.

    Args:
        dataset: A distributed dataset.
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._iterator: DistributedIterator | None = None

    def initialize(self) -> list[object]:
        """Begin a new pass, and return an empty list of operations.

        If this was not called, the first ``get_next`` begins the first pass.
        """
        self._begin()
        return []

    @property
    def initializer(self) -> list[object]:
        """Begin a new pass, as :meth:`initialize` does."""
        return self.initialize()

    def get_next(self) -> Any:
        """Return the next element.

        Raises:
            OutOfRangeError: The pass has ended. Call ``initialize`` to begin another one.
        """
        return self._begun().get_next()

    def next(self) -> Any:
        """Return the next element; another name of :meth:`get_next`."""
        return self.get_next()

    def get_next_as_optional(self) -> Optional:
        """Return the next element, or an Optional without value."""
        return self._begun().get_next_as_optional()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._begun())

    @property
    def element_spec(self) -> Any:
        """The element spec of the distributed dataset."""
        return self._dataset.element_spec

    def close(self) -> None:
        """End the pass, as ``close`` of a distributed iterator does."""
        if self._iterator is not None:
            self._iterator.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._dataset if self._iterator is None else self._iterator}>"

    def _begin(self) -> DistributedIterator:
        self.close()
        self._iterator = iter(self._dataset)
        return self._iterator

    def _begun(self) -> DistributedIterator:
        return self._begin() if self._iterator is None else self._iterator


def _dataset_fn_of(
    input_fn: Callable[[InputContext], object], replication_mode: InputReplicationMode
) -> Callable[[InputContext], Dataset]:
    """Return a function that makes a Dataset of the result of ``input_fn``."""
    if not callable(input_fn):
        raise TypeError(f"input_fn is {input_fn!r}; expected a function that takes an InputContext")
    if replication_mode is not InputReplicationMode.PER_WORKER:
        raise ValueError(
            f"replication_mode is {replication_mode!r}; make_input_fn_iterator() takes InputReplicationMode.PER_WORKER "
            "only, and distribute_datasets_from_function() of a MirroredStrategy PER_REPLICA"
        )

    def dataset_fn(context: InputContext) -> Dataset:
        made = input_fn(context)
        if isinstance(made, Dataset):
            return made
        if not callable(made):
            raise ValueError(
                f"input_fn returned {made!r} of type {type(made).__name__} for {context}; expected a Dataset, or a "
                "function without arguments that returns the value of a replica in a step"
            )
        name = getattr(made, "__name__", type(made).__name__)
        return Dataset(StreamSource(lambda: (made() for _ in count()), f"input_fn({name})", None, INFINITE))

    return dataset_fn


@dataclass(eq=False, repr=False)
class EvenBatches(PassThrough):
    """The same batches, checked to be multiples of the number of replicas. The last may be smaller."""

    replicas: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.text = f"shared_by({self.replicas})"
        if self.form is Form.ROWS:  # each element is a batch, whose rows are counted when it is read
            self.form, self.chosen_from, self.read_ahead = Form.ELEMENTS, None, 0

    def items(self, run: Pass) -> Iterator[object]:
        """Yield the batches. Raise ValueError for one that replicas cannot share equally."""
        by_number = self.form is Form.BATCHES
        batches: Iterator[Any] = self.source.items(run) if by_number else self.source.elements(run)
        made = last_batching(self.source)
        whole = 0 if made is None or made.size % self.replicas else made.size
        for batch in batches:
            rows = len(batch) if by_number else row_count(as_element(batch))
            if rows % self.replicas and (rows >= whole or next(batches, _END) is not _END):
                raise _uneven(rows, self.replicas)
            whole = max(whole, rows)
            yield batch


def _with_even_batches(dataset: Dataset, replicas: int) -> Dataset:
    """Check that replicas can share batches equally. If their size is unknown, check each when it is read."""
    node, options = graph_and_options(dataset)
    size = node.batch_size() if node.batched else None
    if size is None:
        return Dataset(EvenBatches((node,), replicas), options)
    if size % replicas:
        raise _uneven(size, replicas)
    return dataset


def _uneven(rows: int, replicas: int) -> ValueError:
    return ValueError(
        f"the dataset has batches of {rows} rows, which {replicas} replicas in sync cannot share equally; expected a "
        f"multiple of {replicas}, or use make_input_fn_iterator(input_fn) or experimental_distribute_dataset(dataset), "
        "which takes any size"
    )


class StrategyV1(Strategy):
    """The additions of the v1 forms to a strategy."""

    def reduce(self, reduce_op: ReduceOp | str, value: Value, axis: int | tuple[int, ...] | None = None) -> Value:
        """Combine a value, as ``Strategy.reduce`` does; ``axis`` may be left out (collective)."""
        return super().reduce(reduce_op, value, axis)

    def make_dataset_iterator(self, dataset: Dataset) -> InputIterator:
        """Return an iterator over ``dataset``, divided as ``experimental_distribute_dataset`` does (collective).

        Args:
            dataset: Dataset in global batches. Their size must be a multiple of the number of replicas. A smaller last
                batch may have any size.

        Raises:
            ValueError: The batch size is no multiple of the number of replicas. If the size is unknown, as after
                ``map``, the iterator raises it at the first such batch.

        >>> strategy = OneDeviceStrategyV1("cpu:0")
        >>> iterator = strategy.make_dataset_iterator(Dataset.range(4).batch(2))
        >>> iterator.initialize(), iterator.get_next(), iterator.get_next()
        ([], array([0, 1]), array([2, 3]))
        """
        self._require_cross_replica("make_dataset_iterator()", "call it before run()")
        replicas = self.num_replicas_in_sync
        if isinstance(dataset, Dataset) and replicas > 1:
            dataset = _with_even_batches(dataset, replicas)
        return InputIterator(self._extended.distribute_dataset(dataset, None))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], object],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> InputIterator:
        """Return an iterator over the results of ``input_fn`` on each rank (collective).

        Args:
            input_fn: Function that is called once on each rank with an InputContext. It returns a Dataset that is
                batched per replica, and the local replicas get its batches in turn. Or it returns a function without
                arguments, which is called for each local replica in each step, without end.
            replication_mode: PER_WORKER, the only supported mode.

        Raises:
            ValueError: Another replication mode, or ``input_fn`` returned something else.
        """
        self._require_cross_replica("make_input_fn_iterator()", "call it before run()")
        dataset_fn = _dataset_fn_of(input_fn, replication_mode)
        return InputIterator(self._extended.distribute_from_function(dataset_fn, None))

    def experimental_run(self, fn: Callable[..., object], input_iterator: InputIterator | None = None) -> Any:
        """Run ``fn``, as ``run`` does, with the next element of an iterator.

        Collective if the iterator's ``get_next`` is: call it on every rank.

        Args:
            fn: The function. Without an iterator it has no arguments.
            input_iterator: From :meth:`make_dataset_iterator` or :meth:`make_input_fn_iterator`.

        Raises:
            OutOfRangeError: The pass has ended.

        >>> strategy = OneDeviceStrategyV1("cpu:0")
        >>> iterator = strategy.make_dataset_iterator(Dataset.range(4).batch(2))
        >>> strategy.experimental_run(lambda batch: batch * 10, iterator)
        array([ 0, 10])
        """
        with self.scope():
            return self.run(fn, args=() if input_iterator is None else (input_iterator.get_next(),))


class DefaultStrategyV1(StrategyV1):
    """The default strategy in its v1 form: another face of the same object."""

    @contextmanager
    def scope(self) -> Iterator[Any]:
        """Enter the scope, as ``Strategy.scope`` does."""
        with context.scope(self._extended.strategy):
            yield self


_default_strategy = DefaultStrategyV1(default_strategy.extended)


def get_strategy() -> Any:
    """Return the current strategy of this thread, or the default strategy in its v1 form.

    >>> get_strategy().reduce("SUM", 2.0)
    np.float64(2.0)
    """
    current = context.get_strategy()
    return _default_strategy if context.is_default(current) else current


class OneDeviceStrategyV1(StrategyV1, OneDeviceStrategy):
    """OneDeviceStrategy in its v1 form."""


class MirroredStrategyV1(StrategyV1, MirroredStrategy):
    """MirroredStrategy in its v1 form."""


class CentralStorageStrategyV1(StrategyV1, CentralStorageStrategy):
    """CentralStorageStrategy in its v1 form."""


class MultiWorkerMirroredStrategyV1(StrategyV1, MultiWorkerMirroredStrategy):
    """MultiWorkerMirroredStrategy in its v1 form."""


# Parameter servers --------------------------------------------------------------------------------------------------


class WorkerExtended(ParameterServerExtended):
    """One of several workers, each of which runs its own copy of the program."""

    def __init__(
        self,
        strategy: Strategy,
        link: Link,
        devices: tuple[str, ...] | None,
        resolver: ClusterResolver,
        max_staleness: int | None,
    ) -> None:
        self._worker_id = link.workers.index(link.rank)
        self._barriers = self._inputs = 0
        super().__init__(strategy, link, devices, resolver, self._worker_id == 0, max_staleness)
        others = link.agree(("strategy", self.number), max_staleness, "making a strategy")
        if others != max_staleness:
            self.close()
            raise MismatchError(
                f"this worker gave max_staleness={max_staleness}, and another worker {others}; expected the same on all"
            )

    def barrier(self) -> None:
        """Wait for every worker that has not left; see ``ParameterServerStrategyV1``."""
        self._barriers += 1
        arguments = self.number, self._barriers, self.link.rank
        self.link.connections[0].control("barrier", *arguments, doing="waiting for the other workers in barrier()")
        # Another worker may have restored a checkpoint before.
        self.forget_counts()

    @property
    def should_checkpoint(self) -> bool:
        """Whether this is the chief, or the first worker."""
        return self._worker_id == 0

    @property
    def spans_ranks(self) -> bool:
        """True: every worker runs the program."""
        return True

    @property
    def experimental_should_init(self) -> bool:
        """Whether this is the chief: the workers share their variables."""
        return self.should_checkpoint

    def _sharing_input(self) -> InputWorkers:
        """Return the input workers for the next dataset, with the same seeds on all workers."""
        self._inputs += 1
        key = ("seeds", self.number, self._inputs)
        return replace(
            self.input_workers(), first_given=lambda seeds: self.link.agree(key, seeds, "distributing a dataset")
        )

    def distribute_dataset(self, dataset: Dataset, options: InputOptions | None) -> DistributedDataset:
        """See ``StrategyExtended``: this worker's share of the dataset."""
        if isinstance(dataset, Dataset):
            dataset = share_of(dataset, len(self.link.workers), self._worker_id)
        return distribute_dataset(dataset, self._sharing_input(), self.strategy, options)

    def distribute_from_function(
        self, dataset_fn: Callable[[InputContext], Dataset], options: InputOptions | None
    ) -> DistributedDataset:
        """See ``StrategyExtended``: the function gets this worker's number."""

        def for_this_worker(context: InputContext) -> Dataset:
            own = InputContext(len(self.link.workers), self._worker_id, context.num_replicas_in_sync)
            return dataset_fn(own)

        fn = for_this_worker if callable(dataset_fn) else dataset_fn
        return distribute_from_function(fn, self._sharing_input(), self.strategy, options)


class AloneExtended(CentralStorageExtended):
    """The worker of a program without a cluster: its variables are on its own host."""

    def __init__(self, strategy: Strategy, devices: tuple[str, ...] | None, resolver: ClusterResolver) -> None:
        super().__init__(strategy, devices, HOST.device, None)
        self.cluster_resolver = resolver

    def barrier(self) -> None:
        """Return at once, because there are no other workers."""


class ParameterServerStrategyV1(StrategyV1):
    """Asynchronous training with variables on servers (the v1 ParameterServerStrategy).

    Every worker runs the program. Its local replicas are synchronous, and it does not wait for other workers. Variables
    go to the servers in turn, in the order of their creation, which must be the same on all workers. The first worker's
    initial values count, and others wait for them. A read pulls the value. An assignment, a scatter or an optimizer's
    update is one request, which the server performs as a whole, so that no update of another worker is lost. Between
    requests other workers may change a variable, so gradients may use old values.

    The ``ps`` ranks call ``mpidist.Server(resolver).join()``. The first strategy is collective over all ranks of the
    cluster. In a single process without resolver and roles, variables are on the host, so that you can try a program.

    Args:
        cluster_resolver: The roles of the ranks. The default is the roles of the MPI job
            (``MPIDIST_JOBS="ps:1,worker:3"``).
        devices: Device strings of this worker's replicas; its share of the GPUs, or the CPU, by default. Extension.
        max_staleness: The number of steps, counted by ``apply_gradients``, that a worker may be ahead of the slowest
            before it waits; None for any number. It must be the same on all workers. Extension.

    Raises:
        ValueError: The cluster has no servers, or this rank is no worker.
        RuntimeError: This rank has served as a task of the cluster, and its job is over.
        MismatchError: Workers differ in ``max_staleness``.
        CollectiveTimeoutError: Some ranks of the cluster did not arrive.

    Source: https://www.tensorflow.org/api_docs/python/tf/compat/v1/distribute/experimental/ParameterServerStrategy

    >>> import mpidist
    >>> with ParameterServerStrategyV1(devices=["cpu:0", "cpu:1"]) as strategy:
    ...     with strategy.scope():
    ...         v = mpidist.Variable(0.0, aggregation=mpidist.VariableAggregation.SUM)
    ...     float(strategy.run(lambda: v.assign_add(1.0)))
    2.0
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        devices: Sequence[str] | None = None,
        max_staleness: int | None = None,
    ) -> None:
        resolver = resolver_of(cluster_resolver)
        local_devices = check_devices(devices)
        if max_staleness is not None and (isinstance(max_staleness, bool) or not isinstance(max_staleness, int)):
            raise TypeError(f"max_staleness is {max_staleness!r}; expected a whole number of steps, or None")
        if max_staleness is not None and max_staleness < 0:
            raise ValueError(f"max_staleness is {max_staleness}; expected at least 0")
        if cluster_resolver is None and _is_alone():
            super().__init__(AloneExtended(self, local_devices, resolver))
            return
        link = link_of(resolver, EVERY_WORKER)
        super().__init__(WorkerExtended(self, link, local_devices, resolver, max_staleness))

    def barrier(self) -> None:
        """Wait until every other worker has called it as often as this one. Extension.

        Workers that have closed the strategy or ended do not count. Use it when the chief must finish something before
        the others continue, such as restoring a checkpoint.

        Raises:
            CollectiveTimeoutError: The others did not arrive within ``MPIDIST_TIMEOUT``.
        """
        context.require_cross_replica(self, "barrier()", "call it outside run()")
        extended = self.extended
        assert isinstance(extended, (WorkerExtended, AloneExtended))
        extended.barrier()


def _is_alone() -> bool:
    return settings.JOBS.read() is None and world_topology().size == 1
