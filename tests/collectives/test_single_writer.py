"""SingleWriter: memory of all ranks, written in turns."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import mpidist
from mpidist.collectives.single_writer import SingleWriter
from mpidist.topology import world_topology
from tests.support.ranks.cores import needs_core

pytestmark = [pytest.mark.nodes, pytest.mark.counts, pytest.mark.min_ranks(2), needs_core]


@pytest.fixture
def comm() -> Iterator[mpidist.Communicator]:
    if world_topology().num_nodes > 1:
        pytest.skip("the ranks of this session are on several nodes")
    with mpidist.Communicator() as made:
        yield made


def test_all_see_what_the_first_rank_writes(comm: mpidist.Communicator) -> None:
    writer = SingleWriter(comm)
    shared = writer.shared_copy(np.full((2, 3), comm.rank + 5.0), "a test's array")
    assert shared.tolist() == [[5.0] * 3] * 2
    for step in range(20):
        with writer.write_block("a step") as writes:
            assert writes == (comm.rank == 0)
            with writer.write_block("a part of the step") as writes_part:
                assert writes_part == writes
            if writes:
                shared[:] = step
        assert shared.tolist() == [[float(step)] * 3] * 2
    assert [writer.next_number() for _ in range(3)] == [0, 1, 2]


def test_errors_in_a_turn_and_before_it(comm: mpidist.Communicator) -> None:
    writer = SingleWriter(comm)
    with pytest.raises(KeyError if comm.rank == 0 else mpidist.PeerError), writer.write_block("a turn") as writes:
        if writes:
            raise KeyError
    with pytest.raises(KeyError if comm.rank == 1 else mpidist.PeerError):
        with writer.shared_errors("what comes before"):
            if comm.rank == 1:
                raise KeyError
        with writer.write_block("a turn"):
            pass
    text = "a turn" if comm.rank else "another turn"
    with pytest.raises(mpidist.MismatchError, match="another turn"), writer.write_block(text):
        pass
    with writer.write_block("all are here"):
        pass


def test_no_memory(comm: mpidist.Communicator) -> None:
    with pytest.raises(MemoryError, match="too much: /dev/shm has no room for"):
        SingleWriter(comm).shared_copy(np.broadcast_to(np.zeros(()), (1 << 40,)), "too much")
