"""DistributedDataset: batches for the replicas of a strategy, and the iterator of a pass.

In every step of a pass each replica gets a batch, or an empty one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, NoReturn

import numpy as np

from mpidist.core import context
from mpidist.core.context import StrategyLike
from mpidist.core.errors import MismatchError
from mpidist.core.text import said_lines
from mpidist.input.device_feed import DeviceFeed, on_place
from mpidist.input.distribution import Distribution
from mpidist.input.element_spec import empty_batch, spec_of, with_rows
from mpidist.input.graph import INFINITE, UNKNOWN
from mpidist.input.iteration import E_co, Optional, PassIterator, S, pass_failed, reduce_elements
from mpidist.input.local_batches import MISSING
from mpidist.input.resuming import Remainder
from mpidist.values import regroup

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator


class DistributedDataset(Generic[E_co]):
    """Batches for the replicas of a strategy, re-iterable (tf.distribute.DistributedDataset).

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

    def __iter__(self) -> DistributedIterator[E_co]:
        """Begin a new pass; collective: call it on every rank, in the same order.

        Raises:
            MismatchError: The ranks have begun different numbers of passes before; on all ranks.
        """
        distribution = self._distribution
        require_outside_replica_function(distribution.strategy, "iter() of a distributed dataset")
        remainder = distribution.next_pass()
        number = remainder.position.pass_number
        communicator = distribution.workers.communicator
        if communicator is not None:
            most, least = communicator.all_reduce("MAX", np.array([number, -number]))
            if most != -least:
                raise MismatchError(
                    f"this rank begins pass {number + 1} over a distributed dataset, and the ranks are "
                    f"between pass {-least + 1} and {most + 1}; expected iter() the same number of times on "
                    "every rank, since passes are shuffled alike"
                )
        return DistributedIterator(distribution, remainder)

    def __next__(self) -> NoReturn:
        raise TypeError(
            "next() was called on a distributed dataset, of which every pass has an iterator of its own; call iter() "
            "first: iterator = iter(dataset), then next(iterator), or write `for batch in dataset:`"
        )

    def reduce(self, initial_state: S, reduce_func: Callable[[S, E_co], S]) -> S:
        """Return the result of ``reduce_func`` over one pass, each rank for itself.

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
        """Return the number of steps in a pass, equal on all ranks.

        -1 stands for endless, -2 for unknown.
        """
        return self._distribution.steps

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


class DistributedIterator(PassIterator[E_co]):
    """One pass over a distributed dataset (tf.distribute.DistributedIterator).

    Every method that moves on is collective: call it on every rank, in the same order. The pass ends for all
    ranks at the same step, when no replica anywhere has data left; replicas that run out earlier get batches
    without rows. Where the number of steps is known nothing is exchanged in a step.
    """

    _over = "the distributed dataset"

    def _begin(self, remainder: Remainder) -> None:
        super()._begin(remainder)
        distribution, batches = self._distribution, remainder.batches
        run = remainder.run(self._readers)

        def steps() -> Iterator[list[object]]:
            # Sources are opened where an error reaches all ranks: in the first step.
            yield from batches.open(run, remainder.start)

        self._feed: DeviceFeed | None = None
        if distribution.places is None:
            self._steps = steps()
        else:
            self._steps = self._feed = DeviceFeed(steps, distribution.places, distribution.buffer_size, self._readers)
        total = distribution.steps if batches is distribution.batches else batches.steps
        self._steps_left = total - remainder.start if total >= 0 else total
        self._ended = False

    @property
    def element_spec(self) -> Any:
        """The element spec of the dataset."""
        return self._distribution.element_spec()

    def restore(self, state: dict[str, object]) -> None:
        """Continue from a ``state()``; collective: call it on every rank.

        The dataset must be made of the same steps over the same data, on any number of ranks and replicas. The pass
        goes on with the element that comes next, and later passes are shuffled as they would have been. On as many
        ranks and replicas each goes on in its own part. On others the global batches stay the same and are cut for the
        replicas there are now; elements that each rank read for itself (FILE, HINT, OFF and functions) every rank then
        reads for all until the pass ends, and elements of functions go to the replicas in turn. With
        AutoShardPolicy.DATA the batch size may be another one.

        Rows that are read by number are not read again; of a stream everything before is read and dropped.

        Args:
            state: From ``state()``, the same on every rank.

        Raises:
            TypeError: ``state`` is no dict.
            ValueError: It is damaged, or that of another dataset, or of another batch size where that must not change.
            MismatchError: The ranks were given different states; on all ranks.

        >>> import mpidist
        >>> strategy = mpidist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> dataset = mpidist.Dataset.range(8).batch(4)
        >>> iterator = iter(strategy.experimental_distribute_dataset(dataset))
        >>> _ = next(iterator)
        >>> other = iter(strategy.experimental_distribute_dataset(dataset))
        >>> other.restore(iterator.state())
        >>> next(other)
        PerReplica:{0: array([4, 5]), 1: array([6, 7])}
        >>> strategy.close()
        """
        distribution, workers = self._distribution, self._distribution.workers
        batches = distribution.batches
        require_outside_replica_function(distribution.strategy, "restore() of a distributed iterator")
        with workers.shared_errors("going on from the state of an iterator"):
            remainder = distribution.rest_from(state)
        if workers.communicator is not None:
            _require_same(remainder, workers.communicator)
            if remainder.batches is batches and batches.may_run_out and distribution.steps != UNKNOWN:
                # A rank whose data ran out before this step sees no batch of its own any more.
                distribution.learn_spec()
        self.close()
        distribution.continue_from(remainder.position)
        self._begin(remainder)

    def close(self) -> None:
        """End the pass and the threads of ``prefetch``.

        Waits for the elements that they are reading. Nothing is exchanged: where ranks are to end a pass early they all
        call it, at the same step.
        """
        self._ended = True
        self._close_readers()
        self._steps = iter(())
        self._feed = None

    def _close_readers(self, wait: bool = True) -> None:
        self._readers.close(wait)
        if self._feed is not None:
            self._feed.close()

    def _advance(self, method: str) -> Optional[E_co]:
        require_outside_replica_function(self._distribution.strategy, f"{method} of a distributed iterator")
        if self._failure is not None:
            raise pass_failed(method, self._failure)
        if self._ended:
            return Optional()
        try:
            found = self._next_step()
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            self._close_readers(wait=isinstance(error, Exception))
            raise
        if not found.has_value():
            self.close()
        return found

    def _next_step(self) -> Optional[E_co]:
        workers = self._distribution.workers
        several = workers.num_workers > 1
        step: list[object] | None = None
        if not (several and self._taken == self._steps_left):
            with workers.shared_errors("reading the next batch"):
                step = next(self._steps, None)
                if step is not None and self._distribution.spec is None:
                    element = next(part for part in step if part is not MISSING)
                    self._distribution.spec = with_rows(spec_of(element), None)
            more = step is not None or several
            if several and self._steps_left == UNKNOWN:
                more = self._vote(step)
        else:
            more = False
        if not more:
            return Optional()
        self._taken += 1
        with workers.shared_errors("making up the batches of a step"):
            return Optional(self._complete(step or [MISSING] * workers.num_local_replicas))

    def _vote(self, step: list[object] | None) -> bool:
        """Return whether any rank has data.

        Learns the spec of its batches from it where need be.
        """
        distribution, communicator = self._distribution, self._distribution.workers.communicator
        assert communicator is not None
        ballot = np.array([step is not None, distribution.spec is None], dtype=np.int64)
        someone_has_data, someone_needs_spec = communicator.all_reduce("MAX", ballot)
        if someone_has_data and someone_needs_spec:
            distribution.gather_spec()
        return bool(someone_has_data)

    def _complete(self, step: list[object]) -> Any:
        workers = self._distribution.workers
        if any(part is MISSING for part in step):
            empty = empty_batch(self._distribution.spec)
            places = self._distribution.places
            step = [
                part if part is not MISSING else empty if places is None else on_place(places[i], empty)
                for i, part in enumerate(step)
            ]
        return regroup(step, workers.local_replica_ids, always_wrap=True) if workers.wrap else step[0]


def _require_same(remainder: Remainder, communicator: Communicator) -> None:
    """Raise MismatchError on all ranks unless all continue alike."""
    told = communicator.all_gather_object((remainder.position, remainder.previous_pipelines()))
    if any(other != told[0] for other in told):
        plans = {rank: f"{position}, {'; '.join(pipelines)}" for rank, (position, pipelines) in enumerate(told)}
        lines = "\n".join(["", *said_lines(plans.items(), "  ")])
        raise MismatchError(
            "restore() of a distributed iterator does not go on alike on all ranks; expected the same state on every "
            "rank, and, on another number of ranks, a dataset_fn whose dataset depends on its InputContext alone:"
            f"{lines}",
            plans,
        )


def require_outside_replica_function(strategy: StrategyLike | None, call: str) -> None:
    """Raise ValueError inside a replica function.

    ``call`` is the method and its object, for the message.
    """
    if context.has_strategy() and context.get_replica_context() is not None:
        raise ValueError(
            f"{call} was called inside a replica function of {type(strategy).__name__}; take the element "
            "before, in strategy.run(fn, args=(next(iterator),))"
        )
