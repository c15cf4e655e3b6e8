"""ChannelLock: the right to carry out the works of a channel."""

from __future__ import annotations

import threading

from mpidist.collectives.channel.short_calls import ShortCalls

_TWO_THREADS = (
    "two threads used one Communicator at the same time; collectives of one communicator are issued by one thread, in "
    "the same order on every rank"
)


class ChannelLock:
    """The lock of a channel, shared by the program's thread and that of progress.

    Args:
        short: The short calls of the channel, which take no lock: there are none while it is held.
    """

    def __init__(self, short: ShortCalls) -> None:
        self._short = short
        self._program = threading.Lock()
        self._anyone = threading.Lock()
        self._is_over = False

    def __enter__(self) -> None:
        # Others that find a short call under way give it back at once to the thread that carries on with it.
        if not self._program.acquire(blocking=self._short.is_handed_on_here):
            if self._is_over:
                raise RuntimeError(
                    "this process has taken leave of the other ranks; expected collectives before its program ends, "
                    "and before MPI.Finalize()"
                )
            raise RuntimeError(_TWO_THREADS)
        try:
            self._anyone.acquire()
        except BaseException:  # a signal handler that raises while the other thread takes its step
            self._program.release()
            raise
        self._short.lock()
        if self._short.is_under_way:
            self.__exit__()
            raise RuntimeError(_TWO_THREADS)

    def take_for_good(self, seconds: float) -> bool:
        """Take the lock from all other threads; return whether that worked within some seconds."""
        self._is_over = self._program.acquire(timeout=seconds) and self._anyone.acquire(timeout=seconds)
        self._short.lock()
        return self._is_over

    def __exit__(self, *_: object) -> None:
        self._short.unlock()
        self._anyone.release()
        self._program.release()

    def take_if_free(self) -> bool:
        """Take the lock for one step unless another thread has it; return whether that worked."""
        return self._anyone.acquire(blocking=False)

    def give_back(self) -> None:
        """Give the lock back after the step."""
        self._short.settle()
        self._anyone.release()
