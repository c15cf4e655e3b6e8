"""The fast path: collectives that run in the node's core, without an Operation.

The general path caches signatures, and the core recognizes them. Fast-path calls bypass observers, pending works and
local changes. So one flag disables the fast path while any of these exist, or after a failure. If peers are late or
their calls differ, the core hands the call over, and the general path resumes it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from threading import Lock, get_ident

from mpidist.arrays.dtypes import Array
from mpidist.collectives.channel.operation import Description, FastCall, Operation
from mpidist.collectives.node.core import NO_FAST_CALLS, Core, FastCalls, Resume
from mpidist.collectives.node.node import Node

_TWO_THREADS = (
    "Two threads used one Communicator at the same time. Issue its collectives from one thread, in the same order on "
    "every rank, or give each thread a Communicator of its own"
)
_SHUT_DOWN = "Collective called during shutdown. Call collectives before the program exits or calls MPI.Finalize()"
# Cells of the core: disabled flags, number of calls, signature of the last call, thread of a call in flight, bytes.
_DISABLED, _CALLS, _LAST, _THREAD, _BYTES = range(5)
# Set during a call, by this module, and while a call waits to be resumed.
_IN_CALL, _BY_PYTHON, _HANDED_OVER = 1, 2, 4


class FastPath:
    """The fast path of one channel.

    ``may_be_enabled`` returns whether no observer, pending work, local change or failure exists.
    """

    def __init__(self, node: Node, may_be_enabled: Callable[[], bool]) -> None:
        self._node = node
        self._core: Core | None = node.core  # keeps the cells
        self._cells = memoryview(array("q", [0] * 5)) if self._core is None else self._core.cells
        self._may_be_enabled = may_be_enabled
        self.algorithm = ""
        """Algorithm of its all-reduces."""
        self.descriptions: dict[int, Description] = {}
        """Descriptions by the number of a signature, which the core may reuse for another signature."""
        self._seen = 0
        self._is_locked = False
        self._cells[_DISABLED] |= _BY_PYTHON

    def open(self, take: Callable[..., Array], resume: Resume) -> FastCalls:
        """Return the functions of the fast path. ``resume`` finishes a call if its peers are late or differ."""
        return NO_FAST_CALLS if self._core is None else self._core.open_fast_calls(take, resume)

    def lock(self) -> bool:
        """Disable the fast path until ``unlock``. Return whether another thread is in a fast-path call."""
        self._is_locked = True
        cells = self._cells
        cells[_DISABLED] |= _BY_PYTHON
        return cells[_DISABLED] != _BY_PYTHON and cells[_THREAD] != get_ident()

    def unlock(self) -> None:
        """Enable the fast path again if nothing else forbids it."""
        self._is_locked = False
        self.update()

    def update(self) -> None:
        """Set the flag. Call this when observers, pending works, local changes or the state have changed."""
        if not self._is_locked and self._may_be_enabled():
            self._cells[_DISABLED] &= ~_BY_PYTHON
        else:
            self._cells[_DISABLED] |= _BY_PYTHON

    @property
    def is_abandoned(self) -> bool:
        """Whether a handed-over call was not resumed, because a signal handler raised an error."""
        return self._cells[_DISABLED] & _HANDED_OVER != 0

    @property
    def is_handed_over_here(self) -> bool:
        """Whether this thread must resume a call."""
        return self._cells[_DISABLED] & _HANDED_OVER != 0 and self._cells[_THREAD] == get_ident()

    def resumed(self) -> None:
        """Record that an operation finishes the call that was handed over."""
        self._cells[_DISABLED] &= ~_HANDED_OVER

    @property
    def count(self) -> int:
        """Number of fast-path calls so far."""
        return self._cells[_CALLS]

    @property
    def nbytes(self) -> int:
        """Bytes of their inputs."""
        return self._cells[_BYTES]

    def last(self) -> Description | None:
        """Return the description of the last call if it took the fast path."""
        return None if self._seen == self.count else self.descriptions[self._cells[_LAST]]

    def see(self) -> int:
        """Record that a call on the general path follows. Return the number of fast-path calls so far."""
        self._seen = self._cells[_CALLS]
        return self._seen

    def cache(self, call: FastCall, operation: Operation[object]) -> None:
        """Cache the signature of a finished call, if such calls can take the fast path."""
        description, node = operation.description, self._node
        if call.name == "all_reduce":
            can_be_fast = operation.algorithms == (self.algorithm,)
        else:
            can_be_fast = not operation.algorithms and node.is_alone and node.slots is not None
        if self._core is None or not can_be_fast or not call.is_unchanged():
            return
        number = self._core.cache(call.name, call.arrays, description.id, call.op, call.divisor, call.root)
        if number is not None:
            self.descriptions[number] = description


class ChannelLock:
    """The lock of a channel. The program holds it during a collective, the progress thread for one step."""

    def __init__(self, fast: FastPath) -> None:
        self._fast = fast
        # Threads of the program take both locks. The progress thread takes only the second.
        self._program = Lock()
        self._anyone = Lock()
        self._is_over = False

    def __enter__(self) -> None:
        """Take the lock for the program, and disable the fast path."""
        # Another thread that meets a fast-path call gives the lock back at once to the thread that resumes the call.
        if not self._program.acquire(blocking=False) and not (
            self._fast.is_handed_over_here and self._program.acquire()
        ):
            raise RuntimeError(_SHUT_DOWN if self._is_over else _TWO_THREADS)
        try:
            self._anyone.acquire()
        except BaseException:  # a signal handler that raises during a step of the progress thread
            self._program.release()
            raise
        if self._fast.lock():
            self.__exit__()
            raise RuntimeError(_TWO_THREADS)

    def __exit__(self, *_: object) -> None:
        """Release the lock, and enable the fast path if nothing else forbids it."""
        self._fast.unlock()
        self._anyone.release()
        self._program.release()

    def take_for_good(self, seconds: float) -> bool:
        """Take the lock from all other threads at shutdown; return whether that succeeded in time."""
        self._is_over = self._program.acquire(timeout=seconds) and self._anyone.acquire(timeout=seconds)
        self._fast.lock()
        return self._is_over

    def try_step(self, step: Callable[[], None], seconds: float = 0.0) -> None:
        """Run one step of a pending work, unless another thread keeps the lock."""
        if self._anyone.acquire(timeout=seconds):
            try:
                step()
            finally:
                self._fast.update()
                self._anyone.release()
