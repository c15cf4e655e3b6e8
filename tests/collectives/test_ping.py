"""The latency between the cores of two ranks, which benchmarks and algorithms ask for."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from mpidist.collectives.node.node import Node
from mpidist.topology import cores_are_short

pytestmark = [pytest.mark.nodes, pytest.mark.counts]


@pytest.mark.min_ranks(2)
def test_latency_between_neighbours() -> None:
    node = Node(MPI.COMM_WORLD)
    if node.core is None or node.size % 2:
        node.close()
        pytest.skip("needs the native core, and an even number of ranks on the node")
    for _ in range(20):
        nanoseconds = node.core.ping(node.rank ^ 1)
        assert 0 <= nanoseconds < 10_000_000
    # One rank does not come: the other one returns, and later pings work.
    if node.rank % 2 == 0:
        assert node.core.ping(node.rank ^ 1, limit_seconds=0.001) == 0
    MPI.COMM_WORLD.Barrier()
    if node.rank % 2:
        node.core.ping(node.rank ^ 1)
    MPI.COMM_WORLD.Barrier()
    found = [node.core.ping(node.rank ^ 1) for _ in range(20)]
    if not cores_are_short():
        assert max(found) > 0
    assert node.core.ping(node.size) == 0
    node.close()
