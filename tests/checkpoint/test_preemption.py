"""Preemption: signals on any rank, what the handler does, and jobs that are ended and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import mpidist
from mpidist.checkpoint import preemption
from mpidist.checkpoint.preemption import TerminationWatch
from mpidist.experimental import PreemptionCheckpointHandler, TerminationConfig
from tests.support.ranks.jobs import run_script
from tests.support.speed import scaled

pytestmark = pytest.mark.one_rank


def checkpoint_of(step: int = 0) -> mpidist.Checkpoint:
    return mpidist.Checkpoint(step=step)


def count_up(checkpoint: mpidist.Checkpoint) -> None:
    checkpoint.step += 1


def test_a_signal_saves_after_the_step_and_exits(tmp_path: Path) -> None:
    checkpoint = checkpoint_of()

    def step() -> None:
        count_up(checkpoint)
        if checkpoint.step == 3:
            os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(SystemExit) as ended, PreemptionCheckpointHandler(None, checkpoint, tmp_path) as handler:
        for _ in range(100):
            handler.run(step)
            time.sleep(0.01)
    assert ended.value.code == 42
    assert signal.getsignal(signal.SIGUSR1) is before
    stopped = checkpoint.step
    assert 3 <= stopped < 10
    again = checkpoint_of()
    with PreemptionCheckpointHandler(None, again, tmp_path) as handler:
        assert again.step == stopped == handler.total_run_calls
        assert handler.run(lambda a, b: a + b, 1, b=2) == 3
        assert handler.total_run_calls == stopped + 1
    handler.close()
    with pytest.raises(RuntimeError, match="has been closed"):
        handler.run(step)


def test_a_signal_comes_while_python_waits_in_a_call(tmp_path: Path) -> None:
    """A thread hears of it, since Python's own handlers run only between two lines of the main thread."""
    heard = threading.Event()
    handler = PreemptionCheckpointHandler(None, checkpoint_of(), tmp_path)
    ask_for = handler._agreement.ask_for

    def note(what: str) -> None:
        ask_for(what)
        heard.set()

    handler._agreement.ask_for = note  # type: ignore[method-assign]
    lock = threading.Lock()
    lock.acquire()
    killer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))
    killer.start()
    assert heard.wait(10)
    with pytest.raises(SystemExit):
        handler.run(lambda: None)
    handler.close()


def test_grace_saves_at_once_and_once_more(tmp_path: Path) -> None:
    checkpoint = checkpoint_of()
    saved: list[int] = []
    ends: list[int] = []
    config = TerminationConfig(
        grace_period=1.0, save_fn=lambda: saved.append(checkpoint.step), exit_fn=lambda: ends.append(checkpoint.step)
    )
    with PreemptionCheckpointHandler(None, checkpoint, tmp_path, config) as handler:
        start = time.monotonic()
        while not ends:
            handler.run(lambda: (count_up(checkpoint), time.sleep(0.02)))
            if checkpoint.step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
        seconds = time.monotonic() - start
    assert len(saved) == 2
    assert 5 <= saved[0] <= 10
    assert ends == saved[1:]
    assert seconds < 2.0


def test_a_watcher_function_instead_of_signals(tmp_path: Path) -> None:
    asked = []

    def preempted() -> bool:
        asked.append(1)
        return len(asked) >= 2

    checkpoint = checkpoint_of()
    config = TerminationConfig(preempted, exit_fn=lambda: None)
    manager = mpidist.CheckpointManager(checkpoint, tmp_path, max_to_keep=3)
    with (
        PreemptionCheckpointHandler(None, manager, termination_config=config) as handler,
        handler.watch_preemption_scope(),
    ):
        limit = time.monotonic() + scaled(20)
        while manager.latest_checkpoint is None and time.monotonic() < limit:
            time.sleep(0.02)
            handler.save_checkpoint_if_preempted()
    assert len(manager.checkpoints) == 1


