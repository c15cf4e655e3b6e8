"""Several replicas in one process: threads that take turns, switching at merge points.

The thread that called ``run`` coordinates. It lets the replicas run one after the other, each until it reaches a
merge point or returns; when all are at a merge point it runs the merge function itself, so all communication is
issued by the caller's thread, and goes on. The order is the same in every run.

The threads live as long as the strategy: libraries keep costly state per thread, such as the handle of cuBLAS, whose
end waits for the whole device.

Of a collective that they start together each replica gets a handle of its own.
"""

from __future__ import annotations

import contextvars
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from mpidist.arrays.device_ops import gpu_ops
from mpidist.arrays.streams import Event, Stream
from mpidist.collectives import FinishedWork, PartOfWork, Work
from mpidist.core.context import Args, Frame, Kwargs, as_in_a_new_thread, entered, pop, push
from mpidist.core.text import user_call_site
from mpidist.strategies.strategy_extended import Result, StrategyExtended
from mpidist.values import regroup, select_replica
from mpidist.values.placement import HOST, Place

# How long Ctrl-C may go unnoticed while a replica computes.
_SIGNAL_SECONDS = 0.5
# How long a replica may take to end after another one has failed, in its finally blocks and __exit__ methods.
_UNWINDING_SECONDS = 30.0


class _Abandoned(BaseException):
    """Unwinds a replica that waits at a merge point after another replica has failed."""


class ReplicaStream:
    """The stream of the coordinating thread, on which a replica computes by default.

    Made in the coordinating thread. A replica that has another stream current when it meets the others, or returns,
    has the two wait for one another there, so that values may be handed over. The host never waits.

    Args:
        place: Where the replica computes.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._outer = _current_stream(place)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make device and stream current in the replica's thread."""
        with self._place.current(), self._outer or nullcontext():
            yield

    def hand_over(self) -> None:
        """Let the coordinating thread's stream wait for the replica's work."""
        inner = _current_stream(self._place)
        if inner and self._outer and inner.handle != self._outer.handle:
            self._outer.wait(inner.record())

    def take_back(self) -> None:
        """Let the replica's stream wait for the coordinating thread's work."""
        inner = _current_stream(self._place)
        if inner and self._outer and inner.handle != self._outer.handle:
            inner.wait(self._outer.record())


class ReplicaRun:
    """One run of one replica.

    Its code runs only between ``resume`` and the next merge point or its end.
    """

    def __init__(self, frame: Frame, thread: ReplicaThread, stream: ReplicaStream, body: Callable[[], object]) -> None:
        assert frame.replica_context is not None
        self.id = frame.replica_context.replica_id_in_sync_group
        self._local_id = frame.replica_context.local_replica_id
        self._frame = frame
        self._thread = thread
        self._stream = stream
        self._body = body
        # The queues that hand over between the two threads; they are quicker than semaphores, which are Python's.
        self._may_run: SimpleQueue[None] = SimpleQueue()
        self._has_paused: SimpleQueue[None] = SimpleQueue()
        self._has_started = False
        self._abandoned = False
        self._variables = contextvars.copy_context()
        self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.merge_request: tuple[Callable[..., object], Args, Kwargs] | None = None
        self.merged: Any = None
        self.call: tuple[object, ...] = ()
        self.call_site = ""

    def carry_out(self) -> None:
        """Run the replica from beginning to end. Called by its thread."""
        if not self._abandoned:
            self._variables.run(self._run_replica)
        self.is_done = True
        self._has_paused.put(None)

    def _run_replica(self) -> None:
        with as_in_a_new_thread():
            push(self._frame)
            try:
                with self._stream.entered():
                    self.result = self._body()
                    self._stream.hand_over()
                pop(self._frame)
            except BaseException as error:  # handed to the caller of run()
                self.error = error

    def resume(self) -> None:
        """Let the replica run until it pauses or ends. Called by the coordinator."""
        if self._has_started:
            self._may_run.put(None)
        else:
            self._thread.runs.put(self)
            self._has_started = True
        while True:
            # A signal that came just before the wait began does not end it; its handler has run by then.
            with suppress(Empty):
                return self._has_paused.get(timeout=_SIGNAL_SECONDS)

    @property
    def has_left_its_thread(self) -> bool:
        """Whether the thread has nothing more to do for this run."""
        return self.is_done or not self._has_started

    def abandon(self) -> bool:
        """End a replica at its merge point, or the next; return whether in time.

        Called by the coordinator.
        """
        self._abandoned = True
        self._may_run.put(None)
        limit = time.monotonic() + _UNWINDING_SECONDS
        while not self.has_left_its_thread:
            try:
                self._has_paused.get(timeout=max(0.0, limit - time.monotonic()))
            except Empty:
                return False
        return True

    def merge(self, call: tuple[object, ...], fn: Callable[..., Result], args: Args, kwargs: Kwargs) -> Result:
        """Pause at a merge point and return this replica's part of the result. Called by the replica."""
        if self._abandoned:
            # A finally block on the way out: nobody is left to meet.
            raise _Abandoned
        self.call = call
        self.call_site = user_call_site()
        self.merge_request = (fn, args, kwargs)
        self._stream.hand_over()
        self._has_paused.put(None)
        self._may_run.get()
        if self._abandoned:
            raise _Abandoned
        self.merge_request = None
        self._stream.take_back()
        merged: Result = select_replica(self._local_id, self.merged)
        return merged


