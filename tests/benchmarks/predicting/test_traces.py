"""Traces hold what the library's ways between nodes send, and SimGrid replays them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.predicting import simgrid
from benchmarks.predicting.recording import Slices, on_all_rails, rail_schedule, slices_of
from benchmarks.predicting.trace import (
    Compute,
    Receive,
    Send,
    Sleep,
    WaitAll,
    bytes_sent,
    lines_of,
    schedule_of,
    unmatched,
)
from mpidist.collectives.reduce.cost_model import SHIPPED_NETWORK, handshake_seconds, hierarchical_seconds
from mpidist.collectives.reduce.registry import wire_algorithms

pytestmark = pytest.mark.one_rank

KIB = 1 << 10
WAYS = sorted(wire_algorithms.costs)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize(("nodes", "rails", "number"), [(2, 1, 1), (5, 2, 3), (8, 2, 20)])
def test_every_message_of_a_trace_arrives(name: str, nodes: int, rails: int, number: int) -> None:
    slices = Slices(number, 4 * KIB)
    schedule = on_all_rails(rail_schedule(name, nodes, rails, slices, SHIPPED_NETWORK), slices.lanes, rails)
    assert len(schedule) == nodes * rails * slices.lanes
    assert unmatched(schedule) == []
    # What waits for no message of another node is none of the wire's.
    per_node = rails * slices.lanes
    for rank, actions in enumerate(schedule):
        assert all(each.to // per_node != rank // per_node for each in actions if isinstance(each, Send))
    # The node that sends most sends what the way says that it costs.
    cost = sum(each.times * each.elements for each in wire_algorithms.costs[name](nodes, slices.nbytes))
    assert max(bytes_sent(schedule, nodes)) == pytest.approx(rails * number * cost, rel=0.01)


def test_a_trace_comes_back_as_it_was() -> None:
    schedule = on_all_rails(rail_schedule("ring", 3, 2, Slices(2, KIB), SHIPPED_NETWORK), 2, 2)
    again = schedule_of(lines_of(schedule))
    assert unmatched(again) == []
    assert bytes_sent(again, 3) == bytes_sent(schedule, 3)
    for before, after in zip(schedule, again, strict=True):
        for one, other in zip(before, after, strict=True):
            assert one == (pytest.approx(other) if isinstance(one, (Compute, Sleep)) else other)


def test_messages_without_an_other_end_are_found() -> None:
    assert unmatched([[Send(1, 0, 8)], [Receive(0, 0, 9)]]) == [
        "sent only: 8 bytes from 0 to 1, tag 0",
        "received only: 9 bytes from 0 to 1, tag 0",
    ]


def test_a_message_without_bytes_has_one_for_simgrid() -> None:
    # A size of 0 would make a receiver wait where it only says that it is ready.
    lines = list(lines_of([[Send(1, 7, 0), WaitAll()], [Receive(0, 7, 0), WaitAll()]]))
    assert lines[1] == "0 isend 1 7 1"
    assert lines[5] == "1 irecv 0 7 1"


def replayed(folder: Path, name: str, nodes: int, rails: int, nbytes: int, slice_bytes: int) -> tuple[float, float]:
    """Return what SimGrid and the model say."""
    slices = slices_of(nbytes, rails, slice_bytes)
    schedule = on_all_rails(rail_schedule(name, nodes, rails, slices, SHIPPED_NETWORK), slices.lanes, rails)
    network = SHIPPED_NETWORK
    command = simgrid.write(folder, schedule, nodes, rails, latency=network.latency, bandwidth=network.bandwidth)
    cost = wire_algorithms.costs[name]
    modelled = hierarchical_seconds(cost, nodes, rails, nbytes, slice_bytes, network)
    return simgrid.replay(command, 60), modelled - handshake_seconds(nodes, network)


@pytest.mark.jobs
@pytest.mark.skipif(simgrid.problem() is not None, reason=str(simgrid.problem()))
class TestReplay:
    @pytest.mark.parametrize("name", WAYS)
    @pytest.mark.parametrize("nodes", [2, 4, 7])
    def test_one_slice_takes_as_long_as_the_model_says(self, name: str, nodes: int, tmp_path: Path) -> None:
        simulated, modelled = replayed(tmp_path, name, nodes, 2, 512 * KIB, 1 << 20)
        assert modelled == pytest.approx(simulated, rel=0.05)

    @pytest.mark.parametrize("name", WAYS)
    def test_so_do_many(self, name: str, tmp_path: Path) -> None:
        simulated, modelled = replayed(tmp_path, name, 6, 4, 16 << 20, 256 * KIB)
        assert modelled == pytest.approx(simulated, rel=0.2)

    def test_what_does_not_end_is_told(self, tmp_path: Path) -> None:
        schedule = [[Receive(1, 0, 8), WaitAll()], []]
        command = simgrid.write(tmp_path, schedule, 2, 1, latency=1e-6, bandwidth=1e9)
        with pytest.raises(SystemExit, match="Deadlock"):
            simgrid.replay(command, 60)
