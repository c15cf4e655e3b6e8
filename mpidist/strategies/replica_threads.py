"""Several replicas in one process: threads that take turns, switching at merge points.

The thread that called ``run`` coordinates. It lets the replicas run one after the other, each until it reaches a
merge point or returns. When all are at a merge point, it runs the merge function itself, so the caller's thread issues
all communication. The order is the same in every run.

The threads live as long as the strategy, because libraries keep costly state per thread, such as the handle of cuBLAS.
"""

from __future__ import annotations

import contextvars
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from mpidist.arrays.device_ops import gpu_ops
from mpidist.arrays.streams import Stream
from mpidist.collectives import FinishedWork, PartOfWork, Work
from mpidist.core.context import Args, Frame, Kwargs, as_in_a_new_thread, entered, pop, push
from mpidist.core.text import user_call_site
from mpidist.strategies.strategy_extended import Result, StrategyExtended
from mpidist.values import regroup, select_replica
from mpidist.values.placement import HOST, Place

# The longest delay of Ctrl-C while a replica computes.
_SIGNAL_SECONDS = 0.5
# Timeout of finally blocks and __exit__ methods of a replica after another one has failed.
_UNWINDING_SECONDS = 30.0


class _Abandoned(BaseException):
    """Unwinds a replica that waits at a merge point after another replica has failed."""


class ReplicaRun:
    """One run of one replica. Its code runs only between ``resume`` and the next merge point or its end.

    The replica computes on the coordinator's current stream of its device. If it has another stream current at a merge
    point or at its end, the two streams wait for one another there. The host never waits.
    """

    def __init__(
        self, frame: Frame, thread: ReplicaThread, place: Place, stream: Stream | None, body: Callable[[], object]
    ) -> None:
        assert frame.replica_context is not None
        self.id = frame.replica_context.replica_id_in_sync_group
        self._local_id = frame.replica_context.local_replica_id
        self._frame, self._thread, self._place, self._body = frame, thread, place, body
        self._outer_stream = stream
        # Queues switch between the two threads. They are faster than semaphores, which are written in Python.
        self._may_run: SimpleQueue[None] = SimpleQueue()
        self._has_paused: SimpleQueue[None] = SimpleQueue()
        self._has_started = self._abandoned = self.is_done = False
        self._variables = contextvars.copy_context()
        self.result: Any = None
        self.error: BaseException | None = None
        self.merge_request: tuple[Callable[..., object], Args, Kwargs] | None = None
        self.merged: Any = None
        self.call: tuple[object, ...] = ()
        self.call_site = ""

    def carry_out(self) -> None:
        """Run the replica from beginning to end, in its thread."""
        if not self._abandoned:
            self._variables.run(self._run_replica)
        self.is_done = True
        self._has_paused.put(None)

    def _run_replica(self) -> None:
        with as_in_a_new_thread():
            push(self._frame)
            try:
                with self._place.current(), self._outer_stream or nullcontext():
                    self.result = self._body()
                    self._order_streams(after_replica=True)
                pop(self._frame)
            except BaseException as error:  # raised by run() in the caller's thread
                self.error = error

    def resume(self) -> None:
        """Let the replica run until it pauses or ends. Called by the coordinator."""
        if self._has_started:
            self._may_run.put(None)
        else:
            self._thread.runs.put(self)
            self._has_started = True
        while True:
            # A signal just before get() does not interrupt it, but its handler runs between two calls.
            with suppress(Empty):
                return self._has_paused.get(timeout=_SIGNAL_SECONDS)

    @property
    def has_left_its_thread(self) -> bool:
        """Whether the thread has finished this run."""
        return self.is_done or not self._has_started

    def abandon(self) -> bool:
        """End a replica at its merge point, or the next; return whether in time. Called by the coordinator."""
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
        if self._abandoned:  # a finally block of a replica that is being unwound
            raise _Abandoned
        self.call = call
        self.call_site = user_call_site()
        self.merge_request = (fn, args, kwargs)
        self._order_streams(after_replica=True)
        self._has_paused.put(None)
        self._may_run.get()
        if self._abandoned:
            raise _Abandoned
        self.merge_request = None
        self._order_streams(after_replica=False)
        merged: Result = select_replica(self._local_id, self.merged)
        return merged

    def _order_streams(self, after_replica: bool) -> None:
        """Let the coordinator's stream wait for the replica's, or the replica's for the coordinator's."""
        inner, outer = _current_stream(self._place), self._outer_stream
        if inner and outer and inner.handle != outer.handle:
            first, second = (inner, outer) if after_replica else (outer, inner)
            second.wait(first.record())


class ReplicaThread(threading.Thread):
    """The thread of a local replica. It carries out the runs of a queue until it receives None."""

    def __init__(self, replica_id: int) -> None:
        super().__init__(name=f"mpidist-replica-{replica_id}", daemon=True)
        self.runs: SimpleQueue[ReplicaRun | None] = SimpleQueue()
        self.present: ReplicaRun | None = None
        self.start()

    def run(self) -> None:
        """Body of the thread."""
        # No reference to a run remains while the thread waits, so its arrays are freed.
        while (run := self.runs.get()) is not None:
            self.present = run
            run.carry_out()
            self.present = None
            del run


