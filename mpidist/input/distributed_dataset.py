"""DistributedDataset: batches for the replicas of a strategy, and the iterator of a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, NoReturn

import numpy as np

from mpidist.core import context
from mpidist.core.context import StrategyLike
from mpidist.core.errors import MismatchError
from mpidist.core.phases import INPUT, counts
from mpidist.core.text import said_lines
from mpidist.input.device_feed import DeviceFeed, on_place
from mpidist.input.distribution import Distribution, Remainder
from mpidist.input.elements import empty_batch, spec_of, with_rows
from mpidist.input.input_options import InputOptions
from mpidist.input.iteration import E_co, PassIterator, S, reduce_elements
from mpidist.input.local_batches import MISSING
from mpidist.input.nodes import INFINITE, UNKNOWN
from mpidist.values import regroup

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator


class DistributedDataset(Generic[E_co]):
    """Batches for the replicas of a strategy, re-iterable (tf.distribute.DistributedDataset).

    Strategies make it: ``experimental_distribute_dataset`` and ``distribute_datasets_from_function``.
    Elements have the structure of the dataset's own. Each leaf is a PerReplica of this rank's replicas, or
    the bare array if a strategy of one replica does not wrap batches. For replicas on GPUs the arrays have been
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
                    f"between pass {-least + 1} and {most + 1}. Call iter() the same number of times on "
                    "every rank, because each pass has its own shuffles"
                )
        return DistributedIterator(distribution, remainder)

    def __next__(self) -> NoReturn:
        raise TypeError(
            "next() was called on a distributed dataset. Call iter() first: iterator = iter(dataset), then "
            "next(iterator), or write `for batch in dataset:`"
        )

    def reduce(self, initial_state: S, reduce_func: Callable[[S, E_co], S]) -> S:
        """Return the result of ``reduce_func`` over one pass, each rank for itself.

        Collective like iterating: call it on every rank, in the same order. The states are not combined. For a
        result of all ranks, let ``reduce_func`` use ``strategy.reduce``, or reduce the last state.

        Args:
            initial_state: The first state, of any kind; returned if there are no elements.
            reduce_func: Receives the state and an element, as ``next`` returns it; returns the next state. It may use
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
        """The nest of PerReplicaSpec of an element, or of ArraySpec for elements without wrapper.

        The first size of a shape is None if batches may be smaller or empty. Not collective.

        Raises:
            ValueError: This rank's dataset has no elements.
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
            raise TypeError(f"the number of steps of this distributed dataset is {kind}. Use cardinality()")
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
    ranks at the same step, when no replica anywhere has more data. Replicas that run out earlier get batches
    without rows. If the number of steps is known, a step needs no communication.
    """

    def _begin(self, remainder: Remainder) -> None:
        super()._begin(remainder)
        distribution, batches = self._distribution, remainder.batches
        run = remainder.run(self._readers)

        def steps() -> Iterator[list[object]]:
            # Open sources in the first step, in which an error reaches all ranks.
            yield from batches.open(run, remainder.start)

        self._feed: DeviceFeed | None = None
        self._steps: Iterator[list[object]]
        if distribution.places is None:
            self._steps = steps()
        else:
            size = (distribution.options or InputOptions()).experimental_per_replica_buffer_size
            self._steps = self._feed = DeviceFeed(steps, distribution.places, size, self._readers)
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
        continues with the next element, and later passes have the shuffles that they would have had. On as many
        ranks and replicas each continues its own part. On others the global batches stay the same and are cut for the
        present replicas. Elements that each rank read for itself (FILE, HINT, OFF and functions) every rank then
        reads for all until the pass ends, and elements of functions go to the replicas in turn. With
        AutoShardPolicy.DATA the batch size may change.

        Rows that are read by number are not read again. A stream is read from its beginning.

        Args:
            state: From ``state()``, the same on every rank.

        Raises:
            TypeError: ``state`` is no dict.
            ValueError: It is damaged, or of another dataset, or of another batch size that must not change.
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
        with workers.shared_errors("resuming from the state of an iterator"):
            remainder = distribution.remainder(state)
        if workers.communicator is not None:
            _require_same(remainder, workers.communicator)
            if remainder.batches is batches and batches.may_run_out and distribution.steps != UNKNOWN:
                # A rank whose data ended before this step will read no batch of its own.
                distribution.learn_spec()
        self._resume(remainder)

    def close(self) -> None:
        """End the pass and the threads of ``prefetch``.

        Waits for the elements that they are reading. Without communication: to end a pass early, call it on all ranks
        at the same step.
        """
        self._ended = True
        self._stop_reading()
        self._steps = iter(())
        self._feed = None

    def _stop_reading(self, wait: bool = True) -> None:
        super()._stop_reading(wait)
        if self._feed is not None:
            self._feed.close()

    def _advance(self, method: str) -> E_co:
        require_outside_replica_function(self._distribution.strategy, f"{method} of a distributed iterator")
        return super()._advance(method)

    def _read(self) -> E_co:
        workers = self._distribution.workers
        several = workers.num_workers > 1
        if self._ended or (several and self._taken == self._steps_left):
            self.close()
            raise StopIteration
        with workers.shared_errors("reading the next batch"), INPUT:
            step = next(self._steps, None)
            if step is not None and self._distribution.spec is None:
                element = next(part for part in step if part is not MISSING)
                self._distribution.spec = with_rows(spec_of(element), None)
        if not (self._vote(step) if several and self._steps_left == UNKNOWN else several or step is not None):
            self.close()
            raise StopIteration
        with workers.shared_errors("completing the batches of a step"):
            return self._complete(step or [MISSING] * workers.num_local_replicas)

    def _vote(self, step: list[object] | None) -> bool:
        """Return whether any rank has data. Learn the spec of its batches if a rank needs it."""
        distribution, communicator = self._distribution, self._distribution.workers.communicator
        assert communicator is not None
        ballot = np.array([step is not None, distribution.spec is None], dtype=np.int64)
        someone_has_data, someone_needs_spec = communicator.all_reduce("MAX", ballot)
        if someone_has_data and someone_needs_spec:
            distribution.gather_spec()
        return bool(someone_has_data)

    def _complete(self, step: list[Any]) -> E_co:
        workers = self._distribution.workers
        if any(part is MISSING for part in step):
            empty = empty_batch(self._distribution.spec)
            places = self._distribution.places
            step = [
                part if part is not MISSING else empty if places is None else on_place(places[i], empty)
                for i, part in enumerate(step)
            ]
        counts.rows += sum(map(_rows_in, step))
        element: E_co = step[0]
        return regroup(step, workers.local_replica_ids, always_wrap=True) if workers.wrap else element


def _rows_in(batch: Any) -> int:
    """Return the length of the first array of a batch, or 0 without one."""
    while isinstance(batch, (tuple, list, dict)) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return batch.shape[0] if getattr(batch, "shape", ()) else 0


def _require_same(remainder: Remainder, communicator: Communicator) -> None:
    """Raise MismatchError on all ranks unless all resume alike."""
    gathered = communicator.all_gather_object((remainder.position, remainder.previous_pipelines()))
    if any(other != gathered[0] for other in gathered):
        plans = {rank: f"{position}, {'; '.join(pipelines)}" for rank, (position, pipelines) in enumerate(gathered)}
        lines = "\n".join(["", *said_lines(plans.items(), "  ")])
        raise MismatchError(
            "restore() of a distributed iterator differs between ranks. Pass the same state on every "
            "rank, and, on another number of ranks, use a dataset_fn whose dataset depends on its InputContext alone:"
            f"{lines}",
            plans,
        )


def require_outside_replica_function(strategy: StrategyLike | None, call: str) -> None:
    """Raise ValueError inside a replica function."""
    if context.has_strategy() and context.get_replica_context() is not None:
        raise ValueError(
            f"{call} was called inside a replica function of {type(strategy).__name__}. Take the element "
            "before, in strategy.run(fn, args=(next(iterator),))"
        )
