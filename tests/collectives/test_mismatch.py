"""Ranks that make different calls get the same error, and the communicator stays usable."""

from __future__ import annotations

import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest

from mpidist import Communicator, MismatchError, PeerError, ReduceOp
from mpidist.collectives.channel.operation import Operation, describe
from mpidist.collectives.mpi import exchange
from mpidist.collectives.mpi.exchange import first_does

pytestmark = [pytest.mark.nodes, pytest.mark.counts, pytest.mark.min_ranks(2)]


@pytest.mark.min_ranks(3)
def test_a_call_that_many_ranks_make_travels_once(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    gather = exchange.all_gather_flat

    def note(comm: Any, mine: Any, result: Any, *rest: Any) -> Any:
        given.append(mine.size)
        return gather(comm, mine, result, *rest)

    with monkeypatch.context() as patch, pytest.raises(MismatchError) as caught:
        patch.setattr(exchange, "all_gather_flat", note)
        comm.all_reduce("SUM", np.ones(3 if comm.rank == 1 else 2))
    assert [bool(size) for size in given] == [comm.rank < 2]
    assert len({id(text) for text in caught.value.plans.values()}) == 2
    assert [*caught.value.plans] == [*range(comm.size)]


@pytest.mark.min_ranks(3)
def test_three_different_calls(comm: Communicator) -> None:
    with pytest.raises(MismatchError):
        comm.all_reduce("SUM", np.ones(comm.rank))
    assert comm.all_reduce("SUM", 1) == comm.size


def test_a_skipped_call_is_explained(comm: Communicator) -> None:
    with pytest.raises(MismatchError, match="Make this call on every rank"):
        if comm.rank == 0:
            comm.all_reduce("SUM", 1.0)
        comm.barrier()
    with comm.group(range(comm.size)) as group, pytest.raises(MismatchError, match=r"`if mpidist\.rank\(\) == 0:`"):
        if comm.rank == 0:
            group.all_reduce("SUM", 1.0)
        group.barrier()
    with pytest.raises(MismatchError) as caught:
        comm.all_reduce("SUM", np.ones(1 + comm.rank))
    assert "Make this call on every rank" not in str(caught.value)


def test_structures_are_shown_for_nests_only(comm: Communicator) -> None:
    with pytest.raises(MismatchError) as caught:
        comm.reduce_arrays(ReduceOp.SUM, [np.ones(1 + comm.rank)], 1, note="*")
    assert " as *" not in str(caught.value)
    with pytest.raises(MismatchError, match=r" as \[\*\]"):
        comm.reduce_arrays(ReduceOp.SUM, [np.ones(1)], 1, note="[*]" if comm.rank else "*")


def test_an_error_of_all_ranks_stays_their_own(comm: Communicator) -> None:
    with pytest.raises(KeyError, match="lost"), comm.shared_errors("reading a file"):
        raise KeyError("lost")
    assert comm.all_reduce("SUM", 1) == comm.size


@pytest.mark.parametrize(
    ("call", "bad"),
    [
        ("all_gather_object", [lambda: 0]),
        ("broadcast_object", [lambda: 0]),
        ("split", [-5]),
        ("split", [2**40]),
        ("split", [0, 2**40]),
        ("split", [0, "a"]),
    ],
)
def test_a_bad_argument_of_one_rank_raises_on_all(comm: Communicator, call: str, bad: list[Any]) -> None:
    with pytest.raises((PeerError, AttributeError, TypeError, ValueError, pickle.PicklingError)):
        getattr(comm, call)(*(bad if comm.rank == 0 else [0]))
    assert comm.all_reduce("SUM", 1) == comm.size


def test_an_announced_error_is_not_kept(comm: Communicator) -> None:
    class Large:
        """Something that a frame of the traceback refers to."""

    def fails() -> None:
        local = Large()
        seen.append(weakref.ref(local))
        raise KeyError("lost")

    seen: list[Any] = []
    with pytest.raises(KeyError), comm.shared_errors("a test"):
        fails()
    assert comm.all_reduce("SUM", 1) == comm.size
    gc.collect()
    assert seen[0]() is None


class TwoArgumentsError(Exception):
    """An error that can be pickled but not unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("no such file"), ValueError),
        (TwoArgumentsError(1, 2), RuntimeError),
        (type("Local", (Exception,), {})("of a function"), RuntimeError),
    ],
    ids=["plain", "of two arguments", "of a local class"],
)
def test_all_raise_the_error_of_the_first_rank(error: Exception, kind: type[Exception]) -> None:
    def fail() -> None:
        raise error

    with Communicator() as comm:
        with pytest.raises(kind, match=str(error)):
            comm._channel.run(Operation(first_does(comm._channel.comm, fail), describe("a test")))
        comm.barrier()
