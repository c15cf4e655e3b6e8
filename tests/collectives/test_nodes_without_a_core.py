"""Where one rank cannot use the native core, no rank does, and all say why."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from mpidist import Communicator
from mpidist.collectives.node import memory, native
from mpidist.collectives.node import node as node_module
from mpidist.core.settings import NATIVE
from mpidist.topology import world_topology

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.min_ranks(2),
    pytest.mark.skipif(not NATIVE.read(), reason="there is no core at all"),
]


def no_functions() -> list[int]:
    raise OSError("undefined symbol: MPI_Test")


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was said before."""
    monkeypatch.setattr(node_module, "_said", set())


@pytest.mark.usefixtures("forgotten")
def test_a_leader_that_cannot_call_mpi(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    world = world_topology()
    last = world.ranks_of_node[-1][0]
    if world.rank == last:
        monkeypatch.setattr(native, "mpi_functions", no_functions)
    with caplog.at_level(logging.WARNING, "mpidist"), Communicator() as comm:
        node = comm._channel.node
        assert (node.core is None) == (world.num_nodes > 1)
        assert node.size == (1 if world.num_nodes > 1 else comm.size)
        for count in (1, 1 << 16):
            assert (comm.all_reduce("SUM", np.ones(count)) == comm.size).all()
        comm.barrier()
    said = [message for message in caplog.messages if "undefined symbol: MPI_Test" in message]
    assert len(said) == (world.num_nodes > 1 and world.rank == 0)


@pytest.mark.usefixtures("forgotten")
def test_a_node_without_room(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    world = world_topology()
    if world.rank == 0:
        monkeypatch.setattr(memory, "free_bytes", lambda: 0)
    with caplog.at_level(logging.WARNING, "mpidist"), Communicator() as comm:
        assert comm._channel.node.size == 1
        assert comm._channel.node.core is not None
        assert comm.all_reduce("SUM", 1) == comm.size
    # A rank that is alone on its node needs none.
    expected = world.rank == 0 and world.local_size > 1
    assert len([message for message in caplog.messages if "has no room for" in message]) == expected


@pytest.mark.usefixtures("forgotten")
def test_neither_mpi_nor_room(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every rank would be a leader then.
    world = world_topology()
    if world.rank == 0:
        monkeypatch.setattr(memory, "free_bytes", lambda: 0)
    if world.rank == world.size - 1:
        monkeypatch.setattr(native, "mpi_functions", no_functions)
    with Communicator() as comm:
        assert comm._channel.node.core is None
        assert comm.all_reduce("SUM", 1) == comm.size
