"""All-reduces of lists of arrays on the fast path, and calls that need the general path."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import numpy as np
import pytest
from mpi4py import MPI

import mpidist
from mpidist import Communicator, MismatchError
from mpidist.core.settings import RANKS_PER_NODE
from tests.support.ranks.cores import needs_core

pytestmark = [
    needs_core,
    pytest.mark.skipif(RANKS_PER_NODE.read() is not None, reason="the fast path needs one node"),
]

# Less than a page of the meeting, some slots, and chunks; lengths that divide among no ranks, and a 0-d array.
SHAPES = {"few": [(3,), (), (2, 5)], "some": [(301,), (7, 11), (1,)], "many": [(3, 3), (70_001,), (5,), (200_003,)]}
Arrays = list[np.ndarray]


def arrays_of(rank: int, shapes: list[tuple[int, ...]], dtype: str = "f4") -> Arrays:
    return [np.asarray(np.resize(np.arange(1, 50), shape) + rank, dtype) for shape in shapes]


def expected_of(comm: Communicator, shapes: list[tuple[int, ...]], dtype: str = "f4") -> Arrays:
    each = [arrays_of(rank, shapes, dtype) for rank in range(comm.size)]
    return [np.asarray(sum(column), dtype) for column in zip(*each, strict=True)]


# The first call makes room for what is large, and the second is learnt.
UNTIL_KNOWN = 2


def check(given: object, expected: Arrays) -> None:
    assert isinstance(given, (list, tuple))
    for array, right in zip(given, expected, strict=True):
        assert array.dtype == right.dtype
        np.testing.assert_array_equal(array, right)


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("dtype", ["f4", "f2", "i8"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_new_arrays(
    comm: Communicator, kind: type, dtype: str, shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = kind(arrays_of(comm.rank, shapes, dtype))
    before = [value.copy() for value in values]
    results = [comm.all_reduce("SUM", values) for _ in range(UNTIL_KNOWN)]
    monkeypatch.setattr(comm, "_run", None)  # the general path
    results += [comm.all_reduce("SUM", values) for _ in range(2)]
    for result in results:
        assert type(result) is kind
        check(result, expected_of(comm, shapes, dtype))
    assert not any(np.shares_memory(one, other) for one, other in zip(results[-2], results[-1], strict=True))
    for value, was in zip(values, before, strict=True):
        np.testing.assert_array_equal(value, was)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_into_arrays_of_the_program(
    comm: Communicator, shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    values, outs = arrays_of(comm.rank, shapes), [np.zeros(shape, "f4") for shape in shapes]
    for _ in range(UNTIL_KNOWN):
        comm.all_reduce("SUM", values)
    monkeypatch.setattr(comm, "_run", None)
    results = comm.all_reduce("SUM", values, out=outs)
    assert results is not outs
    assert all(result is out for result, out in zip(results, outs, strict=True))
    check(outs, expected_of(comm, shapes))
    comm.all_reduce("SUM", values, out=values)
    check(values, expected_of(comm, shapes))


def crossed(values: Arrays) -> Arrays:
    """The result of each where the input of another is."""
    return values[::-1]


def shifted(values: Arrays) -> Arrays:
    """Over the inputs, one element on."""
    memory = np.zeros(sum(value.size for value in values) + 1, "f4")
    start, outs = 0, []
    for index, value in enumerate(values):
        values[index] = memory[start : start + value.size]
        values[index][...] = value
        outs.append(memory[start + 1 : start + 1 + value.size])
        start += value.size
    return outs


@pytest.mark.parametrize("arrange", [crossed, shifted])
def test_results_over_other_inputs(comm: Communicator, arrange: Callable[[Arrays], Arrays]) -> None:
    shapes = [(500,), (500,), (500,)]
    values = arrays_of(comm.rank, shapes)
    comm.all_reduce("SUM", values)
    outs = arrange(values)
    comm.all_reduce("SUM", values, out=outs)
    check(outs, expected_of(comm, shapes))


def test_other_kinds_of_out(comm: Communicator) -> None:
    shapes = SHAPES["some"]
    values = arrays_of(comm.rank, shapes)
    for _ in range(UNTIL_KNOWN):
        comm.all_reduce("SUM", values)
    named = {name: np.zeros(shape, "f4") for name, shape in zip("abc", shapes, strict=True)}
    outs = [*named.values()]
    for out in (tuple(outs), named.values(), (array for array in outs)):
        for array in outs:
            array.fill(0)
        check([*comm.all_reduce("SUM", values, out=out)], expected_of(comm, shapes))
        check(outs, expected_of(comm, shapes))
    for wrong in (named, outs[0], 3.0, np.zeros((3, 301), "f4")):
        with pytest.raises((ValueError, TypeError)):
            comm.all_reduce("SUM", values, out=wrong)
    check(comm.all_reduce("SUM", values), expected_of(comm, shapes))


def test_another_thread_empties_the_list() -> None:
    """The arrays of a call stay alive if the list drops them."""
    with Communicator(MPI.COMM_SELF) as comm:
        shape, rounds = (1_000_000,), 30
        comm.all_reduce("SUM", [np.ones(shape, "f4")] * 2)
        outs = [np.zeros(shape, "f4") for _ in range(2)]
        for _ in range(rounds):
            values = [np.ones(shape, "f4") for _ in range(2)]
            thread = threading.Thread(target=values.clear)
            thread.start()
            with contextlib.suppress(ValueError):  # where it was empty from the start
                comm.all_reduce("SUM", values, out=[*outs])
            thread.join()
        assert not values


@pytest.mark.min_ranks(2)
def test_some_ranks_pass_out_or_tuples(comm: Communicator) -> None:
    shapes = SHAPES["some"]
    values = arrays_of(comm.rank, shapes)
    for _ in range(3):
        given = values if comm.rank % 2 else tuple(values)
        out = None if comm.rank else tuple(np.zeros(shape, "f4") for shape in shapes)
        check(comm.all_reduce("SUM", given, out=out), expected_of(comm, shapes))


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda outs: outs[:-1], "expected"),
        (lambda outs: [*outs[:-1], outs[0]], "one array twice"),
        (lambda outs: [*outs[:-1], outs[-1].astype("f8")], "out has"),
        (lambda outs: [*outs[:-1], np.zeros(9, "f4")], "out has"),
        (lambda outs: [outs[0], np.broadcast_to(np.float32(0), outs[1].shape), outs[2]], "read-only"),
    ],
)
def test_results_that_do_not_fit(comm: Communicator, spoil: Callable[[Arrays], Arrays], text: str) -> None:
    values = arrays_of(comm.rank, SHAPES["some"])
    for _ in range(2):
        comm.all_reduce("SUM", values)
    with pytest.raises(ValueError, match=text):
        comm.all_reduce("SUM", values, out=spoil([np.zeros_like(value) for value in values]))
    check(comm.all_reduce("SUM", values), expected_of(comm, SHAPES["some"]))


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([(3,), (5,)], [(5,), (3,)]),
        ([(4,), (4,)], [(2, 4)]),
        ([(2,), (3, 1)], [(2, 3), (1,)]),
        ([(8,)] * 2, [(8,)] * 3),
    ],
)
def test_lists_that_differ(comm: Communicator, one: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> None:
    for shapes in (one, other):
        for _ in range(2):
            comm.all_reduce("SUM", arrays_of(comm.rank, shapes))
    for _ in range(2):
        with pytest.raises(MismatchError):
            comm.all_reduce("SUM", arrays_of(comm.rank, one if comm.rank else other))
    check(comm.all_reduce("SUM", arrays_of(comm.rank, one)), expected_of(comm, one))


@pytest.mark.parametrize(
    "given",
    [
        lambda rank: [np.ones(3, "f4"), np.ones(3, "f8")],
        lambda rank: [np.ones(3, "f4"), np.ones(0, "f4")],
        lambda rank: [np.ones(3, "f4"), 1.0],
        lambda rank: [np.ones((4, 4), "f4").T[:, :2], np.ones(3, "f4")],
        lambda rank: [np.ones(1, "f4") for _ in range(1500)],
        lambda rank: [np.ones((1,) * 6, "f4") for _ in range(900)],
        lambda rank: [np.ones(2, "f4"), [np.ones(2, "f4")]],
        lambda rank: {"a": np.ones(2, "f4")},
        lambda rank: [],
    ],
)
def test_calls_of_the_general_path(comm: Communicator, given: Callable[[int], object]) -> None:
    for _ in range(3):
        assert comm.fast.all_reduce("SUM", given(comm.rank), None, 0) is None
        result = comm.all_reduce("SUM", given(comm.rank))
        for array in mpidist.core.nest.flatten(result):
            np.testing.assert_array_equal(array, comm.size)


@pytest.mark.min_ranks(2)
def test_replicas_use_it_and_compare_structures() -> None:
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        comm, shapes = strategy.extended.communicator, SHAPES["some"]
        context = mpidist.get_replica_context

        def step(kind: type) -> object:
            return context().all_reduce("SUM", kind(arrays_of(context().replica_id_in_sync_group, shapes)))

        for kind in (list, tuple):
            for _ in range(UNTIL_KNOWN):
                check(strategy.run(step, args=(kind,)), expected_of(comm, shapes))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(comm, "_run", None)
                check(strategy.run(step, args=(kind,)), expected_of(comm, shapes))
        with pytest.raises(MismatchError, match=r" as [(\[]\*, \*, \*[)\]]"):
            strategy.run(step, args=(list if comm.rank else tuple,))
