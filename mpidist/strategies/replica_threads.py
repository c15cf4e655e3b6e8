"""Several replicas in one process: a thread each, of which one runs at a time, switching at merge points.

The thread that called ``run`` coordinates. It lets the replicas run one after the other, each until it reaches a
merge point or returns; when all are at a merge point it runs the merge function itself, so all communication is
issued by the caller's thread, and goes on. The order is the same in every run.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mpidist.core.callsite import user_call_site
from mpidist.core.context import entered, pop, push
from mpidist.strategies.replica_stream import ReplicaStream
from mpidist.values import regroup, select_replica
from mpidist.values.placement import HOST, Place

if TYPE_CHECKING:
    from mpidist.strategies.replica_context import ReplicaContext
    from mpidist.strategies.strategy import Strategy


class _Abandoned(BaseException):
    """Unwinds a replica that waits at a merge point after another replica has failed."""


class ReplicaThread(threading.Thread):
    """One replica; runs only between ``resume`` and the next merge point or its end."""

    def __init__(
        self,
        context: ReplicaContext,
        stream: ReplicaStream,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        super().__init__(name=f"mpidist-replica-{context.replica_id_in_sync_group}", daemon=True)
        self.context = context
        self._stream = stream
        self._fn, self._args, self._kwargs = fn, args, kwargs
        self._may_run = threading.Semaphore(0)
        self._has_paused = threading.Semaphore(0)
        self._abandoned = False
        self._variables = contextvars.copy_context()
        self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.merge_request: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = None
        self.merged: Any = None
        self.call: tuple[Any, ...] = ()
        self.call_site = ""

    def run(self) -> None:
        """Body of the thread."""
        self._may_run.acquire()
        if not self._abandoned:
            self._variables.run(self._run_replica)
        self.is_done = True
        self._has_paused.release()

    def _run_replica(self) -> None:
        frame = self.context._frame
        push(frame)
        try:
            with self._stream.entered():
                self.result = self._fn(*self._args, **self._kwargs)
                self._stream.hand_over()
            pop(frame)
        except BaseException as error:  # handed to the caller of run()
            self.error = error

    def resume(self) -> None:
        """Let the replica run until it pauses or ends. Called by the coordinator."""
        self._may_run.release()
        self._has_paused.acquire()

    def abandon(self) -> None:
        """End a replica that waits at a merge point. Called by the coordinator."""
        self._abandoned = True
        if not self.is_done:
            self.resume()
        self.join()

    def merge(
        self, call: tuple[Any, ...], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Pause at a merge point and return this replica's part of the result. Called by the replica."""
        if self._abandoned:
            # A finally block on the way out: nobody is left to meet.
            raise _Abandoned
        self.call = call
        self.call_site = user_call_site()
        self.merge_request = (fn, args, kwargs)
        self._stream.hand_over()
        self._has_paused.release()
        self._may_run.acquire()
        if self._abandoned:
            raise _Abandoned
        self.merge_request = None
        self._stream.take_back()
        return select_replica(self.context.local_replica_id, self.merged)


def run_replicas(
    strategy: Strategy,
    contexts: Sequence[ReplicaContext],
    places: Sequence[Place],
    fn: Callable[..., Any],
    arguments: Sequence[Any],
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` for each replica with its own ``(args, kwargs)``; return the results in order.

    Each runs with its device current, and starts on the stream that is current there in the calling thread.

    Raises:
        RuntimeError: The replicas made different numbers of merge calls.
    """
    threads = [
        ReplicaThread(context, ReplicaStream(place), fn, *own)
        for context, place, own in zip(contexts, places, arguments, strict=True)
    ]
    for context, thread in zip(contexts, threads, strict=True):
        context._thread = thread
        thread.start()
    try:
        while True:
            for thread in threads:
                thread.resume()
                if thread.error is not None:
                    raise thread.error
            if all(thread.is_done for thread in threads):
                return [thread.result for thread in threads]
            _check_all_merge(threads)
            _merge(strategy, threads)
    finally:
        for context, thread in zip(contexts, threads, strict=True):
            thread.abandon()
            context._thread = None


def _check_all_merge(threads: Sequence[ReplicaThread]) -> None:
    returned = [t.context.replica_id_in_sync_group for t in threads if t.is_done]
    if returned:
        waiting = [f"{t.context.replica_id_in_sync_group} at {t.call_site}" for t in threads if not t.is_done]
        raise RuntimeError(
            f"replicas {returned} returned while replica {'; '.join(waiting)} waits for all replicas in merge_call(), "
            "all_reduce() or a variable's assign(); every replica has to make the same calls"
        )


def _check_same_call(threads: Sequence[ReplicaThread]) -> None:
    """Raise ValueError where replicas meet at calls that differ, as a sum and a mean or a sum and a gather."""
    if any(thread.call != threads[0].call for thread in threads):
        sites = "; ".join(
            f"replica {t.context.replica_id_in_sync_group} in {_call_text(t.call)} at {t.call_site}" for t in threads
        )
        raise ValueError(
            f"the replicas met at different calls: {sites}; every replica has to make the same calls, with the same "
            "operation, axis and options, in the same order"
        )


def _call_text(call: tuple[Any, ...]) -> str:
    return " ".join(str(getattr(part, "co_name", getattr(part, "name", part))) for part in call if part is not None)


def _merge(strategy: Strategy, threads: Sequence[ReplicaThread]) -> None:
    requests = [thread.merge_request for thread in threads]
    works_for_call_site = threads[0].call_site  # noqa: F841 - read by core.callsite
    ids = [thread.context.replica_id_in_sync_group for thread in threads]
    fn = requests[0][0]  # type: ignore[index]
    with strategy.extended._shared_errors("the values of its replicas"):
        _check_same_call(threads)
        args = regroup([request[1] for request in requests], ids, unwrap_objects=True)  # type: ignore[index]
        kwargs = regroup([request[2] for request in requests], ids, unwrap_objects=True)  # type: ignore[index]
    with entered(strategy.extended._frame), (strategy.extended._first_gpu or HOST).current():
        merged = fn(strategy, *args, **kwargs)
    for thread in threads:
        thread.merged = merged
