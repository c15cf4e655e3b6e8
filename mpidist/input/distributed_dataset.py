"""DistributedDataset and its iterator: every step gives each replica a batch, or an empty one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpidist.core import context
from mpidist.core.errors import MismatchError, OutOfRangeError
from mpidist.core.protocols import StrategyLike
from mpidist.input.agreement import Agreement, gather_spec
from mpidist.input.element_spec import PerReplicaSpec, empty_batch, flatten_spec, map_spec, spec_of, with_rows
from mpidist.input.iteration import reduce_elements
from mpidist.input.local_batches import MISSING, LocalBatches
from mpidist.input.optional import Optional
from mpidist.input.read_ahead import Readers
from mpidist.input.reordering import INFINITE, UNKNOWN, Pass
from mpidist.values import regroup


class DistributedDataset:
    """Batches for the replicas of a strategy, anew with each ``iter`` (tf.distribute.DistributedDataset).

    Strategies make it: ``experimental_distribute_dataset`` and ``distribute_datasets_from_function``.
    Elements have the structure of the dataset's own; each leaf is a PerReplica of this rank's replicas, or
    the bare array where a strategy of one replica hands batches through. ``iter()`` and ``next()`` are
    collective: call them on every rank, in the same order.

    >>> import mpidist
    >>> strategy = mpidist.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> dataset = mpidist.Dataset.range(6).batch(4)
    >>> for batch in strategy.experimental_distribute_dataset(dataset):
    ...     print(strategy.experimental_local_results(batch))
    (array([0, 1]), array([2, 3]))
    (array([4]), array([5]))
    >>> strategy.close()
    """

    def __init__(self, batches: LocalBatches, agreement: Agreement, strategy: StrategyLike) -> None:
        self._batches = batches
        self._agreement = agreement
        self._strategy = strategy
        self._passes = 0

    def __iter__(self) -> DistributedIterator:
        """Begin a new pass; collective: call it on every rank, in the same order.

        Raises:
            MismatchError: The ranks have begun different numbers of passes before; on all ranks.
        """
        _require_outside_replica_function(self._strategy, "iter() of a distributed dataset")
        number = self._passes
        self._passes += 1
        communicator = self._batches.workers.communicator
        if communicator is not None:
            most, least = communicator.all_reduce("MAX", np.array([number, -number]))
            if most != -least:
                raise MismatchError(
                    f"this rank begins pass {number + 1} over a distributed dataset, and the ranks are "
                    f"between pass {-least + 1} and {most + 1}; expected iter() the same number of times on "
                    "every rank, since passes are shuffled alike"
                )
        return DistributedIterator(self, Pass((number,), self._agreement.seeds, Readers()))

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Return what ``reduce_func`` makes of all elements of one pass, each rank for itself.

        Collective as iterating is: call it on every rank, in the same order. The states are not combined: for a
        result of all ranks, let ``reduce_func`` use ``strategy.reduce``, or reduce the last state.

        Args:
            initial_state: The first state, of any kind; returned where there is no element.
            reduce_func: Gets the state and an element, as ``next`` gives it; returns the next state. It may use
                the strategy, on every rank alike.

        Raises:
            TypeError: ``reduce_func`` is not callable.
            ValueError: The dataset is endless, or this was called inside a replica function.

        >>> import mpidist
        >>> strategy = mpidist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> dataset = strategy.experimental_distribute_dataset(mpidist.Dataset.range(6).batch(4))
        >>> int(dataset.reduce(0, lambda total, batch: total + strategy.reduce("SUM", batch, axis=0)))
        15
        >>> strategy.close()
        """
        _require_outside_replica_function(self._strategy, "reduce() of a distributed dataset")
        return reduce_elements(self, initial_state, reduce_func)

    @property
    def element_spec(self) -> Any:
        """The nest of PerReplicaSpec of an element, or of ArraySpec where elements come bare.

        The first size of a shape is None where batches may be smaller or empty. Not collective.

        Raises:
            ValueError: This rank's dataset has no element to tell from.
        """
        specs = self._batches.local_specs()
        if specs is None:
            raise ValueError(
                f"{self._batches.nodes[0]} gives no element on this rank, so nothing tells what they look like"
            )
        if not self._batches.workers.wrap:
            return specs[0]
        leaves = zip(*map(flatten_spec, specs), strict=True)
        return map_spec(lambda _: PerReplicaSpec(tuple(next(leaves))), specs[0])

    def cardinality(self) -> int:
        """Return the number of steps in a pass, equal on all ranks: -1 without end, -2 unknown."""
        return self._agreement.steps

    def __len__(self) -> int:
        steps = self.cardinality()
        if steps < 0:
            kind = "endless" if steps == INFINITE else "not known beforehand"
            raise TypeError(f"the number of steps of this distributed dataset is {kind}; ask cardinality()")
        return steps

    def __bool__(self) -> bool:
        return True


