"""CheckpointManager: numbers, what stays and what goes, intervals, what is restored, and leftovers of the killed."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import Checkpoint, CheckpointManager
from mpidist.checkpoint import DamagedCheckpointError, writer
from mpidist.checkpoint import format as files
from mpidist.core.errors import PeerError
from tests.checkpoint.shared_folder import damage
from tests.support.ranks.jobs import child_environment
from tests.support.ranks.layouts import layouts
from tests.support.speed import scaled


def names(paths: Any) -> list[str]:
    return sorted((os.path.basename(path) for path in paths), key=lambda name: (len(name), name))


def objects(strategy: mpidist.Strategy) -> Checkpoint:
    with strategy.scope():
        return Checkpoint(v=mpidist.Variable(np.zeros(100)), step=0)


@pytest.mark.parametrize("options", [{}, {"async_save": True}], ids=str)
def test_the_newest_stay_and_a_restart_goes_on(
    strategy: mpidist.Strategy, options: dict[str, bool], tmp_path: Path
) -> None:
    is_chief = strategy.extended.should_checkpoint
    checkpoint = objects(strategy)
    manager = CheckpointManager(checkpoint, tmp_path / "out", 2, **options)
    assert (manager.checkpoints, manager.latest_checkpoint) == ([], None)
    assert manager.restore_or_initialize() is None
    for step in range(1, 5):
        checkpoint.step = step
        path = manager.save()
        assert path is not None
        assert names([path]) == [f"ckpt-{step}"]
    manager.wait()
    assert manager.checkpoints[-1] == manager.latest_checkpoint == path
    assert names(manager.checkpoints) == ["ckpt-3", "ckpt-4"]
    if is_chief:
        assert names(os.listdir(tmp_path / "out")) == ["ckpt-3", "ckpt-4"]

    checkpoint = objects(strategy)
    manager = CheckpointManager(checkpoint, tmp_path / "out", 3, **options)
    assert names(manager.checkpoints) == ["ckpt-3", "ckpt-4"]
    assert manager.restore_or_initialize() == path
    assert (checkpoint.step, checkpoint.save_counter) == (4, 4)
    manager.save()
    manager.save()
    manager.sync()
    assert names(manager.checkpoints) == ["ckpt-4", "ckpt-5", "ckpt-6"]
    # Also where nothing was restored, nothing is replaced.
    manager = CheckpointManager(objects(strategy), tmp_path / "out", 3)
    assert names([manager.save()]) == ["ckpt-7"]


def test_other_checkpoints_are_left_alone(tmp_path: Path) -> None:
    checkpoint = Checkpoint(step=1)
    checkpoint.write(tmp_path / "best")
    checkpoint.save(tmp_path / "ckpt-of-mine")
    (tmp_path / "ckpt-x").mkdir()
    manager = CheckpointManager(checkpoint, tmp_path, 1)
    manager.save()
    manager.save()
    assert names(os.listdir(tmp_path)) == ["best", "ckpt-3", "ckpt-x", "ckpt-of-mine-1"]
    other = CheckpointManager(checkpoint, tmp_path, None, checkpoint_name="best")
    assert other.checkpoints == []
    for _ in range(3):
        other.save()
    assert names(other.checkpoints) == ["best-4", "best-5", "best-6"]


def test_numbers_of_ones_own(tmp_path: Path) -> None:
    checkpoint = Checkpoint(step=1)
    manager = CheckpointManager(checkpoint, tmp_path, 2)
    number = mpidist.Variable(np.int64(100))
    assert names([manager.save(number), manager.save(7)]) == ["ckpt-7", "ckpt-100"]
    assert (names(manager.checkpoints), checkpoint.save_counter) == (["ckpt-7", "ckpt-100"], 2)
    assert manager.latest_checkpoint == str(tmp_path / "ckpt-7")
    assert names([manager.save()]) == ["ckpt-101"]
    assert names(manager.checkpoints) == ["ckpt-7", "ckpt-101"]
    assert manager.save(7) == manager.latest_checkpoint
    assert names(os.listdir(tmp_path)) == ["ckpt-7", "ckpt-101"]
    for wrong in (-1, 1.5, "1"):
        with pytest.raises(ValueError, match="checkpoint_number is"):
            manager.save(wrong)


@pytest.mark.parametrize("kind", ["function", "variable"])
def test_the_interval(kind: str, tmp_path: Path) -> None:
    counter = mpidist.Variable(np.int64(0))
    checkpoint = Checkpoint(counter=counter)
    steps: Any = counter if kind == "variable" else (lambda: int(counter.numpy()))
    manager = CheckpointManager(checkpoint, tmp_path, None, step_counter=steps, checkpoint_interval=3)
    saved = []
    for _ in range(8):
        if manager.save() is not None:
            saved.append(int(counter.numpy()))
        counter.assign_add(1)
    assert saved == [0, 3, 6]
    assert manager.save(check_interval=False) is not None
    again = CheckpointManager(checkpoint, tmp_path, None, step_counter=steps, checkpoint_interval=3)
    again.restore_or_initialize()
    assert (again.checkpoint_interval, again.directory, again.checkpoint) == (3, str(tmp_path), checkpoint)
    assert again.save() is None
    counter.assign_add(3)
    assert again.save() is not None


@pytest.mark.parametrize("async_save", [False, True])
def test_a_save_that_failed_does_not_count_for_the_interval(
    async_save: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path, tensors: Any) -> Any:
        raise OSError(28, "No space left on device", str(path))

    checkpoint = Checkpoint(step=0)
    manager = CheckpointManager(
        checkpoint, tmp_path, 1, step_counter=lambda: checkpoint.step, checkpoint_interval=5, async_save=async_save
    )
    manager.save()
    manager.wait()
    checkpoint.step = 5
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(files, "write_tensors", fails)
        manager.save()
        manager.wait()
    checkpoint.step = 6
    assert names([manager.save()]) == ["ckpt-2"]
    checkpoint.step = 7
    assert manager.save() is None
    manager.wait()


def test_what_is_kept_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)

    def manager() -> CheckpointManager:
        return CheckpointManager(Checkpoint(step=1), tmp_path, 2, keep_checkpoint_every_n_hours=1.0)

    first = manager()
    for _ in range(6):
        now += 1000
        first.save()
    # 1 h after the manager was made is 3,600 s: number 4, which leaves the newest two as 6 comes.
    assert names(os.listdir(tmp_path)) == ["ckpt-4", "ckpt-5", "ckpt-6"]
    assert names(first.checkpoints) == ["ckpt-5", "ckpt-6"]
    # The next one is due 3,600 s after number 4, also in another run.
    for expected in (["ckpt-4", "ckpt-6", "ckpt-7"], ["ckpt-4", "ckpt-7", "ckpt-8"], ["ckpt-4", "ckpt-8", "ckpt-9"]):
        now += 1000
        again = manager()
        again.save()
        assert names(os.listdir(tmp_path)) == expected
    now += 1000
    manager().save()
    again = CheckpointManager(Checkpoint(step=1), tmp_path, 1)
    again.save()
    assert names(os.listdir(tmp_path)) == ["ckpt-4", "ckpt-8", "ckpt-11"]
    CheckpointManager(Checkpoint(step=1), tmp_path, 1).save()
    assert names(os.listdir(tmp_path)) == ["ckpt-4", "ckpt-8", "ckpt-12"]


def test_the_old_goes_only_when_the_new_is_safe(
    strategy: mpidist.Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = objects(strategy)
    manager = CheckpointManager(checkpoint, tmp_path, 1)
    first = manager.save()
    events = []
    write, remove = files.write_tensors, writer.remove_checkpoint

    def fails(path: Path, tensors: Any) -> Any:
        raise OSError(28, "No space left on device", str(path))

    expected = OSError if strategy.extended.should_checkpoint else PeerError
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_tensors", fails)
        with pytest.raises(expected, match="No space left"):
            manager.save()
    assert manager.checkpoints == [first]
    monkeypatch.setattr(files, "write_tensors", lambda *a: (events.append("written"), write(*a))[1])
    monkeypatch.setattr(writer, "remove_checkpoint", lambda path: (events.append(path.name), remove(path)))
    second = manager.save()
    assert names([second]) == ["ckpt-2"]
    assert events == (["written", "ckpt-1"] if strategy.extended.should_checkpoint else [])


def test_init_fn_and_damaged_checkpoints(strategy: mpidist.Strategy, tmp_path: Path) -> None:
    is_chief = strategy.extended.should_checkpoint
    checkpoint = objects(strategy)
    calls: list[int] = []
    manager = CheckpointManager(checkpoint, tmp_path, 2, init_fn=lambda: calls.append(1))
    assert manager.restore_or_initialize() is None
    assert calls == [1]
    for checkpoint.step in (1, 2):
        manager.save()
    if is_chief:
        damage(tmp_path / "ckpt-2")
        with pytest.warns(UserWarning, match=r"ckpt-2.*CRC-32.*restored .*ckpt-1 instead") as caught:
            restored = manager.restore_or_initialize()
        assert [warning.filename for warning in caught] == [__file__]
    else:
        restored = manager.restore_or_initialize()
    assert restored is not None
    assert (names([restored]), checkpoint.step, calls) == (["ckpt-1"], 1, [1])
    # The damaged one is neither replaced nor counted, nor removed.
    assert names([manager.save()]) == ["ckpt-3"]
    assert names(manager.checkpoints) == ["ckpt-1", "ckpt-3"]
    if is_chief:
        assert names(os.listdir(tmp_path)) == ["ckpt-1", "ckpt-2", "ckpt-3"]
        damage(tmp_path / "ckpt-1")
        damage(tmp_path / "ckpt-3")
    with pytest.raises(DamagedCheckpointError if is_chief else PeerError, match="none of the checkpoints"):
        manager.restore_or_initialize()
    assert calls == [1]


UUID = "0123456789abcdef0123456789abcdef"


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    saved = Path(Checkpoint(step=1).save(tmp_path / "ckpt"))
    Checkpoint(step=2).save(tmp_path / "later" / "ckpt")
    for name in (f".ckpt-1.{UUID}.old", f".ckpt-2.{UUID}.tmp", f".ckpt-3.{UUID}.del", f".ckpt-4.{UUID}.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.safetensors").write_bytes(b"a part")
    for name in (".ckpt-2.lock", ".ckpt-4.lock", ".ckpt-5.lock"):
        (tmp_path / name).touch()
    others = {".ckpt-6.tmp", ".hidden", "ckpt.lock"}
    for name in others:
        (tmp_path / name).touch()
    # Killed between moving the old one away and giving the new one its name.
    saved.rename(tmp_path / f".ckpt-7.{UUID}.old")
    (tmp_path / "later" / "ckpt-1").rename(saved)
    (tmp_path / "later").rmdir()
    with open(tmp_path / ".ckpt-4.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        manager = CheckpointManager(Checkpoint(step=0), tmp_path, 3)
        assert set(os.listdir(tmp_path)) == {"ckpt-1", "ckpt-7", f".ckpt-4.{UUID}.tmp", ".ckpt-4.lock", *others}
        with pytest.raises(FileExistsError, match="another process saves checkpoint"):
            manager.save(4)
    CheckpointManager(Checkpoint(step=0), tmp_path, 3)
    assert set(os.listdir(tmp_path)) == {"ckpt-1", "ckpt-7", *others}
    checkpoint = Checkpoint(step=0)
    checkpoint.restore(tmp_path / "ckpt-7").assert_consumed()
    assert checkpoint.step == 1


def test_files_of_other_programs_stay(tmp_path: Path) -> None:
    made = [
        f".data.{UUID}.tmp/precious",
        f".ckpt-2.{UUID}.tmp/precious",
        f".ckpt-2.{UUID}.del/data.safetensors/x",
        f".ckpt-3.{UUID}.old/data.safetensors",
        ".ckpt-4.lock/x",
        f".ckpt-4.{UUID}.tmp/data.safetensors",
        f".ckpt-5.{UUID}.tmp",
        ".ckpt-6.lock",
        "ckpt-7/manifest.json",
    ]
    for name in made:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / f".data.csv.{UUID}.tmp").touch()
    (tmp_path / ".build.lock").touch()
    (tmp_path / f".ckpt-8.{UUID}.tmp").symlink_to(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    CheckpointManager(Checkpoint(step=0), tmp_path, 1)
    with pytest.raises(FileExistsError, match=r"ckpt-7 exists and is no checkpoint.*move it away"):
        Checkpoint(step=0).write(tmp_path / "ckpt-7")
    assert sorted(tmp_path.rglob("*")) == before


UNPRIVILEGED = """
    import os, sys, warnings
    import mpidist
    mpidist.Checkpoint, mpidist.get_strategy()  # imported while the interpreter's own files may be read

    os.setgid(65534), os.setuid(65534)
    warnings.simplefilter("ignore")
    checkpoint = mpidist.Checkpoint(step=0)
    manager = mpidist.CheckpointManager(checkpoint, sys.argv[1], 3)
    print(os.path.basename(manager.restore_or_initialize()))
    print(os.path.basename(checkpoint.restore_latest(sys.argv[1]).path))
    print(os.path.basename(mpidist.latest_checkpoint(sys.argv[1])))
    print(checkpoint.step, sorted(os.path.basename(path) for path in manager._find().unusable))