def run_of_this_thread() -> ReplicaRun | None:
    """Return the run of this thread, or None outside of replica threads."""
    thread = threading.current_thread()
    return thread.present if isinstance(thread, ReplicaThread) else None


class ReplicaThreads:
    """The threads of a strategy's local replicas.

    A run borrows one thread for each replica. A run inside a merge function, or in another thread of the program,
    borrows others. They end when the strategy is closed or collected.
    """

    def __init__(self, frames: Sequence[Frame], places: Sequence[Place]) -> None:
        self._frames = frames
        self._places = places
        self._idle: list[list[ReplicaThread]] = []
        weakref.finalize(self, _end, self._idle).atexit = False

    def run(
        self, extended: StrategyExtended, fn: Callable[..., Result], arguments: Sequence[tuple[Args, Kwargs]]
    ) -> list[Result]:
        """Call ``fn`` for each replica with its own ``(args, kwargs)``; return the results in order."""
        streams = [_current_stream(place) for place in self._places]
        with self._borrowed(extended.local_replica_ids) as (threads, runs):
            for i, (args, kwargs) in enumerate(arguments):
                body = partial(fn, *args, **kwargs)
                runs.append(ReplicaRun(self._frames[i], threads[i], self._places[i], streams[i], body))
            while True:
                for run in runs:
                    run.resume()
                    if run.error is not None:
                        raise run.error
                if all(run.is_done for run in runs):
                    return [run.result for run in runs]
                _check_all_merge(runs)
                _merge(extended, runs)

    def close(self) -> None:
        """End the idle threads and wait for their end."""
        idle = [thread for threads in self._idle for thread in threads]
        _end(self._idle)
        for thread in idle:
            thread.join()

    @contextmanager
    def _borrowed(self, replica_ids: Sequence[int]) -> Iterator[tuple[list[ReplicaThread], list[ReplicaRun]]]:
        """Provide threads, and a list for their runs. The runs are abandoned at the end of the block."""
        threads = self._idle.pop() if self._idle else []
        # A forked child has no threads of its parent.
        if not threads or not all(thread.is_alive() for thread in threads):
            threads = [ReplicaThread(replica_id) for replica_id in replica_ids]
        runs: list[ReplicaRun] = []
        hangs: list[int] = []
        try:
            yield threads, runs
        finally:
            try:
                hangs += [run.id for run in runs if not run.abandon()]
            finally:  # also after a second Ctrl-C
                if all(run.has_left_its_thread for run in runs):
                    self._idle.append(threads)
                else:
                    _end([threads])
            if hangs:
                warnings.warn(
                    f"the function given to run() was ended on all replicas, and {_UNWINDING_SECONDS:g} s later it "
                    f"still runs on replica {', '.join(map(str, hangs))}: what it does there, such as a wait in a "
                    "finally block, goes on beside the program",
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


def _merge(extended: StrategyExtended, runs: Sequence[ReplicaRun]) -> None:
    requests = [run.merge_request for run in runs if run.merge_request is not None]
    ids = [run.id for run in runs]
    works_for_call_site = runs[0].call_site  # noqa: F841 - read by core.text
    with extended.shared_errors("the values of its replicas"):
        if any(run.call != runs[0].call for run in runs):
            sites = "; ".join(f"replica {run.id} in {_call_text(run.call)} at {run.call_site}" for run in runs)
            raise ValueError(
                f"the replicas met at different calls: {sites}; every replica has to make the same calls, with the "
                "same operation, axis and options, in the same order"
            )
        args = regroup([args for _, args, _ in requests], ids, unwrap_objects=True)
        kwargs = regroup([kwargs for *_, kwargs in requests], ids, unwrap_objects=True)
    fn, *_ = requests[0]
    with entered(extended.frame), (extended.first_gpu or HOST).current():
        merged = fn(extended.strategy, *args, **kwargs)
    for run in runs:
        run.merged = merged


def _call_text(call: tuple[object, ...]) -> str:
    return " ".join(str(getattr(part, "co_name", getattr(part, "name", part))) for part in call if part is not None)


class ReplicaWork(PartOfWork):
    """One replica's handle of a collective; as ``Work``. Made in the coordinating thread.

    On devices, ``wait`` is a merge point: the coordinating thread receives the results, on its streams.
    """

    def __init__(self, work: Work | FinishedWork | PartOfWork, replica: int, place: Place) -> None:
        super().__init__(work, partial(select_replica, replica))
        self._place = place
        stream = _current_stream(place)
        # The results of a finished collective.
        self._event = None if stream is None else stream.record()

    def wait(self, timeout: float | None = None) -> Any:
        """See ``Work``."""
        run, stream = run_of_this_thread(), _current_stream(self._place)
        if stream is None or self._event is None:
            return super().wait(timeout)
        stream.wait(self._event)
        if run is None:
            return super().wait(timeout)
        return run.merge(("wait", self._work), lambda _: self._work.wait(timeout), (), {})


def _current_stream(place: Place) -> Stream | None:
    return None if place.is_host else gpu_ops().current_stream(place.number)
