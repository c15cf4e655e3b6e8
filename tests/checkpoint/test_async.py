"""async_save: what was copied is written while the program goes on, and no error is lost."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import Checkpoint
from mpidist.checkpoint import format as files
from mpidist.checkpoint import latest_checkpoint, writer
from mpidist.checkpoint.checkpoint import Save
from mpidist.checkpoint.writer import finish_writing, give_up_all
from mpidist.core.errors import PeerError
from tests.checkpoint.shared_folder import of_all_ranks
from tests.support.ranks.jobs import child_environment, run_script
from tests.support.ranks.layouts import layouts
from tests.support.speed import scaled


class Brake:
    """Holds the writing of files up until it is let go, or lets it fail."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.error: OSError | None = None
        self.threads: list[threading.Thread] = []
        self._write = files.write_tensors

    def __call__(self, path: Path, tensors: Any) -> Any:
        self.threads.append(threading.current_thread())
        assert self.go.wait(30)
        if self.error is not None:
            raise self.error
        return self._write(path, tensors)


@pytest.fixture
def brake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Brake]:
    brake = Brake()
    monkeypatch.setattr(files, "write_tensors", brake)
    yield brake
    brake.go.set()


def test_what_is_saved_is_what_was_there_when_save_was_called(
    strategy: mpidist.Strategy, brake: Brake, tmp_path: Path
) -> None:
    with strategy.scope():
        v = mpidist.Variable([1.0, 2.0])
        count = mpidist.Variable(
            0.0,
            synchronization=mpidist.VariableSynchronization.ON_READ,
            aggregation=mpidist.VariableAggregation.SUM,
        )
    strategy.run(lambda: count.assign_add(2.0))
    array = np.arange(3)
    checkpoint = Checkpoint(v=v, count=count, array=array, step=1)
    path = checkpoint.save(tmp_path / "ckpt", async_save=True)
    assert checkpoint.save_counter == 1
    assert not Path(path).exists()
    v.assign([0.0, 0.0])
    strategy.run(lambda: count.assign_add(2.0))
    array[:] = 0
    checkpoint.step = 2
    brake.go.set()
    checkpoint.wait()
    if strategy.extended.should_checkpoint:
        assert brake.threads != [threading.main_thread()]
        assert latest_checkpoint(tmp_path) == path
    checkpoint.restore(path).assert_consumed()
    assert (v.numpy().tolist(), array.tolist(), checkpoint.step) == ([1.0, 2.0], [0, 1, 2], 1)
    assert count.numpy() == 2.0 * strategy.num_replicas_in_sync
    checkpoint.wait()
    checkpoint.sync()


def test_the_next_save_waits_for_the_one_before(strategy: mpidist.Strategy, tmp_path: Path) -> None:
    with strategy.scope():
        v = mpidist.Variable(np.zeros(1 << 16))
    checkpoint = Checkpoint(v=v)
    for step in range(1, 5):
        v.assign(np.full(1 << 16, step))
        path = checkpoint.save(tmp_path / "ckpt", async_save=True)
        if step > 1 and strategy.extended.should_checkpoint:
            assert (tmp_path / f"ckpt-{step - 1}").is_dir()
    v.assign(np.zeros(1 << 16))
    checkpoint.restore(path).assert_consumed()
    assert (v.numpy()[5], checkpoint.save_counter) == (4, 4)
    assert checkpoint.save(tmp_path / "ckpt").endswith("ckpt-5")


