"""Killed, full disks, no file descriptors: what was saved before is there, and nothing half is taken for whole."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from mpidist import Checkpoint, CheckpointManager
from mpidist.checkpoint import writer
from tests.support.ranks.jobs import child_environment, mpirun_command, run_script
from tests.support.ranks.programs import run_program
from tests.support.speed import scaled

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

# Lets a process kill itself before the n-th of its steps on the file system.
DIES = """
    import os, signal, sys
    from mpidist.checkpoint import format as files

    class Death:
        EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "fcntl.flock", "os.listdir", "os.scandir")

        def __init__(self):
            self.folder, self.steps_left, self.steps = None, -1, 0
            sys.addaudithook(self.watch)
            self.sync, self.write = os.fsync, files._write_all
            os.fsync = lambda descriptor: (self.step(), self.sync(descriptor))[1]
            files._write_all = self.write_by_halves

        def watch(self, event, arguments):
            # Files are opened, and directories listed, also by whatever else Python does.
            if self.folder and event in self.EVENTS and (event == "fcntl.flock" or self.folder in str(arguments[0])):
                self.step()

        def write_by_halves(self, file, data):
            self.write(file, data[: len(data) // 2])
            self.step()
            self.write(file, data[len(data) // 2 :])

        def step(self):
            if self.folder:
                self.steps += 1
                if self.steps == self.steps_left:
                    os.kill(os.getpid(), signal.SIGKILL)
"""

KILLED_EVERYWHERE = """
    import shutil, traceback
    import numpy as np
    from mpidist import Checkpoint, CheckpointManager

    def objects(step):
        return Checkpoint(array=np.full(3000, step), step=step)

    def manage(folder):
        # Goes on from what is there, saves two more, the first of them in a thread.
        checkpoint = objects(0)
        manager = CheckpointManager(checkpoint, folder, 1)
        manager.restore_or_initialize()
        for _ in range(2):
            checkpoint.step += 1
            checkpoint.array[:] = checkpoint.step
            manager.save()

    def replace(folder):
        checkpoint = objects(0)
        checkpoint.restore_latest(folder)
        checkpoint.step += 1
        checkpoint.array[:] = checkpoint.step
        checkpoint.write(folder + "/ckpt-1")

    def in_child(work, folder, steps_left):
        # Return how many steps it took, None if it was killed.
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                death.folder, death.steps_left = folder, steps_left
                work(folder)
                os.write(writing, str(death.steps).encode())
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        os.close(writing)
        _, status = os.waitpid(child, 0)
        text = os.read(reading, 100)
        os.close(reading)
        if os.WIFSIGNALED(status):
            return None
        assert status == 0
        return int(text)

    def look(folder):
        # What the next run finds.
        checkpoint = objects(0)
        manager = CheckpointManager(checkpoint, folder, 1)
        assert manager.restore_or_initialize() is not None
        assert (checkpoint.array == checkpoint.step).all()
        assert not [name for name in os.listdir(folder) if name.startswith(".")], os.listdir(folder)
        return checkpoint.step

    death = Death()
    for work, last in ((manage, 3), (replace, 2)):
        seen, deaths = set(), 0
        for steps_left in range(1, 1000):
            folder = os.path.join(sys.argv[1], f"{work.__name__}-{steps_left}")
            first = objects(1)
            first.save(folder + "/ckpt")
            survived = in_child(work, folder, steps_left)
            seen.add(look(folder))
            shutil.rmtree(folder)
            if survived is not None:
                break
            deaths += 1
        assert survived is not None
        assert seen == set(range(1, last + 1)), seen
        print(work.__name__, "killed", deaths, "times")
"""


def program(*parts: str) -> str:
    return "\n".join(map(textwrap.dedent, parts))


def test_killed_before_each_step_on_the_file_system(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program(DIES, KILLED_EVERYWHERE), str(tmp_path)],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=scaled(100),
    )
    assert (done.returncode, done.stderr) == (0, "")
    times = [int(line.split()[2]) for line in done.stdout.splitlines()]
    assert len(times) == 2
    assert min(times) > 15


RANK_DIES = """
    import numpy as np
    import mpidist

    folder, victim, steps_left, async_save = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "async"
    death = Death()
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        v = mpidist.Variable(np.full(300000, 1.0))
    checkpoint = mpidist.Checkpoint(v=v, step=1)
    manager = mpidist.CheckpointManager(checkpoint, folder, 1, sharded=True, async_save=async_save)
    manager.restore_or_initialize()
    if strategy.cluster_resolver.task_id == victim:
        death.folder, death.steps_left = folder, steps_left
    for _ in range(2):
        checkpoint.step += 1
        v.assign(np.full(300000, float(checkpoint.step)))
        manager.save()
    manager.wait()
    if strategy.cluster_resolver.task_id == 0:
        print("steps", death.steps)
"""


@pytest.mark.parametrize(
    ("mode", "victim"),
    [
        ("at once", 0),
        ("async", 1),
        pytest.param("at once", 1, marks=pytest.mark.long),
        pytest.param("async", 0, marks=pytest.mark.long),
    ],
)
def test_a_rank_that_is_killed_while_all_write(victim: int, mode: str, tmp_path: Path) -> None:
    for steps_left in (3, 8):
        folder = tmp_path / str(steps_left)
        done = run_script(program(DIES, RANK_DIES), 2, str(folder), str(victim), str(steps_left), mode, timeout=60)
        assert done.returncode != 0, done.stdout
        checkpoint = Checkpoint(v=np.zeros(300000), step=0)
        manager = CheckpointManager(checkpoint, folder, 1)
        manager.restore_or_initialize()
        assert (checkpoint.v == checkpoint.step).all()
        assert not [name for name in os.listdir(folder) if name.startswith(".")]


SAVES = """
    import sys
    import numpy as np
    import mpidist
    from mpidist import Checkpoint, MultiWorkerMirroredStrategy, Variable

    def model(strategy):
        with strategy.scope():
            total = Variable(
                0.0,
                synchronization=mpidist.VariableSynchronization.ON_READ,
                aggregation=mpidist.VariableAggregation.SUM,
            )
            return {"v": Variable(np.zeros(100000)), "total": total, "step": 0}

    strategy = MultiWorkerMirroredStrategy(devices=[f"cpu:{i}" for i in range(int(sys.argv[3]))])
    checkpoint = Checkpoint(**model(strategy))
    if sys.argv[2] == "save":
        checkpoint.v.assign(np.arange(100000.0))
        strategy.run(lambda: checkpoint.total.assign(6.0 / strategy.num_replicas_in_sync))
        checkpoint.step = 5
        checkpoint.save(sys.argv[1] + "/ckpt", sharded=sys.argv[4] == "sharded")
    else:
        checkpoint.restore_latest(sys.argv[1]).assert_consumed()
        assert (checkpoint.v.numpy() == np.arange(100000)).all()
        assert abs(checkpoint.total.numpy() - 6) < 1e-12
        assert checkpoint.step == 5
"""


@pytest.mark.parametrize(("how", "layouts"), [("whole", [(2, 2)]), ("sharded", [(1, 1), (4, 1)])])
def test_restored_on_other_numbers_of_ranks_and_replicas(
    how: str, layouts: list[tuple[int, int]], tmp_path: Path
) -> None:
    done = run_program(SAVES, 3, str(tmp_path), "save", "1", how)
    assert done.returncode == 0, done.stderr
    for ranks, replicas in layouts:
        done = run_program(SAVES, ranks, str(tmp_path), "restore", str(replicas), how)
        assert done.returncode == 0, done.stderr


FULL_DISK = """
    import os, sys
    import numpy as np
    import mpidist

    folder = sys.argv[1]
    strategy = mpidist.MultiWorkerMirroredStrategy()
    rank = strategy.cluster_resolver.task_id
    with strategy.scope():
        small, large = mpidist.Variable(np.arange(1000.0)), mpidist.Variable(np.zeros(1 << 18))
    before = mpidist.Checkpoint(v=small)
    path = before.save(folder + "/ckpt")
    for options in ({}, {"async_save": True}, {"sharded": True}, {"sharded": True, "async_save": True}):
        checkpoint = mpidist.Checkpoint(v=large)
        try:
            checkpoint.save(folder + "/large", **options)
            checkpoint.wait()
            raise SystemExit("it was saved")
        except (OSError, mpidist.PeerError) as error:
            assert "No space left on device" in str(error), error
            assert "large" in str(error)
            if rank == 0 and "sharded" not in options:
                assert isinstance(error, OSError) and error.errno == 28
        if rank == 0:
            assert os.listdir(folder) == ["ckpt-1"], os.listdir(folder)
        before.restore(path).assert_consumed()
    assert before.save(folder + "/ckpt").endswith("ckpt-2")
    print("rank", rank, "went on")
"""


def test_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "program.py").write_text(textwrap.dedent(FULL_DISK))
    mount = f"mount -t tmpfs -o size=1m none {tmp_path}/disk"
    if subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True).returncode != 0:
        pytest.skip("a small file system of its own takes the right to mount one (root)")
    command = [*mpirun_command(), "-n", "2", sys.executable, f"{tmp_path}/program.py", f"{tmp_path}/disk"]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", *command],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "rank 0 went on", "rank 1 went on"]


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@contextmanager
def file_descriptors_left(count: int) -> Iterator[None]:
    """Leave this process so many more file descriptors."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        highest = max(map(int, open_files()))
        # Holes below the highest would be used first.
        while (taken := stack.enter_context(open(os.devnull)).fileno()) < highest:
            assert taken >= 0
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 1 + count, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_no_file_descriptors_left(tmp_path: Path) -> None:
    checkpoint = Checkpoint(array=np.arange(100))
    first = checkpoint.save(tmp_path / "ckpt")
    outcomes = []
    before = open_files()
    for count in range(12):
        with file_descriptors_left(count):
            try:
                checkpoint.save(tmp_path / "other")
                outcomes.append("saved")
            except OSError as error:
                outcomes.append(error.strerror)
        checkpoint.restore(first).assert_consumed()
        assert (tmp_path / "other-2").exists() == (outcomes[-1] == "saved")
        shutil.rmtree(tmp_path / "other-2", ignore_errors=True)
        assert os.listdir(tmp_path) == ["ckpt-1"]
    refused = outcomes.index("saved")
    assert outcomes == ["Too many open files"] * refused + ["saved"] * (len(outcomes) - refused)
    assert refused > 2
    with file_descriptors_left(0), pytest.raises(OSError, match="Too many open files"):
        checkpoint.restore(first)
    assert open_files() == before


def test_no_file_descriptor_is_leaked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(array=np.arange(100))
    manager = CheckpointManager(checkpoint, tmp_path / "out", 2)
    manager.save()
    (tmp_path / "taken-2").mkdir()

    def fails(path: Path) -> None:
        raise OSError(5, "Input/output error", str(path))

    before = open_files()
    for _ in range(5):
        manager.save()
        checkpoint.save(tmp_path / "out" / "thread", async_save=True)
        manager.restore_or_initialize()
        checkpoint.write(tmp_path / "out" / "replaced")
        with pytest.raises(FileExistsError):
            checkpoint.write(tmp_path / "taken-2")
        with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output"):
            patch.setattr(writer, "_sync", fails)
            manager.save()
    assert open_files() == before