def test_an_error_of_the_watcher_function_is_raised_in_the_program(tmp_path: Path) -> None:
    def broken() -> bool:
        raise OSError("the metadata server is gone")

    config = TerminationConfig(broken)
    with (
        pytest.raises(OSError, match="metadata server"),
        PreemptionCheckpointHandler(None, checkpoint_of(), tmp_path, config) as handler,
    ):
        limit = time.monotonic() + scaled(20)
        while time.monotonic() < limit:
            handler.run(lambda: time.sleep(0.02))


def test_a_watcher_function_that_does_not_return_is_left_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go = threading.Event(), threading.Event()

    def stuck() -> bool:
        asked.set()
        return go.wait(30)

    monkeypatch.setattr(preemption, "_CLOSE_SECONDS", 0.1)
    handler = PreemptionCheckpointHandler(None, checkpoint_of(), tmp_path, TerminationConfig(stuck))
    assert handler._watch is not None
    thread = handler._watch._thread
    assert asked.wait(10)
    handler.close()
    assert "stuck() has not returned" in caplog.text
    go.set()
    thread.join(10)
    assert not thread.is_alive()
    assert handler._reason is None


def test_signals_that_cannot_be_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: list[tuple[Any, type[Exception]]] = [
        ("USR1", TypeError),
        (["SIGUSR1"], TypeError),
        (5, TypeError),
        ([True], TypeError),
        ([9], ValueError),
        ([1000], ValueError),
    ]
    for signals, kind in wrong:
        with pytest.raises(kind, match=r"signals .*expected signal numbers, such as signals=\[signal.SIGUSR1\]"):
            TerminationConfig(signals=signals)
    with pytest.raises(TypeError, match="grace_period is '60'; expected a number of seconds"):
        TerminationConfig(grace_period="60")  # type: ignore[arg-type]
    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)]
    take, files = signal.signal, os.listdir("/proc/self/fd")

    def refuses(number: int, handler: Any) -> Any:
        if number == signal.SIGUSR2:
            raise OSError(22, "Invalid argument")
        return take(number, handler)

    monkeypatch.setattr(signal, "signal", refuses)
    with pytest.raises(OSError, match="Invalid argument"):
        TerminationWatch(TerminationConfig(signals=[signal.SIGUSR1, signal.SIGUSR2]), lambda reason: None)
    assert [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)] == before
    assert len(os.listdir("/proc/self/fd")) == len(files)
    assert signal.set_wakeup_fd(-1) == -1


ALONE = """
import sys, mpidist
from mpidist.experimental import PreemptionCheckpointHandler

strategy = mpidist.MultiWorkerMirroredStrategy()
checkpoint = mpidist.Checkpoint(step=0)
try:
    PreemptionCheckpointHandler(None, checkpoint, sys.argv[1])
except RuntimeError as error:
    print("told", "make it inside `with strategy.scope():`" in str(error), flush=True)
with strategy.scope(), PreemptionCheckpointHandler(None, checkpoint, sys.argv[1]) as handler:
    handler.run(lambda: None)
print("ran", flush=True)
"""