@pytest.mark.parametrize("call", ["wait", "save", "restore"])
def test_an_error_in_the_thread_is_raised_on_all_ranks_by_the_next_call(
    strategy: mpidist.Strategy, brake: Brake, call: str, tmp_path: Path
) -> None:
    with strategy.scope():
        v = mpidist.Variable([1.0, 2.0])
    checkpoint = Checkpoint(v=v)
    brake.go.set()
    before = checkpoint.save(tmp_path / "ckpt")
    brake.error = OSError(28, "No space left on device")
    checkpoint.save(tmp_path / "ckpt", async_save=True)
    calls = {
        "wait": checkpoint.wait,
        "save": lambda: checkpoint.save(tmp_path / "ckpt"),
        "restore": lambda: checkpoint.restore(before),
    }
    expected = OSError if strategy.extended.should_checkpoint else PeerError
    with pytest.raises(expected, match="No space left on device"):
        calls[call]()
    assert checkpoint.save_counter == 1
    if strategy.extended.should_checkpoint:
        assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt-1"]
    brake.error = None
    # It was told once; the next save is an ordinary one.
    checkpoint.wait()
    assert checkpoint.save(tmp_path / "ckpt", async_save=True).endswith("ckpt-2")
    checkpoint.wait()
    checkpoint.restore(before).assert_consumed()


def test_what_can_be_seen_at_once_is_raised_at_once(strategy: mpidist.Strategy, tmp_path: Path) -> None:
    with strategy.scope():
        checkpoint = Checkpoint(v=mpidist.Variable(1.0))
    (tmp_path / "taken-1").mkdir()
    expected = FileExistsError if strategy.extended.should_checkpoint else PeerError
    with pytest.raises(expected, match="is no checkpoint"):
        checkpoint.save(tmp_path / "taken", async_save=True)
    checkpoint.wait()


@pytest.mark.parametrize("strategy", layouts("mirrored-2local"), indirect=True)
def test_waiting_inside_run(strategy: mpidist.Strategy, tmp_path: Path) -> None:
    with strategy.scope():
        checkpoint = Checkpoint(v=mpidist.Variable(1.0))
    checkpoint.save(tmp_path / "ckpt", async_save=True)
    with pytest.raises(RuntimeError, match=r"wait\(\) was called inside strategy\.run"):
        strategy.run(checkpoint.wait)
    checkpoint.wait()


SLOW_SAVE = """
    import sys, time
    import numpy as np
    import mpidist
    from mpidist.checkpoint import format as files

    write = files.write_tensors
    def slow(path, tensors):
        time.sleep(0.5)
        if sys.argv[2] == "fail":
            raise OSError(28, "No space left on device", str(path))
        return write(path, tensors)
    files.write_tensors = slow
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        v = mpidist.Variable(np.arange(1000.0))
    mpidist.Checkpoint(v=v).save(sys.argv[1] + "/ckpt", async_save=True, sharded=sys.argv[3] == "sharded")
    print("the program ends", flush=True)
"""


