"""Sums of floating point: on a node in rank order and in the dtype of the arrays, between nodes by their order."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpidist
from mpidist.core.settings import RANKS_PER_NODE
from mpidist.experimental import CommunicationOptions
from tests.support.ranks.cores import needs_core, sums
from tests.support.ranks.layouts import per_replica

pytestmark = [pytest.mark.nodes, pytest.mark.counts]

SIZE = MPI.COMM_WORLD.Get_size()
# With the meeting, on its page or in a slot, and in chunks; between nodes with the handshake and after it.
COUNTS = (1, 2, 7, 15, 16, 24, 25, 256, 257, 5_000, 700_001)
FORMED = {"float16": "float32", "float32": "float32", "float64": "float64"}
DETERMINISTIC = CommunicationOptions(deterministic=True)


def inputs(count: int, dtype: str) -> list[np.ndarray]:
    """Return the input of each rank. The last bits of sums depend on their order."""
    random = np.random.default_rng(count)
    return [random.standard_normal(count).astype(dtype) * 10.0**rank for rank in range(SIZE)]


def in_order(arrays: list[np.ndarray], formed: str) -> np.ndarray:
    return reduce(np.add, [array.astype(formed) for array in arrays])


@pytest.mark.parametrize("dtype", FORMED)
def test_the_order_is_by_rank_and_node(comm: Any, dtype: str) -> None:
    topology = comm._channel.node.topology
    nodes = [[r for r in range(SIZE) if topology.node_of_rank[r] == n] for n in range(topology.num_nodes)]
    options = None if topology.num_nodes == 1 else DETERMINISTIC
    for count in COUNTS:
        given = inputs(count, dtype)
        sums = [in_order([given[rank] for rank in node], FORMED[dtype]) for node in nodes]
        total = in_order(sums, FORMED[dtype])
        mine = given[comm.rank]
        for op, expected in (("SUM", total), ("MEAN", total / np.array(SIZE, FORMED[dtype]))):
            found = comm.all_reduce(op, mine, options=options)
            np.testing.assert_array_equal(found, expected.astype(dtype), strict=True)
            beside = comm.all_reduce(op, [np.ones(3, "int8"), mine, np.ones(300, dtype), np.ones(2)], options=options)
            np.testing.assert_array_equal(beside[1], found)


def test_local_replicas_are_summed_like_ranks() -> None:
    given = inputs(100, "float32")
    with mpidist.MirroredStrategy([f"cpu:{i}" for i in range(SIZE)], communicator=MPI.COMM_SELF) as strategy:
        total = strategy.reduce("SUM", per_replica(strategy, lambda i: given[i]), axis=None)
    np.testing.assert_array_equal(total, in_order(given, "float32"), strict=True)


@needs_core
@pytest.mark.skipif(RANKS_PER_NODE.read() is not None, reason="between nodes sums are equal to rounding")
@pytest.mark.parametrize("dtype", FORMED)
@pytest.mark.parametrize("count", [1, 30, 5_000, 300_001])
def test_replicas_of_ranks_are_summed_in_order(count: int, dtype: str) -> None:
    """Each rank has two: its own sum would be another order."""
    random = np.random.default_rng(count)
    given = [random.standard_normal(count).astype(dtype) * 10.0 ** (k % 4) for k in range(2 * SIZE)]
    with mpidist.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        for op, divisor in (("SUM", 1), ("MEAN", 2 * SIZE)):
            found = strategy.reduce(op, per_replica(strategy, lambda i: given[i]), axis=None)
            expected = in_order(given, FORMED[dtype]) / np.array(divisor, FORMED[dtype])
            np.testing.assert_array_equal(found, expected.astype(dtype), strict=True)


@needs_core
@pytest.mark.one_rank
@pytest.mark.parametrize("ranks", [2, 3, 8, 9, 64, 200])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 256, 5_000])
def test_many_ranks_are_added_in_order(ranks: int, count: int) -> None:
    given = list(np.random.default_rng(ranks).standard_normal((ranks, count)).astype("float32"))
    for found in sums(given):
        np.testing.assert_array_equal(found, reduce(np.add, given), strict=True)