class DistributedIterator:
    """One pass over a distributed dataset (tf.distribute.DistributedIterator).

    Every method that moves on is collective: call it on every rank, in the same order. The pass ends for all
    ranks at the same step, when no replica anywhere has data left; replicas that run out earlier get batches
    without rows. Where the number of steps is known nothing is exchanged in a step.
    """

    def __init__(self, dataset: DistributedDataset, run: Pass) -> None:
        self._dataset = dataset
        self._readers = run.readers
        self._steps = dataset._batches.open(run)
        self._taken = 0
        self._ended = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        found = self._advance("next()")
        if not found.has_value():
            raise StopIteration
        return found.get_value()

    def get_next(self) -> Any:
        """Return the next element; collective: call it on every rank, in the same order.

        Raises:
            OutOfRangeError: There is none; on all ranks at the same step.
            ValueError: Called inside a replica function.
        """
        found = self._advance("get_next()")
        if not found.has_value():
            raise OutOfRangeError(
                f"the distributed dataset ended after {self._taken} steps; begin another pass with "
                "iter(dataset), or ask get_next_as_optional()"
            )
        return found.get_value()

    def get_next_as_optional(self) -> Optional:
        """Return the next element, or an Optional without value; collective as :meth:`get_next`.

        Raises:
            ValueError: Called inside a replica function.
        """
        return self._advance("get_next_as_optional()")

    @property
    def element_spec(self) -> Any:
        """As that of the dataset."""
        return self._dataset.element_spec

    def close(self) -> None:
        """End the pass, and the threads of ``prefetch`` with it; waits for the elements that they are reading.

        Nothing is exchanged: where ranks are to end a pass early they all call it, at the same step.
        """
        self._ended = True
        self._close_readers()
        self._steps = iter(())

    def _close_readers(self) -> None:
        if self._readers is not None:
            self._readers.close()

    def _advance(self, method: str) -> Optional:
        _require_outside_replica_function(self._dataset._strategy, f"{method} of a distributed iterator")
        if self._ended:
            return Optional()
        try:
            found = self._next_step()
        except BaseException:
            self._close_readers()
            raise
        if not found.has_value():
            self.close()
        return found

    def _next_step(self) -> Optional:
        batches, agreement = self._dataset._batches, self._dataset._agreement
        workers = batches.workers
        several = workers.num_workers > 1
        step: list[Any] | None = None
        if not (several and self._taken == agreement.steps):
            with workers.shared_errors("reading the next batch"):
                step = next(self._steps, None)
                self._remember_spec(step)
            more = step is not None or several
            if several and agreement.steps == UNKNOWN:
                more = self._vote(step)
        else:
            more = False
        if not more:
            return Optional()
        self._taken += 1
        with workers.shared_errors("making up the batches of a step"):
            return Optional(self._complete(step or [MISSING] * workers.num_local_replicas))

    def _remember_spec(self, step: list[Any] | None) -> None:
        if step is not None and self._dataset._agreement.spec is None:
            element = next(part for part in step if part is not MISSING)
            self._dataset._agreement.spec = with_rows(spec_of(element), None)

    def _vote(self, step: list[Any] | None) -> bool:
        """Return whether any rank has data, and learn from it what its batches look like if need be."""
        batches, agreement = self._dataset._batches, self._dataset._agreement
        assert batches.workers.communicator is not None
        ballot = np.array([step is not None, agreement.spec is None], dtype=np.int64)
        someone_has_data, someone_needs_spec = batches.workers.communicator.all_reduce("MAX", ballot)
        if someone_has_data and someone_needs_spec:
            agreement.spec = gather_spec(batches, agreement.spec)
        return bool(someone_has_data)

    def _complete(self, step: list[Any]) -> Any:
        workers = self._dataset._batches.workers
        if any(part is MISSING for part in step):
            empty = empty_batch(self._dataset._agreement.spec)
            step = [empty if part is MISSING else part for part in step]
        return regroup(step, workers.local_replica_ids, always_wrap=True) if workers.wrap else step[0]


def _require_outside_replica_function(strategy: StrategyLike, what: str) -> None:
    if context.has_strategy() and context.get_replica_context() is not None:
        raise ValueError(
            f"{what} was called inside a replica function of {type(strategy).__name__}; take the element "
            "before, in strategy.run(fn, args=(next(iterator),))"
        )