@pytest.mark.jobs
def test_a_handler_that_would_act_on_one_rank_alone(tmp_path: Path) -> None:
    done = run_script(ALONE, 2, str(tmp_path), timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "ran", "ran", "told True", "told True"]


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="expected a mpidist.Checkpoint or"):
        PreemptionCheckpointHandler(None, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not say where to save"):
        PreemptionCheckpointHandler(None, checkpoint_of())
    manager = mpidist.CheckpointManager(checkpoint_of(), tmp_path, max_to_keep=1)
    with pytest.raises(ValueError, match="leave checkpoint_dir out"):
        PreemptionCheckpointHandler(None, manager, tmp_path)
    bad: list[dict[str, Any]] = [{"grace_period": -1}, {"signals": ()}]
    for arguments in bad:
        with pytest.raises(ValueError, match="expected"):
            TerminationConfig(**arguments)
    with pytest.raises(TypeError, match="exit_fn is 3"):
        TerminationConfig(exit_fn=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a TerminationConfig"):
        PreemptionCheckpointHandler(None, checkpoint_of(), tmp_path, termination_config=3)  # type: ignore[arg-type]
    errors: list[BaseException] = []

    def elsewhere() -> None:
        try:
            PreemptionCheckpointHandler(None, checkpoint_of(), tmp_path)
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


TRAIN = """
import os, signal, sys, numpy as np, mpidist
from mpidist.experimental import PreemptionCheckpointHandler

folder, last, victim, at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
strategy = mpidist.MultiWorkerMirroredStrategy()
rank, size = strategy.extended.communicator.rank, strategy.extended.communicator.size
with strategy.scope():
    w = mpidist.Variable(np.zeros(3), aggregation=mpidist.VariableAggregation.ONLY_FIRST_REPLICA)
dataset = mpidist.Dataset.range(12 * size).shuffle(seed=3).repeat().batch(2 * size)
iterator = iter(strategy.experimental_distribute_dataset(dataset))
checkpoint = mpidist.Checkpoint(w=w, step=0, iterator=iterator)

def replica_fn(batch):
    ctx = mpidist.get_replica_context()
    total = ctx.all_reduce("SUM", np.array([batch.sum(), 1.0, 0.5]))
    w.assign_add(total)

def train_step():
    strategy.run(replica_fn, args=(next(iterator),))
    checkpoint.step += 1
    if rank == victim and checkpoint.step == at:
        os.kill(os.getpid(), signal.SIGUSR1)

with PreemptionCheckpointHandler(strategy.cluster_resolver, checkpoint, folder) as handler:
    print("begins at", checkpoint.step, flush=True)
    while checkpoint.step < last:
        handler.run(train_step)
print("w", w.numpy().tolist(), flush=True)
strategy.close()
"""


ENDLESS = str(10**9)


def preempted(folder: Path, victim: int) -> int:
    """Run the training on 3 ranks until a rank gets a signal; return the step that was saved."""
    job = run_script(TRAIN, 3, str(folder), ENDLESS, str(victim), "25")
    assert job.returncode == 42, job.stderr
    assert job.stderr.count("preempted: saved") == 1
    found = checkpoint_of()
    status = found.restore_latest(folder)
    assert status is not None
    status.expect_partial()
    assert found.step >= 25
    return int(found.step)


def results(job: subprocess.CompletedProcess[str]) -> set[str]:
    assert job.returncode == 0, job.stderr
    return {line for line in job.stdout.splitlines() if line.startswith("w ")}


@pytest.mark.jobs
@pytest.mark.parametrize("victim", [pytest.param(victim, marks=pytest.mark.long) for victim in (0, 2)])
def test_a_preempted_job_goes_on_as_if_nothing_had_been(tmp_path: Path, victim: int) -> None:
    saved = preempted(tmp_path / "a", victim)
    last = str(saved + 50)
    second = run_script(TRAIN, 3, str(tmp_path / "a"), last, "-1", "0")
    undisturbed = run_script(TRAIN, 3, str(tmp_path / "b"), last, "-1", "0")
    assert f"begins at {saved}\n" in second.stdout
    assert results(second) == results(undisturbed)
    assert len(results(second)) == 1


@pytest.mark.jobs
def test_a_preempted_job_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    last = str(preempted(tmp_path / "a", 1) + 50)
    second = run_script(TRAIN.replace("* size", "* 3"), 2, str(tmp_path / "a"), last, "-1", "0")
    undisturbed = run_script(TRAIN, 3, str(tmp_path / "b"), last, "-1", "0")

    def seen(job: subprocess.CompletedProcess[str]) -> float:
        (line,) = results(job)
        return float(line.split("[")[1].split(",")[0])

    assert seen(second) == seen(undisturbed)