"""


@pytest.mark.jobs
@pytest.mark.one_rank
@pytest.mark.skipif(os.getuid() != 0, reason="becoming another account takes root")
@pytest.mark.parametrize("mode", [0o777, 0o755])
def test_a_directory_that_others_use_too(mode: int) -> None:
    with tempfile.TemporaryDirectory() as name:  # which, unlike tmp_path, lies where other accounts may look
        folder = Path(name)
        folder.chmod(mode)
        Checkpoint(step=5).save(folder / "ckpt")
        for private in ("lost+found", "ckpt-3"):
            (folder / private).mkdir(mode=0o700)
        (folder / f".ckpt-2.{UUID}.tmp").mkdir()
        (folder / ".ckpt-2.lock").touch(mode=0o600)
        before = sorted(folder.iterdir())
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(UNPRIVILEGED), name],
            env=child_environment(),
            capture_output=True,
            text=True,
            timeout=scaled(60),
        )
        assert done.stdout.splitlines() == ["ckpt-1", "ckpt-1", "ckpt-1", "5 ['ckpt-3']"], done.stderr
        assert sorted(folder.iterdir()) == before


def test_without_locks_nothing_is_taken_for_a_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    (tmp_path / f".ckpt-4.{UUID}.tmp").mkdir()
    manager = CheckpointManager(Checkpoint(step=0), tmp_path, 1)
    manager.save()
    manager.save()
    assert set(os.listdir(tmp_path)) == {"ckpt-2", f".ckpt-4.{UUID}.tmp"}


def test_while_a_thread_writes_its_files_are_not_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(array=np.arange(10))
    write = files.write_tensors

    def slow(path: Path, tensors: Any) -> Any:
        time.sleep(0.1)
        CheckpointManager(Checkpoint(step=0), tmp_path, 1)
        return write(path, tensors)

    monkeypatch.setattr(files, "write_tensors", slow)
    path = checkpoint.save(tmp_path / "ckpt", async_save=True)
    CheckpointManager(Checkpoint(step=0), tmp_path, 1)
    checkpoint.restore(path).assert_consumed()


def test_a_checkpoint_that_cannot_be_removed_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    manager = CheckpointManager(Checkpoint(step=1), tmp_path, 1)
    manager.save()
    monkeypatch.setattr(writer, "remove_checkpoint", refuse)
    with pytest.warns(UserWarning, match=r"ckpt-1, an old one, cannot be removed: .*Permission denied"):
        manager.save()
    assert names(manager.checkpoints) == ["ckpt-2"]


def test_wrong_arguments(tmp_path: Path) -> None:
    checkpoint = Checkpoint(step=1)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"checkpoint": 1}, TypeError, "expected a mpidist.Checkpoint"),
        ({"max_to_keep": 0}, ValueError, "max_to_keep is 0; expected a whole number of 1 or more, or None for all"),
        ({"max_to_keep": True}, ValueError, "max_to_keep is True"),
        ({"checkpoint_interval": 2}, ValueError, "needs step_counter"),
        ({"checkpoint_interval": 0, "step_counter": int}, ValueError, "checkpoint_interval is 0"),
        ({"checkpoint_interval": "auto", "step_counter": int}, ValueError, "is 'auto'; expected a number of steps"),
        ({"mtbf": 60.0}, ValueError, "mtbf is 60.0.* Pass checkpoint_interval a number of steps"),
        ({"step_counter": 3}, TypeError, "step_counter is 3; expected a variable, or a function"),
        ({"init_fn": 3}, TypeError, "init_fn is 3"),
        ({"keep_checkpoint_every_n_hours": 0}, ValueError, "expected more than 0"),
        ({"checkpoint_name": "a/b"}, ValueError, "expected a name such as 'ckpt'"),
        ({"checkpoint_name": ""}, ValueError, "expected a name such as 'ckpt'"),
    ]
    for wrong, kind, match in cases:
        with pytest.raises(kind, match=match):
            CheckpointManager(**{"checkpoint": checkpoint, "directory": tmp_path, "max_to_keep": 1, **wrong})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)
def test_a_directory_that_cannot_be_read(strategy: mpidist.Strategy, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    expected = FileExistsError if strategy.extended.should_checkpoint else PeerError
    with pytest.raises(expected, match="File exists: '.*/file'"):
        CheckpointManager(objects(strategy), tmp_path / "file" / "out", 1).save()