@pytest.mark.jobs
@pytest.mark.one_rank
@pytest.mark.parametrize("how", ["whole", "sharded"])
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_end_of_the_program_waits(ranks: int, how: str, tmp_path: Path) -> None:
    done = run_script(SLOW_SAVE, ranks, str(tmp_path), "succeed", how, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    v = mpidist.Variable(np.zeros(1000))
    Checkpoint(v=v).restore(tmp_path / "ckpt-1").assert_consumed()
    assert v.numpy()[-1] == 999
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt-1"]


@pytest.mark.jobs
@pytest.mark.one_rank
@pytest.mark.parametrize("how", ["whole", "sharded"])
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_an_error_that_nobody_waited_for_is_told_at_the_end(ranks: int, how: str, tmp_path: Path) -> None:
    start = time.monotonic()
    done = run_script(SLOW_SAVE, ranks, str(tmp_path), "fail", how, timeout=30)
    assert time.monotonic() - start < scaled(20)
    assert "ckpt-1 was not written" in done.stderr
    assert "No space left on device" in done.stderr
    assert ranks == 1 or done.returncode != 0
    assert latest_checkpoint(tmp_path) is None


@contextmanager
def released_meanwhile(brake: Brake) -> Iterator[None]:
    """A block in which the writer goes on when the program is most likely waiting for it."""
    timer = threading.Timer(0.05, brake.go.set)
    timer.start()
    yield
    timer.join()


@pytest.mark.one_rank
def test_a_process_can_wait_for_all_that_it_writes(brake: Brake, tmp_path: Path) -> None:
    checkpoint = Checkpoint(step=1)
    path = checkpoint.save(tmp_path / "ckpt", async_save=True)
    with released_meanwhile(brake):
        finish_writing()
    assert latest_checkpoint(tmp_path) == path
    brake.error = OSError(28, "No space left on device")
    checkpoint.save(tmp_path / "ckpt", async_save=True)
    with pytest.raises(OSError, match="No space left on device"):
        finish_writing()
    finish_writing()
    with pytest.raises(OSError, match="No space left on device"):
        checkpoint.wait()


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)
def test_saves_are_given_up_when_a_rank_does_not_write_its_part(
    strategy: mpidist.Strategy,
    brake: Brake,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    monkeypatch.setattr(writer, "SMALLEST_FILE_BYTES", 1)
    with strategy.scope():
        checkpoint = Checkpoint(v=mpidist.Variable(np.zeros(1 << 16)))
    with of_all_ranks(tmp_path) as folder:
        checkpoint.save(folder / "ckpt", sharded=True, async_save=True)
        if world.rank == 0:
            brake.go.set()
            give_up_all()
            assert not list(folder.iterdir())
            assert "ckpt-1 was not written: it was given up" in caplog.text
            # The name is free.
            Checkpoint(step=1).save(folder / "ckpt")
        world.Barrier()
        brake.go.set()
        give_up_all()
        finish_writing()
        with pytest.raises(PeerError if world.rank == 0 else FileNotFoundError):
            checkpoint.wait()
        assert [entry.name for entry in folder.iterdir()] == ["ckpt-1"]


@pytest.mark.one_rank
def test_what_needs_no_other_rank_is_finished_when_saves_are_given_up(brake: Brake, tmp_path: Path) -> None:
    checkpoint = Checkpoint(step=1)
    path = checkpoint.save(tmp_path / "ckpt", async_save=True)
    with released_meanwhile(brake):
        give_up_all()
    assert latest_checkpoint(tmp_path) == path
    checkpoint.wait()


@pytest.mark.one_rank
def test_two_saves_of_one_process_to_one_name(brake: Brake, tmp_path: Path) -> None:
    checkpoint = Checkpoint(step=1)
    checkpoint.save(tmp_path / "ckpt", async_save=True)
    with pytest.raises(FileExistsError, match=r"this process itself still saves .*ckpt-1, in a thread.*call wait\(\)"):
        Checkpoint(step=1).save(tmp_path / "ckpt")
    brake.go.set()
    checkpoint.wait()
    Checkpoint(step=1).save(tmp_path / "ckpt")


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)
def test_a_rank_without_memory_for_the_copy(
    strategy: mpidist.Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: Any) -> Any:
        raise MemoryError("Unable to allocate 8 bytes")

    is_chief = strategy.extended.should_checkpoint
    with strategy.scope():
        checkpoint = Checkpoint(v=mpidist.Variable(1.0))
    with monkeypatch.context() as patch:
        if is_chief:
            patch.setattr(Save, "_part_of", exhausted)
        with pytest.raises(MemoryError if is_chief else PeerError, match="Unable to allocate"):
            checkpoint.save(tmp_path / "ckpt", async_save=True)
    assert checkpoint.save(tmp_path / "ckpt", async_save=True).endswith("ckpt-1")
    checkpoint.wait()


@pytest.mark.jobs
@pytest.mark.one_rank
def test_without_threads_left_the_save_fails(tmp_path: Path) -> None:
    source = f"""
import threading
import mpidist
def refuse(thread):
    raise RuntimeError("can't start new thread")
checkpoint = mpidist.Checkpoint(step=1)
threading.Thread.start = refuse
checkpoint.save({str(tmp_path)!r} + "/ckpt", async_save=True)
try:
    checkpoint.wait()
except RuntimeError as error:
    print("told:", error)
"""
    done = subprocess.run([sys.executable, "-c", source], env=child_environment(), capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("told: can't start new thread\n", "")
    assert list(tmp_path.iterdir()) == []
