"""Work: the handle of a collective that was started and not yet waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mpidist.collectives.channel.operation import Operation
from mpidist.collectives.mpi.agreed import is_common
from mpidist.collectives.mpi.waiting import Steps
from mpidist.core.wording import tell_user


class Work:
    """A collective on its way. Its inputs must not be changed until it is done.

    Works of one Communicator are carried out in the order in which they were started, on every rank.
    """

    def __init__(
        self,
        operation: Operation[Any],
        steps: Steps[Any],
        timeout: float,
        advance: Callable[[], None],
        complete: Callable[[Work, float | None], None],
    ) -> None:
        self.operation = operation
        self.is_done = False
        self.timeout = timeout
        self.began = time.monotonic()
        # Seconds that callers have waited with a limit of their own.
        self.waited = 0.0
        self._steps = steps
        self._advance, self._complete = advance, complete
        self._result: Any = None
        self._error: BaseException | None = None
        self._was_told = False

    def __repr__(self) -> str:
        return f"<Work {self.operation.text}, {'done' if self.is_done else 'on its way'}>"

    def then(self, finish: Callable[[Any], Any]) -> Work:
        """Have ``finish`` turn the result into what ``wait`` returns; returns the handle itself."""
        self.operation.then(finish)
        return self

    def done(self) -> bool:
        """Whether the result is there; moves the collective forward, and does not block.

        Arrays on a GPU are there in the order of streams: the stream that is current where ``wait`` returns waits.
        """
        if not self.is_done:
            self._advance()
        return self.is_done

    def wait(self, timeout: float | None = None) -> Any:
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
        self._result = self.operation.finished(self._result)
        if self.operation.before_return is not None:
            self.operation.before_return()
        return self._result

    def step(self) -> bool:
        """Move one step forward; returns whether there are no more. Called by the channel alone."""
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
            # Also of a work that was settled: what it has begun with the other ranks is still carried through.
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
        """End with ``error``, which ``wait`` raises. Called by the channel alone."""
        self._error = error
        self.is_done = True


class FinishedWork:
    """The handle of something that was done at once; as ``Work``."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def __repr__(self) -> str:
        return "<Work, done>"

    def done(self) -> bool:
        """Return True."""
        return True

    def wait(self, timeout: float | None = None) -> Any:
        """Return the result."""
        del timeout
        return self._result


class PartOfWork:
    """One replica's handle of a collective that was started for all replicas of the rank; as ``Work``.

    Args:
        work: The collective.
        select: Takes its result and returns the replica's part.
    """

    def __init__(self, work: Work | FinishedWork | PartOfWork, select: Callable[[Any], Any]) -> None:
        self._work = work
        self._select = select

    def __repr__(self) -> str:
        return repr(self._work)

    def done(self) -> bool:
        """See ``Work``."""
        return self._work.done()

    def wait(self, timeout: float | None = None) -> Any:
        """See ``Work``."""
        return self._select(self._work.wait(timeout))
