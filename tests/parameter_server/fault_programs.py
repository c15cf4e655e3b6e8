"""What chiefs of jobs do that come to grief: ``fault_programs.py CASE FOLDER``, with the roles in MPIDIST_JOBS."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpidist
from mpidist.cluster_resolver import MPIClusterResolver
from mpidist.coordinator import ClusterCoordinator, experimental_get_current_worker_index

from mpi4py import MPI  # isort: skip
from tests.support.speed import scaled

_PATIENCE_SECONDS = scaled(20.0)
case, folder = sys.argv[1], Path(sys.argv[2])


def say(*words: Any) -> None:
    print(*words, flush=True)


def wait_until(is_so: Callable[[], Any]) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def pid_of(task: str) -> int:
    path = folder / task
    wait_until(path.exists)
    return int(path.read_text())


def kill(pid: int) -> None:
    say("KILLED", time.time())
    os.kill(pid, signal.SIGKILL)


def kill_and_await(task: str) -> None:
    pid = pid_of(task)
    kill(pid)
    # A process that its parent has not asked for is still listed, and has no memory any more.
    wait_until(lambda: not _has_memory(pid))


def _has_memory(pid: int) -> bool:
    try:
        return bool(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False


def error_of(fn: Callable[[], Any]) -> str:
    try:
        fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def index() -> int:
    return experimental_get_current_worker_index()


def make_counter(strategy: Any) -> Any:
    with strategy.scope():
        return mpidist.Variable(0, name="count")


def workers_die(strategy: Any, coordinator: ClusterCoordinator) -> None:
    count, deaths = make_counter(strategy), make_counter(strategy)

    def die_at_first() -> str:
        deaths.assign_add(1)
        if deaths.numpy() == 1:
            kill(os.getpid())
        return f"worker {index()}"

    def add() -> int:
        count.assign_add(1)
        return index()

    iterator = iter(coordinator.create_per_worker_dataset(lambda: mpidist.Dataset.range(1000)))
    coordinator.fetch([coordinator.schedule(next, args=(iterator,)) for _ in range(20)])
    # In a function.
    value = coordinator.schedule(die_at_first)
    others = [coordinator.schedule(add) for _ in range(50)]
    coordinator.join()
    say("CARRIED OUT BY", value.fetch())
    say("COUNT", int(count.numpy()), "BY", len(set(coordinator.fetch(others))))
    # Idle, and large things on their way to it.
    alive = sorted({*coordinator.fetch([coordinator.schedule(index) for _ in range(50)])})
    kill_and_await(f"worker-{alive[0]}")
    large = b"x" * (32 << 20)
    say("LENGTHS", {*coordinator.fetch([coordinator.schedule(len, args=(large,)) for _ in range(4)])})
    coordinator.fetch([coordinator.schedule(next, args=(iterator,)) for _ in range(5)])
    # The last one.
    kill_and_await(f"worker-{alive[1]}")
    value = coordinator.schedule(index)
    say("JOIN", error_of(coordinator.join))
    say("FETCH", error_of(value.fetch))
    say("SCHEDULE", error_of(lambda: coordinator.schedule(index)))


def worker_dies_taking(strategy: Any, coordinator: ClusterCoordinator) -> None:
    """Worker 0 is stopped, and dies with a large argument half on its way to it."""
    pids = {coordinator.schedule(lambda: (index(), os.getpid())).fetch()[0] for _ in range(20)}
    say("WORKERS", len(pids))
    os.kill(pid_of("worker-0"), signal.SIGSTOP)
    large = b"x" * (64 << 20)
    values = [coordinator.schedule(len, args=(large,)) for _ in range(4)]
    wait_until(lambda: sum(value.status.name == "READY" for value in values) == 3)
    kill(pid_of("worker-0"))
    say("LENGTHS", {*coordinator.fetch(values)})


def server_dies(strategy: Any, coordinator: ClusterCoordinator) -> None:
    count = make_counter(strategy)
    coordinator.schedule(lambda: count.assign_add(1) and None)
    coordinator.join()
    kill_and_await("ps-0")
    coordinator.schedule(lambda: count.assign_add(1) and None)
    say("JOIN", error_of(coordinator.join))
    say("READ", error_of(count.numpy))


def chief_dies(strategy: Any, coordinator: ClusterCoordinator) -> None:
    count = make_counter(strategy)

    def work() -> None:
        count.assign_add(1)
        wait_until(lambda: False)

    coordinator.schedule(work)
    wait_until(lambda: count.numpy() == 1)
    kill(os.getpid())


def chief_raises(strategy: Any, coordinator: ClusterCoordinator) -> None:
    chief_leaves_work(coordinator)
    say("KILLED", time.time())
    raise ZeroDivisionError("of the chief")


def chief_exits(strategy: Any, coordinator: ClusterCoordinator) -> None:
    chief_leaves_work(coordinator)
    sys.exit(0)


def chief_leaves_work(coordinator: ClusterCoordinator) -> None:
    def work() -> None:
        (folder / f"busy-{index()}").touch()
        time.sleep(0.3)

    for _ in range(1000):
        coordinator.schedule(work)
    wait_until((folder / "busy-0").exists)


def interrupted(strategy: Any, coordinator: ClusterCoordinator) -> None:
    coordinator.schedule(lambda: wait_until(lambda: False))
    threading.Timer(0.3, lambda: (say("KILLED", time.time()), os.kill(os.getpid(), signal.SIGINT))).start()
    coordinator.join()


def launcher_interrupted(strategy: Any, coordinator: ClusterCoordinator) -> None:
    coordinator.schedule(lambda: wait_until(lambda: False))
    say("KILLED", time.time())
    os.kill(os.getppid(), signal.SIGINT)
    coordinator.join()


def worker_hangs(strategy: Any, coordinator: ClusterCoordinator) -> None:
    gate = folder / "gate"

    def hang() -> None:
        wait_until(gate.exists)

    value = coordinator.schedule(hang)
    threading.Timer(1.0, gate.touch).start()
    coordinator.join()
    say("HUNG", value.status.name)


def chief_pauses(strategy: Any, coordinator: ClusterCoordinator) -> None:
    count, chief = make_counter(strategy), os.getpid()

    def pause() -> None:
        os.kill(chief, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(chief, signal.SIGCONT)

    for _ in range(20):
        coordinator.schedule(lambda: count.assign_add(1) and None)
    coordinator.schedule(pause)
    for _ in range(20):
        coordinator.schedule(lambda: count.assign_add(1) and None)
    coordinator.join()
    say("COUNT", int(count.numpy()))


def main() -> None:
    resolver = MPIClusterResolver()
    (folder / "part").mkdir(exist_ok=True)
    part = folder / "part" / f"{resolver.task_type}-{resolver.task_id}"
    part.write_text(str(os.getpid()))
    part.replace(folder / part.name)
    if resolver.task_type == "chief":
        strategy = mpidist.ParameterServerStrategy(resolver)
        globals()[case](strategy, ClusterCoordinator(strategy))
        say("CHIEF AT THE END")
    else:
        mpidist.Server(resolver).join()
        say("LEFT", resolver.task_type, resolver.task_id)


assert MPI.COMM_WORLD.size > 1
main()
