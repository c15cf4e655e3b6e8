"""Errors that all ranks raise together, for work that fails on one of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypeVar

from mpidist.collectives.mpi.objects import broadcast_pickle, gather_objects
from mpidist.collectives.mpi.waiting import Comm, Steps
from mpidist.core.errors import AlgorithmError, CollectiveTimeoutError, MismatchError, PeerError, shared_error

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

COMMON_ERRORS = (AlgorithmError, MismatchError, PeerError, CollectiveTimeoutError)
"""All ranks raise these together, or the channel has been given up already."""
# Set on another error that all ranks of a communicator raise in a collective of theirs.
_IS_COMMON = "_mpidist_is_common"


def as_common(error: E, prints: bool) -> E:
    """Return an error after noting that all ranks raise it. ``prints``: this rank prints it."""
    setattr(error, _IS_COMMON, True)
    return shared_error(error, prints)


def is_common(error: BaseException) -> bool:
    """Return whether all ranks raise an error in the collective at hand, still in step."""
    return isinstance(error, COMMON_ERRORS) or hasattr(error, _IS_COMMON)


def all_do(comm: Comm, work: Callable[[], T], error: Callable[[int, str], Exception]) -> Steps[T]:
    """Return the result of ``work`` here once no rank has failed in it (collective).

    Args:
        comm: The ranks.
        work: Done by each rank by itself.
        error: Returns the error for all, given the first rank that failed and its error as text.
    """
    failure, result = None, None
    try:
        result = work()
    except Exception as caught:  # the others wait for this rank
        failure = caught
    problems = yield from problems_of(comm, None if failure is None else f"{type(failure).__name__}: {failure}")
    for rank, text in problems.items():
        raise as_common(error(rank, text), prints=comm.Get_rank() in (0, rank)) from failure
    return result  # type: ignore[return-value]  # only None where work returns it


def first_does(comm: Comm, work: Callable[[], T]) -> Steps[T]:
    """Return the first rank's result of ``work`` on all ranks, or raise its error (collective)."""
    told = b""
    if comm.Get_rank() == 0:
        try:
            told = pickle.dumps((work(), None))
        except Exception as error:  # the others wait for this rank
            told = _pickled(error)
    result, failure = yield from broadcast_pickle(comm, told, 0)
    if failure is not None:
        raise as_common(failure, prints=comm.Get_rank() == 0)
    return result  # type: ignore[no-any-return]


def _pickled(error: Exception) -> bytes:
    """Return the pickle of an error, or of its text where it does not travel."""
    try:
        pickled = pickle.dumps((None, error))
        pickle.loads(pickled)
    except Exception:
        return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
    return pickled


def problems_of(comm: Comm, problem: T | None) -> Steps[dict[int, T]]:
    """Return, on every rank, the problems of those that have one, by rank (collective)."""
    everyone: list[T | None] = yield from gather_objects(comm, problem)
    return {rank: theirs for rank, theirs in enumerate(everyone) if theirs is not None}
