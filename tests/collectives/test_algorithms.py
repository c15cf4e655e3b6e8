"""Every algorithm of an all-reduce on messages of many chunks, against NumPy in float64, in whatever layout this is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist import Communicator, MismatchError
from mpidist.collectives.node import node as node_module
from mpidist.collectives.node import packing
from mpidist.collectives.node.core import SMALL_BETWEEN_NODES
from mpidist.collectives.reduce.algorithms import two_level
from mpidist.collectives.reduce.registry import SHIPPED, algorithms_at, host_names, wire_algorithms
from mpidist.core.errors import AlgorithmError
from mpidist.experimental import CommunicationOptions

pytestmark = [pytest.mark.nodes, pytest.mark.counts, pytest.mark.powers]

DTYPES = ["f4", "f8", "i4", "i8", "f2", "c8"]


def usable(comm: Communicator) -> list[str | None]:
    """The algorithms that work where these ranks are."""
    node = comm._channel.node
    works_between = {*algorithms_at("several_nodes"), *wire_algorithms.names}
    names = [name for name in host_names() if node.is_alone or name in works_between]
    return [None, *names]


def communicator(has_node_each: bool, patch: pytest.MonkeyPatch) -> Communicator:
    """One of all ranks, as the session has them on nodes, or each on a node of its own."""
    if has_node_each:
        patch.setenv("MPIDIST_RANKS_PER_NODE", "1")
    return Communicator()


def value_of(rank: int, count: int, dtype: str, seed: int) -> np.ndarray:
    values = np.random.default_rng([seed, rank]).integers(-8, 9, count)
    return (values + 1j * values[::-1]).astype(dtype) if dtype == "c8" else values.astype(dtype)


def reference(op: str, comm: Communicator, count: int, dtype: str, seed: int) -> np.ndarray:
    wide = "c16" if dtype == "c8" else "f8"
    values = [value_of(rank, count, dtype, seed).astype(wide) for rank in range(comm.size)]
    if op == "MAX":
        return np.maximum.reduce(values)
    total = np.add.reduce(values)
    return total / comm.size if op == "MEAN" else total


@settings(max_examples=30)
@given(
    counts=st.lists(st.integers(0, 3000), min_size=1, max_size=6),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(["SUM", "MEAN", "MAX"]),
    pick=st.integers(0, 20),
    slice_bytes=st.sampled_from([64, 512, 4096, 1 << 19]),
    bytes_per_pack=st.sampled_from([0, 5000]),
    own=st.lists(st.booleans(), min_size=6, max_size=6),
    uses_out=st.booleans(),
    has_node_each=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_message(
    counts: list[int],
    dtype: str,
    op: str,
    pick: int,
    slice_bytes: int,
    bytes_per_pack: int,
    own: list[bool],
    uses_out: bool,
    has_node_each: bool,
    seed: int,
) -> None:
    if dtype == "c8" and op == "MAX":
        op = "SUM"
    with pytest.MonkeyPatch.context() as patch, communicator(has_node_each, patch) as comm:
        patch.setattr(node_module, "_SLICE_BYTES", slice_bytes)
        patch.setattr(node_module, "SLICE_BYTES_BETWEEN_NODES", slice_bytes)
        patch.setattr(node_module, "_SMALLEST_SLICE_BYTES", 64)
        patch.setattr(node_module, "_SMALL_BYTES", max(slice_bytes, 1024))
        patch.setattr(two_level, "SMALLEST_SLICE_BETWEEN_NODES", 64)
        patch.setattr(packing, "SMALL_ARRAY_BYTES", 2000)
        names = usable(comm)
        options = CommunicationOptions(algorithm=names[pick % len(names)], bytes_per_pack=bytes_per_pack)
        values = []
        for index, count in enumerate(counts):
            # On some ranks only, where an index is odd.
            lies_in_shared_memory = own[index]
            array = comm.empty(count, dtype) if lies_in_shared_memory else np.empty(count, dtype)
            array = array.copy() if index % 2 and comm.rank else array
            array[:] = value_of(comm.rank, count, dtype, seed + index)
            values.append(array)
        result_dtype = np.float64 if op == "MEAN" and dtype[0] == "i" else dtype
        out = [np.empty(count, result_dtype) for count in counts] if uses_out else None
        for _ in range(2):
            got = comm.all_reduce(op, values, out=out, options=options)
            for index, (result, count) in enumerate(zip(got, counts, strict=True)):
                expected = reference(op, comm, count, dtype, seed + index)
                np.testing.assert_allclose(result, expected.astype(result_dtype), rtol=2e-3 if dtype == "f2" else 1e-6)
            assert len(set(comm.all_gather_object(b"".join(result.tobytes() for result in got)))) == 1
            del got


@pytest.mark.parametrize("has_node_each", [False, True])
@pytest.mark.parametrize("count", [1, 300_000, 1_000_003])
def test_full_sizes(count: int, has_node_each: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with communicator(has_node_each, monkeypatch) as comm:
        mine = value_of(comm.rank, count, "f4", 0)
        op = "MEAN" if count == 300_000 else "SUM"
        expected = reference(op, comm, count, "f4", 0)
        for name in usable(comm):
            got = comm.all_reduce(op, mine, options=CommunicationOptions(algorithm=name))
            np.testing.assert_allclose(got, expected, rtol=1e-6 if op == "MEAN" else 0)


@pytest.mark.parametrize("has_node_each", [False, True])
@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
def test_whole_numbers_that_do_not_fit_wrap(dtype: str, has_node_each: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with communicator(has_node_each, monkeypatch) as comm:
        large = np.full(300, np.iinfo(dtype).max - 1, dtype)
        for name in usable(comm):
            for op, combine in (("SUM", np.add), ("PROD", np.multiply), ("MAX", np.maximum)):
                expected = combine.reduce([large] * comm.size, dtype=dtype)
                options = CommunicationOptions(algorithm=name)
                np.testing.assert_array_equal(comm.all_reduce(op, large, options=options), expected)
        np.testing.assert_array_equal(
            comm.reduce_scatter("SUM", np.repeat(large, comm.size)), np.add.reduce([large] * comm.size, dtype=dtype)
        )


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("name", ["hierarchical", "pairwise", None])
def test_deterministic_sums_do_not_depend_on_what_travels_together(comm: Communicator, op: str, name: Any) -> None:
    options = CommunicationOptions(deterministic=True, algorithm=name)
    rng = np.random.default_rng(comm.rank)
    arrays = [rng.standard_normal(count).astype("f4") * 10.0 ** rng.integers(-6, 6) for count in (3, 70, 5000, 300_000)]
    alone = [comm.all_reduce(op, array, options=options) for array in arrays]
    for bytes_per_pack in (0, 1000):
        packed = CommunicationOptions(deterministic=True, algorithm=name, bytes_per_pack=bytes_per_pack)
        for order in (slice(None), slice(None, None, -1)):
            for one, other in zip(alone[order], comm.all_reduce(op, arrays[order], options=packed), strict=True):
                assert one.tobytes() == other.tobytes()
    for array, one in zip(arrays, alone, strict=True):
        reduced = comm.reduce(op, array, options=options)
        assert reduced is None or reduced.tobytes() == one.tobytes()
        mine = np.array_split(one, comm.size)[comm.rank]
        assert comm.reduce_scatter(op, array, options=options).tobytes() == mine.tobytes()
    whole = comm.all_reduce(op, np.concatenate(arrays), options=options)
    assert whole.tobytes() == b"".join(one.tobytes() for one in alone)


@pytest.mark.parametrize("has_node_each", [False, True])
def test_leaders_at_any_size(has_node_each: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_node_each:
        monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", "1")
    with Communicator(table=SHIPPED._replace(several_nodes=((4 << 20, "leaders"), (None, "mpi")))) as comm:
        most = SMALL_BETWEEN_NODES // 8
        # Again and again: the second one of a kind may go the short way.
        for count in (most, most + 1, 3 * most, 40 * most) * 3:
            values = [value_of(comm.rank, count, "f8", 0), value_of(comm.rank, 5, "f8", 1)]
            expected = [reference("SUM", comm, count, "f8", 0), reference("SUM", comm, 5, "f8", 1)]
            np.testing.assert_array_equal(comm.all_reduce("SUM", values[0]), expected[0])
            for found, wanted in zip(comm.all_reduce("SUM", values), expected, strict=True):
                np.testing.assert_array_equal(found, wanted)


def test_what_does_not_work_here_is_an_error_on_all_ranks(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    # On one rank, which the others are told.
    monkeypatch.setattr(node_module, "room_for_segments", lambda: 0 if comm.rank == comm.size - 1 else 1 << 40)
    if comm.size > 1 and comm._channel.node.has_neighbours:
        with pytest.raises(AlgorithmError, match="'hierarchical'.*omit algorithm"):
            comm.all_reduce("SUM", np.ones(100), options=CommunicationOptions(algorithm="hierarchical"))
    np.testing.assert_array_equal(comm.all_reduce("SUM", np.ones(10_000)), comm.size)


@pytest.mark.parametrize("option", [{"wire_dtype": "float16"}, {"deterministic": True}])
def test_options_that_do_not_go_together(comm: Communicator, option: dict[str, Any]) -> None:
    for name in ("mpi", "ring"):
        with pytest.raises(ValueError, match=f"does not support algorithm='{name}'"):
            comm.all_reduce("SUM", np.ones(100), options=CommunicationOptions(algorithm=name, **option))


@pytest.mark.parametrize("wire_dtype", ["float16", "bfloat16"])
def test_a_16_bit_wire_rounds_once_each_way(comm: Communicator, wire_dtype: str) -> None:
    options = CommunicationOptions(wire_dtype=wire_dtype)
    values = [np.random.default_rng(rank).uniform(1, 2, 400_000).astype("f4") for rank in range(comm.size)]
    got = comm.all_reduce("SUM", values[comm.rank], options=options)
    bound = 2.0 ** -(11 if wire_dtype == "float16" else 8)
    assert np.max(np.abs(got / np.add.reduce(values) - 1)) <= 2.1 * bound
    assert len(set(comm.all_gather_object(got.tobytes()))) == 1
    doubles = comm.all_reduce("SUM", values[comm.rank].astype("f8"), options=options)
    np.testing.assert_allclose(doubles, np.add.reduce([value.astype("f8") for value in values]), rtol=1e-15)
    np.testing.assert_array_equal(comm.all_reduce("MAX", values[comm.rank], options=options), np.maximum.reduce(values))


def test_error_feedback_makes_good_what_rounding_loses(comm: Communicator) -> None:
    count, steps = 50_000, 40
    value = np.random.default_rng(comm.rank).uniform(1, 2, count).astype("f4")
    exact = steps * comm.all_reduce("SUM", value.astype("f8"))
    errors = []
    for feedback in (False, True):
        options = CommunicationOptions(wire_dtype="bfloat16", error_feedback=feedback)
        total = np.zeros(count)
        for _ in range(steps):
            total += comm.all_reduce("SUM", value, options=options)
        errors.append(np.abs(total - exact).max())
    if comm._channel.node.is_alone:
        assert errors == [errors[0]] * 2
    else:
        assert errors[1] < errors[0] / 5


def test_every_way_between_nodes_has_a_name() -> None:
    assert set(wire_algorithms.names) <= set(host_names())


@pytest.mark.min_ranks(2)
def test_numbers_are_right_after_a_mismatch_in_every_algorithm(comm: Communicator) -> None:
    mine = np.full(1000, comm.rank + 1.0)
    total = sum(range(1, comm.size + 1))
    for name in usable(comm):
        options = CommunicationOptions(algorithm=name)
        for others_call in (comm.barrier, lambda: comm.all_reduce("MAX", np.ones(700)), lambda: comm.broadcast(1.0)):
            np.testing.assert_array_equal(comm.all_reduce("SUM", mine, options=options), total)
            with pytest.raises(MismatchError):
                if comm.rank == 0:
                    comm.all_reduce("SUM", mine, options=options)
                else:
                    others_call()
            for step in range(3):
                result = comm.all_reduce("SUM", mine * 10**step, options=options)
                np.testing.assert_array_equal(result, total * 10**step)


def test_error_feedback_forgets_what_overflowed(comm: Communicator) -> None:
    options = CommunicationOptions(wire_dtype="float16", error_feedback=True)
    value = np.ones(1000, "f4")
    for bad in (np.inf, 1e30):
        value[7] = bad
        with np.errstate(all="ignore"):
            comm.all_reduce("SUM", value, options=options)
        value[7] = 1.0
        np.testing.assert_array_equal(comm.all_reduce("SUM", value, options=options)[[6, 7]], comm.size)
    doubles = value.astype("f8")
    doubles[7] = np.inf
    comm.all_reduce("SUM", doubles, options=options)
    assert np.isfinite(comm.all_reduce("SUM", value.astype("f8"), options=options)).all()


def test_without_room_a_16_bit_wire_is_an_error_on_all_ranks(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm._channel.node.is_alone:
        pytest.skip("there is one node, so nothing crosses a wire")
    if not comm._channel.node.has_neighbours:
        pytest.skip("a rank that is alone on its node needs no room")
    monkeypatch.setattr(node_module, "_SMALLEST_SLICE_BYTES", 1 << 60)
    with pytest.raises(AlgorithmError, match="no room in /dev/shm"):
        comm.all_reduce("SUM", np.ones(1000, "f4"), options=CommunicationOptions(wire_dtype="float16"))
    np.testing.assert_array_equal(comm.all_reduce("SUM", np.ones(10_000)), comm.size)
