"""The exceptions that mpidist adds to Python's own.

Wrong arguments raise ``ValueError``, ``TypeError`` or ``RuntimeError`` as in TensorFlow; the classes here are
for errors that only a job of several ranks can have.
"""

from __future__ import annotations

from typing import TypeVar

E = TypeVar("E", bound=BaseException)

# Set on an error that several ranks raise.
_PRINTS = "_mpidist_prints"


def shared_error(error: E, prints: bool) -> E:
    """Note whether this rank prints an error that several ranks raise, and return it."""
    setattr(error, _PRINTS, prints)
    return error


def prints_here(error: BaseException) -> bool | None:
    """Return whether this rank prints an uncaught error that several ranks raise. None for any other error."""
    prints: bool | None = getattr(error, _PRINTS, None)
    return prints


class MismatchError(ValueError):
    """Ranks entered one collective with different plans; raised on every rank with the same text.

    Args:
        message: The request of each rank and the line of user code it came from.
        plans: ``{rank: description}`` of every rank's request.
    """

    def __init__(self, message: str, plans: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.plans = plans or {}


MORE_TIME = "MPIDIST_TIMEOUT=SECONDS or CommunicationOptions(timeout_seconds=...)"


class CollectiveTimeoutError(TimeoutError):
    """A collective did not finish within its deadline.

    Args:
        operation: The collective, as text (operation, shapes and dtypes).
        sequence: How many collectives this rank had issued on the communicator, this one included.
        waited_seconds: How long this rank waited.
        rank: The rank that gave up.
        report: State of the ranks, if one of them could query it.
        more_time: How the program allows more time.
    """

    def __init__(
        self,
        operation: str,
        sequence: int,
        waited_seconds: float,
        rank: int,
        report: str | None = None,
        more_time: str = MORE_TIME,
    ) -> None:
        self.operation = operation
        self.sequence = sequence
        self.waited_seconds = waited_seconds
        self.rank = rank
        self.report = report
        text = (
            f"rank {rank} waited {waited_seconds:.1f} s in collective number {sequence}, {operation}, and the "
            "other ranks did not complete it. Expected: every rank makes the same calls in the same order. "
            f"Look for a rank that stopped, or that skips this call; to allow more time set {more_time}."
        )
        super().__init__(text if report is None else f"{text}\n{report}")


class MessageTimeoutError(CollectiveTimeoutError):
    """A message did not come, or was not taken, within its deadline.

    Args:
        message: The message, as text.
        call_site: The line of the program.
        waited_seconds: How long this rank waited.
        rank: The rank that gave up.
    """

    def __init__(self, message: str, call_site: str, waited_seconds: float, rank: int) -> None:
        super().__init__(message, 0, waited_seconds, rank)
        self.args = (
            f"rank {rank} waited {waited_seconds:.1f} s in {message}, at {call_site}. Expected: the other side calls "
            "recv or send with the same tag. Look for a rank that stopped, or that skips this call; to allow more time "
            "set MPIDIST_TIMEOUT=SECONDS or CommunicationOptions(timeout_seconds=...).",
        )


class RequestTimeoutError(CollectiveTimeoutError):
    """A parameter server did not answer within the deadline.

    Args:
        request: The request and the server, as text.
        waited_seconds: How long this rank waited.
        rank: The rank that gave up.
    """

    def __init__(self, request: str, waited_seconds: float, rank: int) -> None:
        super().__init__(request, 0, waited_seconds, rank)
        self.args = (
            f"rank {rank} waited {waited_seconds:.1f} s for {request}. Look for a server that stopped, or that never "
            "came to Server(resolver).join(), and for another worker if the request waits for one; to allow more time "
            "set MPIDIST_TIMEOUT=SECONDS.",
        )


class PeerError(RuntimeError):
    """Another rank reported an error of its own while this rank was in a collective."""


class RankLostError(PeerError):
    """The process of another rank is gone, as MPI has said. ``mpidist.elastic.run`` goes on without it."""


class LaunchError(RuntimeError):
    """The processes did not come up as one MPI world, or MPI is not usable."""


class OutOfRangeError(Exception):
    """``DistributedIterator.get_next()`` was called after the last element."""


class AlgorithmError(ValueError):
    """A requested algorithm does not work where the ranks are; raised on all of them."""


class DeviceError(RuntimeError):
    """A GPU was asked for, and this process can use none. The text says why, and the command to type."""


class NcclFailure(RuntimeError):
    """NCCL reported an error on this rank. Unfinished work of its communicator is lost.

    Args:
        message: The call that failed, and NCCL's own words.
        status: NCCL's ncclResult_t.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
