"""Inter-node algorithms on 2 to 33 nodes in one process: results, and messages as their cost functions predict."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.measuring.in_memory import InMemory, flattened
from mpidist.arrays.dtypes import Array, as_dtype
from mpidist.collectives.mpi.mpi_types import NUMPY_OPS
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.reduce import algorithms  # noqa: F401  # registers the algorithms
from mpidist.collectives.reduce.registry import Wire, wire_algorithms
from mpidist.core.options import ReduceOp

pytestmark = pytest.mark.one_rank

WAYS = wire_algorithms.names
# Powers of two and not, and next to them.
SEVERAL = [2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33]


def ways(name: str, world: InMemory, *rounding: object) -> list[Wire]:
    ranks = list(range(world.size))
    return [wire_algorithms[name].make(comm, ranks, rank, *rounding) for rank, comm in enumerate(world.comms())]


def values_of(world: InMemory, count: int, dtype: str = "i8") -> list[Array]:
    return [np.random.default_rng([count, rank]).integers(-9, 10, count).astype(dtype) for rank in range(world.size)]


def reduced(
    name: str, world: InMemory, values: Sequence[Array], op: ReduceOp = ReduceOp.SUM, in_place: bool = True
) -> list[Array]:
    """Reduce over a rail, without writing to the values unless they are the results."""
    flats = list(values) if in_place else [np.empty_like(value) for value in values]
    sources = [value if in_place else value.copy() for value in values]
    made = zip(ways(name, world), sources, flats, strict=True)
    world.run([way.all_reduce(source, flat, op, 0, None) for way, source, flat in made])
    assert in_place or all((source == value).all() for source, value in zip(sources, values, strict=True))
    return flats


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("nodes", SEVERAL)
def test_sums_and_costs_are_right(name: str, nodes: int) -> None:
    cost = wire_algorithms.costs[name]
    for count in (0, 1, nodes - 1, nodes, nodes + 1, 5 * nodes + 3):
        world = InMemory(nodes)
        values = values_of(world, count)
        expected = np.add.reduce(values)
        for result in reduced(name, world, values, in_place=count % 2 == 0):
            np.testing.assert_array_equal(result, expected)
        assert world.rounds(itemsize=8) == flattened(cost(nodes, count))


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("op", list(ReduceOp))
def test_every_operation(name: str, op: ReduceOp) -> None:
    for nodes in (3, 4, 7):
        world = InMemory(nodes)
        dtypes = ["i2", "?"] if op.is_bitwise else ["i2", "f4", "f8", "c8"]
        for dtype in dtypes:
            if dtype == "c8" and op in (ReduceOp.MIN, ReduceOp.MAX):
                continue
            values = values_of(world, 4 * nodes + 1, dtype)
            expected = NUMPY_OPS[op].reduce(values)
            for result in reduced(name, world, values, op, in_place=False):
                np.testing.assert_allclose(result, expected.astype(dtype), rtol=1e-5)


@pytest.mark.parametrize("name", WAYS)
def test_nan_reaches_every_node(name: str) -> None:
    for op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.SUM):
        world = InMemory(6)
        values = values_of(world, 20, "f4")
        values[4][13] = np.nan
        for result in reduced(name, world, values, op):
            assert np.isnan(result).nonzero()[0].tolist() == [13]


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("nodes", [3, 8, 13])
def test_all_nodes_have_the_same_bits(name: str, nodes: int) -> None:
    world = InMemory(nodes)
    values = [np.random.default_rng(rank).standard_normal(101).astype("f4") for rank in range(nodes)]
    results = reduced(name, world, values)
    assert len({result.tobytes() for result in results}) == 1


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("nodes", [2, 5, 6, 16])
def test_several_slices_are_on_their_way_at_once(name: str, nodes: int) -> None:
    world = InMemory(nodes)
    slices = [values_of(world, count) for count in (10, 3, 100, 0, 41)]
    expected = [np.add.reduce(values) for values in slices]

    def together(way: Wire, rank: int) -> Steps[None]:
        flats = [values[rank] for values in slices]
        left = [way.all_reduce(flat, flat, ReduceOp.SUM, chunk, None) for chunk, flat in enumerate(flats)]
        while left:
            left = [steps for steps in left if next(steps, left) is not left]
            yield

    world.run([together(way, rank) for rank, way in enumerate(ways(name, world))])
    for values, total in zip(slices, expected, strict=True):
        for value in values:
            np.testing.assert_array_equal(value, total)


@pytest.mark.parametrize("wire_dtype", ["float16", "bfloat16"])
def test_a_16_bit_wire_rounds_once_each_way(wire_dtype: str) -> None:
    for name in [name for name in WAYS if wire_algorithms[name].rounds]:
        world = InMemory(7)
        values = [np.random.default_rng(rank).uniform(1, 2, 70).astype("f4") for rank in range(world.size)]
        flats = [value.copy() for value in values]
        made = zip(ways(name, world, as_dtype(wire_dtype)), flats, strict=True)
        world.run([way.all_reduce(flat, flat, ReduceOp.SUM, 0, None) for way, flat in made])
        bound = 2.0 ** -(11 if wire_dtype == "float16" else 8)
        assert np.max(np.abs(flats[0] / np.add.reduce(values) - 1)) <= 2.1 * bound
        assert len({flat.tobytes() for flat in flats}) == 1
        sent = [(messages, elements) for messages, elements, _ in world.rounds(itemsize=2)]
        assert sent == [(r.messages, r.elements) for r in wire_algorithms.costs[name](world.size, 70)]
