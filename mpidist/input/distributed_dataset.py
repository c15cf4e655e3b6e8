"""DistributedDataset: batches for the replicas of a strategy, pass after pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from mpidist.core.errors import MismatchError
from mpidist.input.distributed_iterator import DistributedIterator, require_outside_replica_function
from mpidist.input.distribution import Distribution
from mpidist.input.graph import INFINITE, UNKNOWN
from mpidist.input.iteration import reduce_elements


class DistributedDataset:
    """Batches for the replicas of a strategy, anew with each ``iter`` (tf.distribute.DistributedDataset).

    Strategies make it: ``experimental_distribute_dataset`` and ``distribute_datasets_from_function``.
    Elements have the structure of the dataset's own; each leaf is a PerReplica of this rank's replicas, or
    the bare array where a strategy of one replica hands batches through. For replicas on GPUs the arrays have been
    copied there, the next batches while the present one is used (see ``InputOptions``). ``iter()`` and ``next()``
    are collective: call them on every rank, in the same order.

    >>> import mpidist
    >>> strategy = mpidist.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> dataset = mpidist.Dataset.range(6).batch(4)
    >>> for batch in strategy.experimental_distribute_dataset(dataset):
    ...     print(strategy.experimental_local_results(batch))
    (array([0, 1]), array([2, 3]))
    (array([4]), array([5]))
    >>> strategy.close()
    """

    def __init__(self, distribution: Distribution) -> None:
        self._distribution = distribution

    def __iter__(self) -> DistributedIterator:
        """Begin a new pass; collective: call it on every rank, in the same order.

        Raises:
            MismatchError: The ranks have begun different numbers of passes before; on all ranks.
        """
        distribution = self._distribution
        require_outside_replica_function(distribution.strategy, "iter() of a distributed dataset")
        number = distribution.passes
        distribution.passes += 1
        communicator = distribution.workers.communicator
        if communicator is not None:
            most, least = communicator.all_reduce("MAX", np.array([number, -number]))
            if most != -least:
                raise MismatchError(
                    f"this rank begins pass {number + 1} over a distributed dataset, and the ranks are "
                    f"between pass {-least + 1} and {most + 1}; expected iter() the same number of times on "
                    "every rank, since passes are shuffled alike"
                )
        return DistributedIterator(distribution, distribution.whole_pass(number))

    def __next__(self) -> NoReturn:
        raise TypeError(
            "next() was called on a distributed dataset, of which every pass has an iterator of its own; call iter() "
            "first: iterator = iter(dataset), then next(iterator), or write `for batch in dataset:`"
        )

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
        require_outside_replica_function(self._distribution.strategy, "reduce() of a distributed dataset")
        return reduce_elements(self, initial_state, reduce_func)

    @property
    def element_spec(self) -> Any:
        """The nest of PerReplicaSpec of an element, or of ArraySpec where elements come bare.

        The first size of a shape is None where batches may be smaller or empty. Not collective.

        Raises:
            ValueError: This rank's dataset has no element to tell from.
        """
        return self._distribution.element_spec()

    def cardinality(self) -> int:
        """Return the number of steps in a pass, equal on all ranks: -1 without end, -2 unknown."""
        return self._distribution.agreement.steps

    def __len__(self) -> int:
        steps = self.cardinality()
        if steps < 0:
            kind = "endless" if steps == INFINITE else "not known beforehand"
            raise TypeError(f"the number of steps of this distributed dataset is {kind}; ask cardinality()")
        return steps

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        special = {INFINITE: "steps without end", UNKNOWN: "an unknown number of steps"}
        count, replicas = self.cardinality(), self._distribution.workers.num_replicas_in_sync
        steps = special.get(count, f"{count} step{'s' * (count != 1)}")
        return f"<{type(self).__name__} {self._distribution}, {steps} for {replicas} replica{'s' * (replicas != 1)}>"
