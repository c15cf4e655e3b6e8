"""Agreed steps: all ranks act after the same step."""

from __future__ import annotations

import random
import threading
import time

import pytest

from mpidist.collectives import Communicator
from mpidist.collectives.step_agreement import StepAgreement

pytestmark = [pytest.mark.nodes, pytest.mark.counts]


@pytest.mark.one_rank
def test_a_single_process_agrees_with_itself() -> None:
    agreement = StepAgreement(None)
    assert agreement.step_done() == []
    agreement.ask_for("a save")
    agreement.ask_for("a save")
    assert agreement.step_done() == ["a save"]
    assert agreement.step_done() == []
    assert agreement.steps == 3
    agreement.close()


@pytest.mark.parametrize("asker", ["first", "last", "all"])
@pytest.mark.parametrize("together", [True, False], ids=["steps with collectives", "steps of each rank alone"])
def test_all_ranks_get_the_same_step(asker: str, together: bool) -> None:
    with Communicator() as comm:
        agreement = comm.step_agreement()
        pace = random.Random(comm.rank)
        asks = {"first": comm.rank == 0, "last": comm.rank == comm.size - 1, "all": True}[asker]
        request = threading.Timer(0.05 * (1 + comm.rank), agreement.ask_for, ("a save",))
        if asks:
            request.start()
        found = None
        # Every rank must reach the agreed step, so none stops before.
        while found is None:
            time.sleep(0.002 * pace.random())
            if together:
                comm.barrier()
            if agreement.step_done():
                found = agreement.steps
        request.cancel()
        assert len(set(comm.all_gather_object(found))) == 1
        assert agreement.step_done() == []
        agreement.close()


def test_two_acts_are_kept_apart() -> None:
    with Communicator() as comm:
        agreement = comm.step_agreement()
        found: list[tuple[int, str]] = []
        if comm.rank == comm.size - 1:
            agreement.ask_for("first")
        while len(found) < 2:
            comm.barrier()
            due = agreement.step_done()
            found += [(agreement.steps, act) for act in due]
            if due == ["first"] and comm.rank == 0:
                agreement.ask_for("second")
        assert [act for _, act in found] == ["first", "second"]
        assert len(set(comm.all_gather_object(tuple(found)))) == 1
        agreement.close()