class ReplicaThread(threading.Thread):
    """The thread of a local replica, which carries out one run after the other.

    Attributes:
        runs: Those that it is to carry out; it ends at None.
        present: The one that it carries out.
    """

    def __init__(self, replica_id: int) -> None:
        super().__init__(name=f"mpidist-replica-{replica_id}", daemon=True)
        self.runs: SimpleQueue[ReplicaRun | None] = SimpleQueue()
        self.present: ReplicaRun | None = None
        self.start()

    def run(self) -> None:
        """Body of the thread."""
        # The arrays of a run are not to wait for the next one.
        while (run := self.runs.get()) is not None:
            self.present = run
            run.carry_out()
            self.present = None
            del run


def run_of_this_thread() -> ReplicaRun | None:
    """Return the run of this thread, or None outside of replica threads.

    >>> run_of_this_thread() is None
    True
    """
    thread = threading.current_thread()
    return thread.present if isinstance(thread, ReplicaThread) else None


class ReplicaThreads:
    """The threads of a strategy's local replicas, from its first run to its end.

    A run takes one thread for each replica, and a run inside of a merge function, or in another thread of the program,
    others. They end when the strategy is closed or collected.

    Args:
        frames: Of the local replicas, for the stack of contexts.
        places: Where each computes.
    """

    def __init__(self, frames: Sequence[Frame], places: Sequence[Place]) -> None:
        self._frames = frames
        self._places = places
        self._idle: list[list[ReplicaThread]] = []
        weakref.finalize(self, _end, self._idle).atexit = False

    def run(
        self, extended: StrategyExtended, fn: Callable[..., Result], arguments: Sequence[tuple[Args, Kwargs]]
    ) -> list[Result]:
        """Call ``fn`` for each replica with its own ``(args, kwargs)``; return the results in order.

        Each runs with its device current, and starts on the stream that is current there in the calling thread.

        Raises:
            RuntimeError: The replicas made different numbers of merge calls.
        """
        streams = [ReplicaStream(place) for place in self._places]
        threads = self._taken(extended.local_replica_ids)
        runs = [
            ReplicaRun(frame, thread, stream, partial(fn, *args, **kwargs))
            for frame, thread, stream, (args, kwargs) in zip(self._frames, threads, streams, arguments, strict=True)
        ]
        try:
            while True:
                for run in runs:
                    run.resume()
                    if run.error is not None:
                        raise run.error
                if all(run.is_done for run in runs):
                    return [run.result for run in runs]
                _check_all_merge(runs)
                _merge(extended, runs)
        finally:
            self._give_back(threads, runs)

    def close(self) -> None:
        """End the threads that no run has, and wait for that."""
        idle = [thread for threads in self._idle for thread in threads]
        _end(self._idle)
        for thread in idle:
            thread.join()

    def _taken(self, replica_ids: Sequence[int]) -> list[ReplicaThread]:
        while self._idle:
            threads = self._idle.pop()
            # In a forked child those of its parent are not there.
            if all(thread.is_alive() for thread in threads):
                return threads
        return [ReplicaThread(replica_id) for replica_id in replica_ids]

    def _give_back(self, threads: list[ReplicaThread], runs: Sequence[ReplicaRun]) -> None:
        hangs: list[int] = []
        try:
            hangs += [run.id for run in runs if not run.abandon()]
        finally:
            # A second Ctrl-C comes here, too.
            if all(run.has_left_its_thread for run in runs):
                self._idle.append(threads)
            else:
                _end([threads])
        if hangs:
            warnings.warn(
                f"the function given to run() was ended on all replicas, and {_UNWINDING_SECONDS:g} s later it still "
                f"runs on replica {', '.join(map(str, hangs))}: what it does there, such as a wait in a finally "
                "block, goes on beside the program",
                RuntimeWarning,
                stacklevel=2,
            )


def _end(idle: list[list[ReplicaThread]]) -> None:
    while idle:
        for thread in idle.pop():
            thread.runs.put(None)


