"""Short calls: collectives of one array that go straight to the node's core and back.

They take no part in what an ``Operation`` takes part in. So the way is closed while there is anything that has to see a
call, or to come before it; what is out of the ordinary in a call, the core hands back to be carried on as an operation.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from threading import Lock, get_ident

from mpidist.collectives.channel.operation import Description
from mpidist.collectives.node.core import Core

_TWO_THREADS = (
    "two threads used one Communicator at the same time; collectives of one communicator are issued by one thread, in "
    "the same order on every rank"
)
# Cells of the core: whether the way is closed, short calls so far, signature of the last, thread of one under way, and
# bytes passed in so far.
_CLOSED, _CALLS, _LAST, _THREAD, _BYTES = range(5)
# By a call under way, by Python, by a call that has begun and that Python has to carry on.
_BY_CORE, _BY_PYTHON, _HANDED_ON = 1, 2, 4


class ShortCalls:
    """The short calls of one channel.

    Args:
        core: Of the node; None where there are none.
        may_be_open: Returns whether nothing has to see a call or to come before it.
    """

    def __init__(self, core: Core | None, may_be_open: Callable[[], bool]) -> None:
        self._core = core  # which keeps the cells
        self._cells = memoryview(array("q", [0] * 5)) if core is None else core.cells
        self._may_be_open = may_be_open
        self._known: dict[int, Description] = {}
        self._seen = 0
        self._is_locked = False
        self._cells[_CLOSED] |= _BY_PYTHON

    def lock(self) -> None:
        """Send calls the long way until ``unlock``: there is an operation under way."""
        self._is_locked = True
        self._cells[_CLOSED] |= _BY_PYTHON

    def unlock(self) -> None:
        """Open the way again, as far as things are so."""
        self._is_locked = False
        self.settle()

    def settle(self) -> None:
        """Open or close the way, as things are."""
        if not self._is_locked and self._may_be_open():
            self._cells[_CLOSED] &= ~_BY_PYTHON
        else:
            self._cells[_CLOSED] |= _BY_PYTHON

    @property
    def is_under_way(self) -> bool:
        """Whether another thread is in a short call."""
        return bool(self._cells[_CLOSED] & ~_BY_PYTHON) and self._cells[_THREAD] != get_ident()

    @property
    def is_broken_off(self) -> bool:
        """Whether a call has begun that nobody has carried on.

        An error of a signal handler came in between, unless that is about to happen.
        """
        return bool(self._cells[_CLOSED] & _HANDED_ON)

    @property
    def is_handed_on_here(self) -> bool:
        """Whether it is for this thread to carry on with a call."""
        return bool(self._cells[_CLOSED] & _HANDED_ON) and self._cells[_THREAD] == get_ident()

    def carried_on(self) -> None:
        """Take note that an operation carries on with the call that has begun."""
        self._cells[_CLOSED] &= ~_HANDED_ON

    @property
    def count(self) -> int:
        """How many there were."""
        return self._cells[_CALLS]

    @property
    def nbytes(self) -> int:
        """Bytes of the values that this rank passed into them."""
        return self._cells[_BYTES]

    def last(self) -> Description | None:
        """Return the description of the last call if it was a short one.

        That is, if none has been ``seen`` since.
        """
        return None if self._seen == self.count else self._known[self._cells[_LAST]]

    def seen(self) -> None:
        """Take note that another call follows."""
        self._seen = self._cells[_CALLS]

    def learn(self, number: int, description: Description) -> None:
        """Keep the description of a signature."""
        self._known[number] = description

    def description(self, number: int) -> Description:
        """Return the description of a signature."""
        return self._known[number]


class ChannelLock:
    """The lock of a channel, shared by the program's thread and that of progress.

    Args:
        short: The short calls of the channel, which take no lock: there are none while it is held.
    """

    def __init__(self, short: ShortCalls) -> None:
        self._short = short
        self._program = Lock()
        self._anyone = Lock()
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

    def take_if_free(self, seconds: float = 0.0) -> bool:
        """Take the lock for one step unless another thread has it; return whether that worked.

        Args:
            seconds: How long to wait for it.
        """
        return self._anyone.acquire(timeout=seconds)

    def give_back(self) -> None:
        """Give the lock back after the step."""
        self._short.settle()
        self._anyone.release()
