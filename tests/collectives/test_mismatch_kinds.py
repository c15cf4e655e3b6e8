"""Kinds of mismatch between ranks on a Communicator: each is an error on all of them, soon, and none a hang."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpidist import Communicator
from mpidist.experimental import CommunicationOptions
from tests.support.ranks.odd_rank import JOBS, Kind, Outcome, check, run_kinds
from tests.support.ranks.pool import run

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

ROWS, LARGE = np.ones((4, 2)), np.ones(100_000)
_closed: dict[int, Communicator] = {}


def with_options(**options: Any) -> Any:
    return lambda c: c.all_reduce("SUM", LARGE, options=CommunicationOptions(**options))


def two(comm: Communicator) -> Communicator:
    """Return the partner of a communicator, made beside it."""
    return _closed[id(comm)]


def make_two() -> Communicator:
    comm = Communicator()
    _closed[id(comm)] = Communicator()
    return comm


def skips_one(comm: Communicator) -> Any:
    comm.all_reduce("SUM", 1.0)
    return comm.barrier()


def leaves_none_out(comm: Communicator) -> Any:
    comm.all_reduce("SUM", 1.0)
    comm.all_reduce("SUM", np.ones(3))
    return comm.barrier()


def gather_then_reduce(comm: Communicator) -> Any:
    comm.all_gather(ROWS)
    return comm.all_reduce("SUM", ROWS)


def reduce_then_gather(comm: Communicator) -> Any:
    comm.all_reduce("SUM", ROWS)
    return comm.all_gather(ROWS)


def fails_before(comm: Communicator) -> Any:
    with comm.shared_errors("reading a file"):
        raise KeyError("lost")


def fails_in_its_block(comm: Communicator) -> Any:
    with comm:
        raise KeyError("lost")


def works_in_order(comm: Communicator) -> Any:
    works = [comm.all_reduce_async("SUM", LARGE), comm.all_gather_async(ROWS)]
    return [work.wait() for work in works]


def works_in_another_order(comm: Communicator) -> Any:
    works = [comm.all_gather_async(ROWS), comm.all_reduce_async("SUM", LARGE)]
    return [work.wait() for work in works]


def first_then_second(comm: Communicator) -> Any:
    comm.all_reduce("SUM", LARGE)
    return two(comm).all_reduce("SUM", LARGE)


def second_then_first(comm: Communicator) -> Any:
    two(comm).all_reduce("SUM", LARGE)
    return comm.all_reduce("SUM", LARGE)


def makes_another(comm: Communicator) -> Any:
    return Communicator()


KINDS = {
    "shape": Kind(lambda c: c.all_reduce("SUM", np.ones(3)), lambda c: c.all_reduce("SUM", np.ones(4))),
    "shape of a large array": Kind(lambda c: c.all_reduce("SUM", LARGE), lambda c: c.all_reduce("SUM", LARGE[1:])),
    "number of dimensions": Kind(lambda c: c.all_reduce("SUM", ROWS), lambda c: c.all_reduce("SUM", np.ones(8))),
    "empty or not": Kind(lambda c: c.all_reduce("SUM", np.ones(3)), lambda c: c.all_reduce("SUM", np.ones(0))),
    "dtype": Kind(lambda c: c.all_reduce("SUM", LARGE), lambda c: c.all_reduce("SUM", LARGE.astype("f4"))),
    "int and float": Kind(lambda c: c.all_reduce("SUM", 1), lambda c: c.all_reduce("SUM", 1.0)),
    "op": Kind(lambda c: c.all_reduce("SUM", 1.0), lambda c: c.all_reduce("MEAN", 1.0)),
    "op of large arrays": Kind(lambda c: c.all_reduce("MIN", LARGE), lambda c: c.all_reduce("MAX", LARGE)),
    "number of arrays": Kind(lambda c: c.all_reduce("SUM", [1.0, 2.0]), lambda c: c.all_reduce("SUM", [1.0])),
    "arrays in another order": Kind(
        lambda c: c.all_reduce("SUM", [ROWS, LARGE]), lambda c: c.all_reduce("SUM", [LARGE, ROWS])
    ),
    "keys": Kind(
        lambda c: c.all_reduce("SUM", {"a": ROWS, "b": ROWS}), lambda c: c.all_reduce("SUM", {"a": ROWS, "c": ROWS})
    ),
    "list or dict": Kind(lambda c: c.all_gather({"a": ROWS}), lambda c: c.all_gather([ROWS])),
    "nesting": Kind(lambda c: c.broadcast([ROWS, [1.0]]), lambda c: c.broadcast([[ROWS], 1.0])),
    "a generator that fails": Kind(
        lambda c: c.all_reduce("SUM", [ROWS]),
        lambda c: c.all_reduce("SUM", (ROWS / [][i] for i in range(1))),
        own_error=IndexError,
    ),
    "out of another structure": Kind(
        lambda c: c.all_reduce("SUM", {"a": ROWS}, out={"a": np.empty((4, 2))}),
        lambda c: c.all_reduce("SUM", {"a": ROWS}, out={"b": np.empty((4, 2))}),
        own_error=ValueError,
    ),
    "method": Kind(lambda c: c.all_reduce("SUM", ROWS), lambda c: c.broadcast(ROWS)),
    "barrier or gather": Kind(lambda c: c.barrier(), lambda c: c.all_gather(ROWS)),
    "reduce_scatter or all_reduce": Kind(lambda c: c.reduce_scatter("SUM", ROWS), lambda c: c.all_reduce("SUM", ROWS)),
    "reduce or all_reduce": Kind(lambda c: c.reduce("SUM", ROWS), lambda c: c.all_reduce("SUM", ROWS)),
    "axis of all_gather": Kind(lambda c: c.all_gather(ROWS, 0), lambda c: c.all_gather(ROWS, 1)),
    "other dimension of all_gather": Kind(lambda c: c.all_gather(ROWS), lambda c: c.all_gather(np.ones((4, 3)))),
    "root of broadcast": Kind(lambda c: c.broadcast(1.0, 0), lambda c: c.broadcast(1.0, 1)),
    "root of reduce": Kind(lambda c: c.reduce("SUM", ROWS, 0), lambda c: c.reduce("SUM", ROWS, 1)),
    "array or object": Kind(lambda c: c.broadcast(LARGE), lambda c: c.broadcast_object(LARGE)),
    "two ways of objects": Kind(lambda c: c.all_gather_object(1), lambda c: c.broadcast_object(1)),
    "split or empty": Kind(lambda c: c.split(0), lambda c: c.empty(3)),
    "step agreement": Kind(lambda c: c.step_agreement(), lambda c: c.barrier()),
    "shape of own memory": Kind(lambda c: c.empty(1 << 20), lambda c: c.empty(1 << 21)),
    "bytes_per_pack": Kind(with_options(bytes_per_pack=1 << 16), with_options(bytes_per_pack=1 << 17)),
    "algorithm": Kind(with_options(algorithm="hierarchical"), with_options(algorithm="mpi")),
    "deterministic": Kind(with_options(), with_options(deterministic=True)),
    "wire_dtype": Kind(with_options(wire_dtype="bfloat16"), with_options(wire_dtype="float16")),
    "error_feedback": Kind(
        with_options(wire_dtype="bfloat16"), with_options(wire_dtype="bfloat16", error_feedback=True)
    ),
    "order": Kind(gather_then_reduce, reduce_then_gather),
    "a call that is missing": Kind(leaves_none_out, skips_one),
    "a call too many": Kind(skips_one, leaves_none_out),
    "blocking or not": Kind(lambda c: c.all_reduce("SUM", ROWS), lambda c: c.all_reduce_async("SUM", ROWS[:3]).wait()),
    "shape of a work": Kind(
        lambda c: c.all_reduce_async("SUM", LARGE).wait(), lambda c: c.all_reduce_async("SUM", LARGE[1:]).wait()
    ),
    "works in another order": Kind(works_in_order, works_in_another_order),
    "close": Kind(lambda c: c.all_reduce("SUM", LARGE), lambda c: c.close()),
    "an error before the call": Kind(lambda c: c.all_reduce("SUM", LARGE), fails_before, own_error=KeyError),
    "an error in the block of the communicator": Kind(
        lambda c: c.all_reduce("SUM", LARGE), fails_in_its_block, own_error=KeyError
    ),
    "a dtype that cannot be reduced": Kind(
        lambda c: c.all_reduce("SUM", ROWS), lambda c: c.all_reduce("SUM", ROWS > 0), own_error=TypeError
    ),
    "an object that cannot be pickled": Kind(
        lambda c: c.all_gather_object(1), lambda c: c.all_gather_object(lambda: 1), own_error=AttributeError
    ),
    "a color that is wrong": Kind(lambda c: c.split(0), lambda c: c.split(-5), own_error=ValueError),
    "out that does not fit": Kind(
        lambda c: c.all_reduce("SUM", ROWS, out=np.empty((4, 2))),
        lambda c: c.all_reduce("SUM", ROWS, out=np.empty(3)),
        own_error=ValueError,
    ),
    "root that there is not": Kind(
        lambda c: c.reduce("SUM", ROWS, 0), lambda c: c.reduce("SUM", ROWS, 99), own_error=ValueError
    ),
    "op that there is not": Kind(
        lambda c: c.all_reduce("SUM", ROWS), lambda c: c.all_reduce("SUMM", ROWS), own_error=ValueError
    ),
    "options of another kind": Kind(
        lambda c: c.all_reduce("SUM", ROWS), lambda c: c.all_reduce("SUM", ROWS, options={}), own_error=TypeError
    ),
    "another communicator first": Kind(first_then_second, second_then_first, make=make_two, goes_on=False),
    "a communicator too many": Kind(lambda c: c.all_reduce("SUM", LARGE), makes_another, goes_on=False),
}


# Differences that are none: what the ranks exchange is the same.
LEGITIMATE = {
    "another line": (lambda c: c.all_reduce("SUM", ROWS), lambda c: c.all_reduce("SUM", ROWS)),
    "blocking or not": (lambda c: c.all_reduce("SUM", ROWS), lambda c: c.all_reduce_async("SUM", ROWS).wait()),
    "timeout_seconds": (with_options(timeout_seconds=5.0), with_options(timeout_seconds=6.0)),
    "out": (lambda c: c.all_reduce("SUM", LARGE), lambda c: c.all_reduce("SUM", LARGE, out=np.empty(100_000))),
    "a list or a tuple": (lambda c: c.all_reduce("SUM", [ROWS, 1.0]), lambda c: c.all_reduce("SUM", (ROWS, 1.0))),
    "a list or a generator": (
        lambda c: c.all_reduce("SUM", [ROWS, 1.0]),
        lambda c: c.all_reduce("SUM", (value for value in (ROWS, 1.0))),
    ),
    "order of keys": (
        lambda c: list(c.all_reduce("SUM", {"a": 1.0, "b": 2.0}).values()),
        lambda c: list(c.all_reduce("SUM", {"b": 2.0, "a": 1.0}).values())[::-1],
    ),
    "strides": (lambda c: c.all_reduce("SUM", ROWS.T), lambda c: c.all_reduce("SUM", np.ones((2, 4)))),
}


@pytest.fixture(scope="module", params=JOBS)
def job(request: pytest.FixtureRequest) -> tuple[dict[str, list[Outcome]], int]:
    ranks, ranks_per_node, odd_rank = request.param
    return run_kinds(__name__, ranks, ranks_per_node, odd_rank), odd_rank


@pytest.mark.parametrize("name", KINDS)
def test_it_is_an_error_on_all_ranks(job: tuple[dict[str, list[Outcome]], int], name: str) -> None:
    outcomes, odd_rank = job
    check(KINDS[name], outcomes[name], odd_rank)


def goes_on() -> list[str]:
    comm = Communicator()
    results = [np.ravel((usual if comm.rank else odd)(comm)[0])[0] for usual, odd in LEGITIMATE.values()]
    comm.close()
    return [str(result) for result in results]


def test_what_is_no_mismatch() -> None:
    for told in run(goes_on, 2):
        assert told == ["2.0"] * len(LEGITIMATE)