def _check_all_merge(runs: Sequence[ReplicaRun]) -> None:
    returned = [run.id for run in runs if run.is_done]
    if returned:
        waiting = [f"{run.id} at {run.call_site}" for run in runs if not run.is_done]
        raise RuntimeError(
            f"replicas {returned} returned while replica {'; '.join(waiting)} waits for all replicas in merge_call(), "
            "all_reduce() or a variable's assign(); every replica has to make the same calls"
        )


def _check_same_call(runs: Sequence[ReplicaRun]) -> None:
    """Raise ValueError where replicas meet at different calls, as a sum and a mean."""
    if any(run.call != runs[0].call for run in runs):
        sites = "; ".join(f"replica {run.id} in {_call_text(run.call)} at {run.call_site}" for run in runs)
        raise ValueError(
            f"the replicas met at different calls: {sites}; every replica has to make the same calls, with the same "
            "operation, axis and options, in the same order"
        )


def _call_text(call: tuple[object, ...]) -> str:
    return " ".join(str(getattr(part, "co_name", getattr(part, "name", part))) for part in call if part is not None)


def _merge(extended: StrategyExtended, runs: Sequence[ReplicaRun]) -> None:
    requests = [run.merge_request for run in runs if run.merge_request is not None]
    ids = [run.id for run in runs]
    works_for_call_site = runs[0].call_site  # noqa: F841 - read by core.callsite
    with extended.shared_errors("the values of its replicas"):
        _check_same_call(runs)
        args = regroup([args for _, args, _ in requests], ids, unwrap_objects=True)
        kwargs = regroup([kwargs for *_, kwargs in requests], ids, unwrap_objects=True)
    fn, *_ = requests[0]
    with entered(extended.frame), (extended.first_gpu or HOST).current():
        merged = fn(extended.strategy, *args, **kwargs)
    for run in runs:
        run.merged = merged


class _Arrival:
    """The results of a collective on the devices of the local replicas.

    Made in the coordinating thread. Whichever replica waits first puts the results of all on their devices: its own by
    way of its current stream, those of the others by way of the streams of the coordinating thread, which they started
    from: the streams that are current in the waiting thread mean nothing to them.

    Args:
        work: The collective.
        places: Of the replicas; at least one is a device.
    """

    def __init__(self, work: Work | FinishedWork | PartOfWork, places: Sequence[Place]) -> None:
        self._work = work
        self._places = places
        self._streams = [_current_stream(place) for place in places]
        self._events = self._record(self._streams)
        self._has_come = False
        self._result: object = None

    def wait(self, replica: int, timeout: float | None) -> object:
        """Return the result; the current stream of the replica's device waits for it."""
        streams = list(self._streams)
        streams[replica] = here = _current_stream(self._places[replica])
        event = self._events[replica]
        if here is not None and event is not None:
            here.wait(event)
        if not self._has_come:
            with ExitStack() as entered:
                for place, stream in zip(self._places, streams, strict=True):
                    # CuPy forgets a stream that a thread was told to use() when it leaves another one.
                    if stream is not None and stream.handle != gpu_ops().current_stream(place.number).handle:
                        entered.enter_context(stream)
                self._result = self._work.wait(timeout)
            self._events = self._record(streams)
            self._has_come = True
        return self._result

    @staticmethod
    def _record(streams: Sequence[Stream | None]) -> list[Event | None]:
        return [None if stream is None else stream.record() for stream in streams]


class ReplicaWork(PartOfWork):
    """One replica's handle; as ``Work``."""

    def __init__(self, work: Work | FinishedWork | PartOfWork, arrival: _Arrival, replica: int) -> None:
        super().__init__(work, partial(select_replica, replica))
        self._arrival = arrival
        self._replica = replica

    def wait(self, timeout: float | None = None) -> Any:
        """See ``Work``."""
        return self._select(self._arrival.wait(self._replica, timeout))


def replica_works(work: Work | FinishedWork | PartOfWork, places: Sequence[Place]) -> list[PartOfWork]:
    """Return a handle for each local replica, from the coordinating thread."""
    if all(place.is_host for place in places):
        return [PartOfWork(work, partial(select_replica, i)) for i in range(len(places))]
    arrival = _Arrival(work, places)
    return [ReplicaWork(work, arrival, i) for i in range(len(places))]


def finished_work(result: object, gpu: Place | None) -> FinishedWork | PartOfWork:
    """Return the handle of a lone replica's result, on ``gpu`` unless that is None."""
    work = FinishedWork(result)
    return work if gpu is None else replica_works(work, [gpu])[0]


def _current_stream(place: Place) -> Stream | None:
    return None if place.is_host else gpu_ops().current_stream(place.number)
