"""checkpoint_interval="auto": as many steps as Young and Daly say, the same on all ranks, by the first rank's clock."""

from __future__ import annotations

import math
import random
import threading
from pathlib import Path
from typing import Any

import pytest

import mpidist
from mpidist import Checkpoint, CheckpointManager
from mpidist.checkpoint import formats, interval
from mpidist.checkpoint.interval import FIRST_STEPS, daly_interval
from mpidist.topology import world_topology

HOUR, DAY = 3600.0, 86400.0


class Clock:
    """A clock that goes on only where the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return a clock that a save takes 30 s of."""
    made_up, write = Clock(), formats.write_tensors

    def slow(path: Path, tensors: Any) -> Any:
        made_up.now += 30.0
        return write(path, tensors)

    monkeypatch.setattr(interval, "clock", made_up)
    monkeypatch.setattr(formats, "write_tensors", slow)
    return made_up


def new_manager(strategy: mpidist.Strategy, folder: Path, **options: Any) -> CheckpointManager:
    with strategy.scope():
        checkpoint = Checkpoint(v=mpidist.Variable([1.0, 2.0]), step=0)
    return CheckpointManager(
        checkpoint, folder, 1, step_counter=lambda: checkpoint.step, checkpoint_interval="auto", **options
    )


def saved_after(manager: CheckpointManager, steps: range, clock: Clock, step_seconds: float) -> list[int]:
    """Return the steps after which a manager saves."""
    saved = []
    for manager.checkpoint.step in steps:
        clock.now += step_seconds
        if manager.save() is not None:
            saved.append(manager.checkpoint.step)
    return saved


def test_all_ranks_save_after_the_steps_that_the_first_ranks_clock_tells(
    strategy: mpidist.Strategy, clock: Clock, tmp_path: Path
) -> None:
    manager = new_manager(strategy, tmp_path, mtbf=DAY)
    is_first = strategy.extended.should_checkpoint
    # The clocks of the others are no one's business.
    step_seconds = 20.0 if is_first else random.uniform(0.001, 5.0)
    expected = round(daly_interval(30.0, DAY / world_topology().num_nodes) / 20.0)
    assert expected > 2 * FIRST_STEPS
    second, third = 1 + FIRST_STEPS, 1 + FIRST_STEPS + expected
    assert saved_after(manager, range(1, third + 1), clock, step_seconds) == [1, second, third]
    assert manager.checkpoint_interval == expected
    # Steps that take four times as long: a quarter of the steps, from the next save on.
    fourth = third + expected
    step_seconds *= 4
    assert saved_after(manager, range(third + 1, fourth + 1), clock, step_seconds) == [fourth]
    assert manager.checkpoint_interval == round(daly_interval(30.0, DAY / world_topology().num_nodes) / 80.0)


def test_every_rank_could_go_on_as_the_first(strategy: mpidist.Strategy, clock: Clock, tmp_path: Path) -> None:
    clock.now = 1e9
    manager = new_manager(strategy, tmp_path, mtbf=DAY)
    saved_after(manager, range(1, 2 + FIRST_STEPS), clock, 20.0)
    pace = manager._pace
    assert pace is not None
    clock.now += 20.0
    assert pace.begin(2 + FIRST_STEPS) <= round(daly_interval(30.0, DAY / world_topology().num_nodes) / 20.0)


def test_a_restarted_program_measures_anew(strategy: mpidist.Strategy, clock: Clock, tmp_path: Path) -> None:
    manager = new_manager(strategy, tmp_path)
    last = saved_after(manager, range(1, 30), clock, 60.0)[-1]
    again = new_manager(strategy, tmp_path)
    again.restore_or_initialize()
    assert again.checkpoint.step == last
    assert again.checkpoint_interval == FIRST_STEPS
    assert saved_after(again, range(last + 1, last + FIRST_STEPS + 2), clock, 60.0) == [last + FIRST_STEPS]


@pytest.mark.one_rank
def test_a_thread_that_writes_costs_what_it_holds_up(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, go = formats.write_tensors, threading.Event()
    monkeypatch.setattr(formats, "write_tensors", lambda *args: go.wait(30) and write(*args))
    manager = new_manager(mpidist.get_strategy(), tmp_path, async_save=True, mtbf=DAY)
    assert manager.save() is not None
    go.set()
    manager.wait()
    manager.checkpoint.step = 5
    clock.now += 5.0
    assert manager.save(check_interval=False) is not None
    # The writing itself was beside the program: nothing to wait for, and so a save whenever one likes.
    assert manager.checkpoint_interval == 1
    manager.wait()


@pytest.mark.one_rank
def test_the_setting_of_the_machine_counts(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDIST_NODE_MTBF_DAYS", "0.25")
    manager = new_manager(mpidist.get_strategy(), tmp_path)
    saved_after(manager, range(1, 2 + FIRST_STEPS), clock, 1.0)
    assert manager.checkpoint_interval == round(daly_interval(30.0, DAY / 4))


@pytest.mark.one_rank
@pytest.mark.parametrize("save", [1.0, 30.0, 300.0, 1800.0])
@pytest.mark.parametrize("mtbf", [HOUR, DAY, 100 * DAY])
def test_no_other_interval_loses_much_less(save: float, mtbf: float) -> None:
    def seconds_for_a_second(between: float) -> float:
        """Daly's whole model: what a second of work takes, restarts left out."""
        return mtbf * math.expm1((between + save) / mtbf) / between

    best = min(seconds_for_a_second(mtbf * 10 ** (exponent / 100)) for exponent in range(-500, 100))
    assert seconds_for_a_second(daly_interval(save, mtbf)) <= 1.002 * best
    assert daly_interval(3 * mtbf, mtbf) == mtbf
