"""Work: the handle of a collective that was started and not yet waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic

from mpidist.collectives.channel.operation import Operation
from mpidist.collectives.mpi.agreed import is_common
from mpidist.collectives.mpi.waiting import Steps
from mpidist.core.text import tell_user

if TYPE_CHECKING:
    # A plain ``Work`` in a user's program is one of any result. Type checkers know the default, Python 3.10 does not.
    from typing_extensions import TypeVar

    T_co = TypeVar("T_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)

S = TypeVar("S")


class Work(Generic[T_co]):
    """A collective on its way. Its inputs must not be changed until it is done.

    Works of one Communicator are carried out in the order in which they were started, on every rank.
    """

    def __init__(
        self,
        operation: Operation[T_co],
        steps: Steps[object],
        timeout: float,
        advance: Callable[[], None],
        complete: Callable[[Work[object], float | None], None],
    ) -> None:
        self.operation = operation
        self.is_done = False
        self.timeout = timeout
        self.began = time.monotonic()
        # Seconds that callers have waited with a limit of their own.
        self.waited = 0.0
        self._steps = steps
        self._advance, self._complete = advance, complete
        self._result: object = None
        self._error: BaseException | None = None
        self._was_told = False

    def __repr__(self) -> str:
        return f"<Work {self.operation.text}, {'done' if self.is_done else 'on its way'}>"

    def then(self, finish: Callable[[T_co], S]) -> Work[S]:
        """Have ``finish`` turn the result into that of ``wait``; returns the handle itself."""
        self.operation.then(finish)
        return self  # type: ignore[return-value]  # its type is that of its result, which changes here

    def done(self) -> bool:
        """Return whether the result is there; moves the collective forward, and does not block.

        Arrays on a GPU are there in the order of streams: the stream that is current where ``wait`` returns waits.
        """
        if not self.is_done:
            self._advance()
        return self.is_done

    def wait(self, timeout: float | None = None) -> T_co:
        """Return the result once it is there.

        Args:
            timeout: Seconds after which to stop waiting; the collective goes on, and may be waited for again.

        Raises:
            TimeoutError: Not done within ``timeout``.
            CollectiveTimeoutError: Not done within the deadline of the collective itself.
            MismatchError: The ranks started different collectives.
        """
        self._complete(self, timeout)
        if self._error is not None:
            self._was_told = True
            raise self._error
        self._result = result = self.operation.finished(self._result)
        if self.operation.before_return is not None:
            self.operation.before_return()
        return result

    def step(self) -> bool:
        """Move one step forward; returns whether there are no more. Called by the executor alone."""
        try:
            next(self._steps)
        except StopIteration as stop:
            self._result = stop.value
        except Exception as error:
            if not is_common(error):
                raise
            # For the caller of wait().
            self._error = error
        else:
            # Also of a work that was settled: its exchange with the other ranks is still carried through.
            return False
        self.is_done = True
        return True

    def __del__(self) -> None:
        if self._error is not None and not self._was_told:
            tell_user(
                f"{self.operation.text}, started at {self.operation.call_site} and never waited for, ended with "
                f"{type(self._error).__name__}: {self._error}"
            )

    def settle(self, error: BaseException) -> None:
        """End with ``error``, which ``wait`` raises. Called by the executor alone."""
        self._error = error
        self.is_done = True


class FinishedWork(Generic[T_co]):
    """The handle of a collective that was done at once; as ``Work``."""

    def __init__(self, result: T_co) -> None:
        self._result = result

    def __repr__(self) -> str:
        return "<Work, done>"

    def done(self) -> bool:
        """Return True."""
        return True

    def wait(self, timeout: float | None = None) -> T_co:
        """Return the result."""
        del timeout
        return self._result


class PartOfWork(Generic[T_co]):
    """One replica's handle of a collective for all replicas of the rank; as ``Work``.

    Args:
        work: The collective.
        select: Takes its result and returns the replica's part.
    """

    def __init__(self, work: Work[S] | FinishedWork[S] | PartOfWork[S], select: Callable[[S], T_co]) -> None:
        self._work: Work[object] | FinishedWork[object] | PartOfWork[object] = work
        self._select: Callable[..., T_co] = select

    def __repr__(self) -> str:
        return repr(self._work)

    def done(self) -> bool:
        """See ``Work``."""
        return self._work.done()

    def wait(self, timeout: float | None = None) -> T_co:
        """See ``Work``."""
        return self._select(self._work.wait(timeout))
