"""DistributedIterator: one pass; every step gives each replica a batch, or an empty one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.core import context
from mpidist.core.errors import MismatchError, OutOfRangeError
from mpidist.core.protocols import StrategyLike
from mpidist.input.device_feed import DeviceFeed, on_place
from mpidist.input.distribution import Distribution, gather_spec, learn_spec
from mpidist.input.element_spec import empty_batch, spec_of, with_rows
from mpidist.input.graph import UNKNOWN
from mpidist.input.iteration import Optional, pass_failed
from mpidist.input.local_batches import MISSING
from mpidist.input.position import Position
from mpidist.input.resuming import Remainder
from mpidist.input.threads import Readers
from mpidist.values import regroup

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator


class DistributedIterator:
    """One pass over a distributed dataset (tf.distribute.DistributedIterator).

    Every method that moves on is collective: call it on every rank, in the same order. The pass ends for all
    ranks at the same step, when no replica anywhere has data left; replicas that run out earlier get batches
    without rows. Where the number of steps is known nothing is exchanged in a step.
    """

    def __init__(self, distribution: Distribution, remainder: Remainder) -> None:
        self._distribution = distribution
        self._begin(remainder)

    def _begin(self, remainder: Remainder) -> None:
        distribution, batches = self._distribution, remainder.batches
        self._readers = Readers()
        run = remainder.run(self._readers)

        def steps() -> Iterator[list[Any]]:
            # Sources are opened where an error reaches all ranks: in the first step.
            yield from batches.open(run, remainder.start)

        self._feed: DeviceFeed | None = None
        if distribution.places is None:
            self._steps = steps()
        else:
            self._steps = self._feed = DeviceFeed(steps, distribution.places, distribution.buffer_size, self._readers)
        self._remainder = remainder
        total = distribution.agreement.steps if batches is distribution.batches else batches.steps
        self._steps_left = total - remainder.start if total >= 0 else total
        self._taken = 0
        self._ended = False
        self._failure: str | None = None

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
                "there are no more elements in this pass over the distributed dataset; begin another one with "
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
        return self._distribution.element_spec()

    def state(self) -> dict[str, Any]:
        """Return where this iterator stands, for :meth:`restore`, in types that JSON has.

        Equal on all ranks; not collective. What has been read ahead does not count as taken.

        >>> import mpidist
        >>> strategy = mpidist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> iterator = iter(strategy.experimental_distribute_dataset(mpidist.Dataset.range(8).batch(4)))
        >>> _ = next(iterator)
        >>> iterator.state()["steps"]
        1
        >>> strategy.close()
        """
        return self._remainder.after(self._taken).to_json()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where the iterator stood whose ``state()`` this is; collective: call it on every rank.

        The dataset must be made of the same steps over the same data, on any number of ranks and replicas. The pass
        goes on with the element that comes next, and later passes are shuffled as they would have been. On as many
        ranks and replicas each goes on in its own part. On others the global batches stay the same and are cut for the
        replicas there are now; what each rank read for itself (FILE, HINT, OFF and functions) every rank then reads
        for all until the pass ends, and elements of functions go to the replicas in turn. With AutoShardPolicy.DATA
        the batch size may be another one.

        Rows that are read by number are not read again; of a stream everything before is read and dropped.

        Args:
            state: What ``state()`` returned, the same on every rank.

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
        batches, agreement = distribution.batches, distribution.agreement
        require_outside_replica_function(distribution.strategy, "restore() of a distributed iterator")
        with workers.shared_errors("going on from the state of an iterator"):
            remainder = distribution.dealing.remainder(Position.from_json(state), batches, agreement.steps)
        if workers.communicator is not None:
            _require_same(remainder, workers.communicator)
            if remainder.batches is batches and batches.may_run_out and agreement.steps != UNKNOWN:
                # A rank whose data ran out before this step sees no batch of its own any more.
                learn_spec(agreement, batches, workers)
        self.close()
        distribution.go_on_from(remainder.position)
        self._begin(remainder)

    def close(self) -> None:
        """End the pass, and the threads of ``prefetch`` with it; waits for the elements that they are reading.

        Nothing is exchanged: where ranks are to end a pass early they all call it, at the same step.
        """
        self._ended = True
        self._close_readers()
        self._steps = iter(())
        self._feed = None

    def __repr__(self) -> str:
        position = self._remainder.after(self._taken)
        return f"<{type(self).__name__} of {self._distribution}, {position.progress()}>"

    def _close_readers(self, wait: bool = True) -> None:
        self._readers.close(wait)
        if self._feed is not None:
            self._feed.close()

    def _advance(self, method: str) -> Optional:
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

    def _next_step(self) -> Optional:
        workers = self._distribution.workers
        several = workers.num_workers > 1
        step: list[Any] | None = None
        if not (several and self._taken == self._steps_left):
            with workers.shared_errors("reading the next batch"):
                step = next(self._steps, None)
                self._remember_spec(step)
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

    def _remember_spec(self, step: list[Any] | None) -> None:
        if step is not None and self._distribution.agreement.spec is None:
            element = next(part for part in step if part is not MISSING)
            self._distribution.agreement.spec = with_rows(spec_of(element), None)

    def _vote(self, step: list[Any] | None) -> bool:
        """Return whether any rank has data, and learn from it what its batches look like if need be."""
        workers, agreement = self._distribution.workers, self._distribution.agreement
        assert workers.communicator is not None
        ballot = np.array([step is not None, agreement.spec is None], dtype=np.int64)
        someone_has_data, someone_needs_spec = workers.communicator.all_reduce("MAX", ballot)
        if someone_has_data and someone_needs_spec:
            agreement.spec = gather_spec(workers, agreement.spec)
        return bool(someone_has_data)

    def _complete(self, step: list[Any]) -> Any:
        workers = self._distribution.workers
        if any(part is MISSING for part in step):
            empty = empty_batch(self._distribution.agreement.spec)
            places = self._distribution.places
            step = [
                part if part is not MISSING else empty if places is None else on_place(places[i], empty)
                for i, part in enumerate(step)
            ]
        return regroup(step, workers.local_replica_ids, always_wrap=True) if workers.wrap else step[0]


def _require_same(remainder: Remainder, communicator: Communicator) -> None:
    """Raise MismatchError on all ranks unless all go on alike."""
    told = communicator.all_gather_object((remainder.position, remainder.previous_pipelines()))
    if any(other != told[0] for other in told):
        plans = {rank: f"{position}, {'; '.join(pipelines)}" for rank, (position, pipelines) in enumerate(told)}
        lines = "".join(f"\n  rank {rank}: {text}" for rank, text in plans.items())
        raise MismatchError(
            "restore() of a distributed iterator does not go on alike on all ranks; expected the same state on every "
            "rank, and, on another number of ranks, a dataset_fn whose dataset depends on its InputContext alone:"
            f"{lines}",
            plans,
        )


def require_outside_replica_function(strategy: StrategyLike, what: str) -> None:
    """Raise ValueError inside a replica function; ``what`` is what was called."""
    if context.has_strategy() and context.get_replica_context() is not None:
        raise ValueError(
            f"{what} was called inside a replica function of {type(strategy).__name__}; take the element "
            "before, in strategy.run(fn, args=(next(iterator),))"
        )
