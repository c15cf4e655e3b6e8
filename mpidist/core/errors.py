"""The exceptions that mpidist adds to Python's own.

Wrong arguments raise ``ValueError``, ``TypeError`` or ``RuntimeError`` as in TensorFlow. The classes here are for jobs
with several ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

E = TypeVar("E", bound=BaseException)

MORE_TIME = "MPIDIST_TIMEOUT=SECONDS or CommunicationOptions(timeout_seconds=...)"
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
    """Ranks entered one collective with different plans. Raised on every rank with the same text.

    Args:
        message: The call of each rank, and its line of user code.
        plans: ``{rank: description}`` of every rank's call.
    """

    def __init__(self, message: str, plans: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.plans = plans or {}


class CollectiveTimeoutError(TimeoutError):
    """A collective did not finish within its deadline.

    Args:
        operation: The collective, as text (operation, shapes and dtypes).
        sequence: Number of collectives that this rank had issued on the communicator, including this one.
        waited_seconds: Seconds that this rank waited.
        rank: The rank that raised the error.
        report: State of the ranks, if one of them could query it.
        more_time: Settings that allow more time.
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
            f"rank {rank} waited {waited_seconds:.1f} s in collective number {sequence}, {operation}, and the other "
            "ranks did not complete it. Make the same calls in the same order on every rank. Check for a rank that "
            f"stopped, or that skips this call. To allow more time, set {more_time}."
        )
        super().__init__(text if report is None else f"{text}\n{report}")


class MessageTimeoutError(CollectiveTimeoutError):
    """A message was not sent or received within its deadline.

    Args:
        message: The message, as text.
        call_site: Line of the program.
        waited_seconds: Seconds that this rank waited.
        rank: The rank that raised the error.
    """

    def __init__(self, message: str, call_site: str, waited_seconds: float, rank: int) -> None:
        super().__init__(message, 0, waited_seconds, rank)
        self.args = (
            f"rank {rank} waited {waited_seconds:.1f} s in {message}, at {call_site}. Call recv or send with the same "
            "tag on the other rank. Check for a rank that stopped, or that skips this call. To allow more time, set "
            f"{MORE_TIME}.",
        )


class RequestTimeoutError(CollectiveTimeoutError):
    """A parameter server did not answer within the deadline.

    Args:
        request: The request and the server, as text.
        waited_seconds: Seconds that this rank waited.
        rank: The rank that raised the error.
    """

    def __init__(self, request: str, waited_seconds: float, rank: int) -> None:
        super().__init__(request, 0, waited_seconds, rank)
        self.args = (
            f"rank {rank} waited {waited_seconds:.1f} s for {request}. Check for a server that stopped, or that never "
            "called Server(resolver).join(). If the request waits for another worker, check that worker. To allow more "
            "time, set MPIDIST_TIMEOUT=SECONDS.",
        )


class PeerError(RuntimeError):
    """Another rank reported an error while this rank was in a collective."""


class RankLostError(PeerError):
    """MPI reported the loss of another rank. ``mpidist.elastic.run`` continues without it."""


class LaunchError(RuntimeError):
    """The processes did not start as one MPI world, or MPI is not usable."""


class NonFiniteError(ArithmeticError):
    """The result of a reduction has NaN or infinity, and ``MPIDIST_CHECK_NAN=1`` is set. Raised on every rank.

    Args:
        operation: The reduction, as text.
        contributions: By rank, the indices of its arrays that had such values. Empty if a sum of finite values
            overflowed.
        call_sites: By rank, the line of its program.
        names: Names of the arrays, if the value is a dict. Gradients have the names of their variables.
    """

    def __init__(
        self,
        operation: str,
        contributions: Mapping[int, tuple[int, ...]],
        call_sites: Mapping[int, str],
        names: Sequence[str] = (),
    ) -> None:
        self.operation, self.contributions, self.call_sites = operation, contributions, call_sites
        lines = [
            f"  rank {rank}: {', '.join(names[index] if names else f'array {index}' for index in indices)}, at "
            f"{call_sites[rank]}"
            for rank, indices in contributions.items()
        ]
        cause = "These contributions have such values:" if lines else "All contributions are finite, so it overflowed."
        super().__init__("\n".join([f"the result of {operation} has NaN or infinity. {cause}", *lines]))


class OutOfRangeError(Exception):
    """``DistributedIterator.get_next()`` was called after the last element."""


class AlgorithmError(ValueError):
    """The requested algorithm does not support this layout of ranks. Raised on every rank."""


class DeviceError(RuntimeError):
    """The program requested a GPU that this process cannot use. The text has the reason, and the command to type."""


class NcclFailure(RuntimeError):
    """NCCL reported an error on this rank. Unfinished work of its communicator is lost.

    Args:
        message: The call that failed, and NCCL's own text.
        status: NCCL's ncclResult_t.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
