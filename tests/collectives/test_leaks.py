"""Nothing is left behind: by making and closing over and over again, by errors, and by processes that are killed."""

from __future__ import annotations

import fcntl
import gc
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.collectives.channel.channel import open_channels
from mpidist.collectives.node import memory
from tests.support.ranks.jobs import run_script
from tests.support.ranks.pool import run

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]


def inventory() -> dict[str, Any]:
    """Return the resources of this process. MPI reuses freed handles, so new handles show leaks."""
    from mpi4py import MPI

    gc.collect()
    comm = MPI.COMM_SELF.Dup()
    window = MPI.Win.Allocate(8, comm=comm)
    request = comm.Irecv(np.empty(1), 0)
    handles = [comm.py2f(), window.py2f(), request.py2f()]
    comm.Send(np.empty(1), 0)
    request.Wait()
    window.Free()
    comm.Free()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "handles of MPI": handles,
        "files": sorted(os.readlink(f"/proc/self/fd/{number}") for number in _descriptors()),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "shared memory": sum("/dev/shm" in line for line in maps),
        "channels": len(open_channels),
    }


def _descriptors() -> list[str]:
    return [number for number in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{number}")]


def use_a_communicator() -> None:
    with mpidist.Communicator() as comm:
        for size in (3, 1000, 300_000):
            comm.all_reduce("SUM", np.ones(size))
            comm.all_reduce_async("MAX", np.ones(size))
        own = comm.empty(300_000, "float64")
        own[:] = 1.0
        comm.all_reduce("SUM", own)
        comm.all_gather(own)
        comm.reduce_scatter("SUM", own)
        part = comm.split(comm.rank % 2)
        assert part is not None
        part.all_reduce("SUM", own)
        part.close()
        for call in (lambda: comm.all_reduce("SUM", np.ones(comm.rank + 1)), lambda: comm.reduce("SUM", 1.0, -1)):
            with pytest.raises((mpidist.MismatchError, ValueError)):
                call()


def use_a_strategy() -> None:
    with mpidist.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            variable = mpidist.Variable(np.zeros(3), aggregation=mpidist.VariableAggregation.SUM)
        data = mpidist.Dataset.range(16).batch(8).prefetch(2)
        for batch in strategy.experimental_distribute_dataset(data):
            strategy.run(lambda rows: variable.assign_add(np.full(3, rows.sum())), args=(batch,))
        with pytest.raises(ZeroDivisionError):
            strategy.run(lambda: 1 // 0)


def over_and_over(times: int) -> tuple[dict[str, Any], dict[str, Any]]:
    for _ in range(3):
        use_a_communicator()
        use_a_strategy()
    before = inventory()
    for _ in range(times):
        use_a_communicator()
        use_a_strategy()
    return before, inventory()


@pytest.mark.parametrize(
    ("ranks", "per_node"), [(4, 2), *(pytest.param(2, nodes, marks=pytest.mark.long) for nodes in (None, 1))]
)
def test_making_and_closing_over_and_over_again(ranks: int, per_node: int | None) -> None:
    for before, after in run(over_and_over, ranks, 8, ranks_per_node=per_node):
        assert after == before


NEXT = """
import mpidist
comm = mpidist.Communicator()
comm.empty(1 << 20)
comm.close()
"""


@pytest.mark.parametrize("whom", ["the maker", "a neighbour", "the launcher"])
def test_the_next_job_removes_leftovers(whom: str, tmp_path: Path) -> None:
    program = """
    import os, pathlib, signal, sys, mpidist
    from mpidist.collectives.node import memory
    mapped = memory._mapped
    def dies(*args):
        if sys.argv[1] == "a neighbour" and comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "the maker" and comm.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "the launcher" and comm.rank == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        return mapped(*args)
    comm = mpidist.Communicator()
    memory._mapped = dies
    pathlib.Path(sys.argv[2], str(os.getpid())).touch()  # what a launcher has not passed on dies with it
    comm.barrier()
    comm.empty(1 << 20)
    comm.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
    """
    job = run_script(program, 2, whom, str(tmp_path))
    assert job.returncode != 0
    pids = [path.name for path in tmp_path.iterdir()]
    assert len(pids) == 2
    job = run_script(NEXT, 2)
    assert job.returncode == 0, job.stderr
    assert not [path for pid in pids for path in Path("/dev/shm").glob(f"mpidist-{pid}-*")]


def test_files_that_are_being_made_are_left_alone() -> None:
    left = Path("/dev/shm/mpidist-0-1")
    held = Path("/dev/shm/mpidist-0-2")
    other = Path("/dev/shm/mpidist_of_another_program")
    for path in (left, held, other):
        path.touch()
    try:
        with held.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            memory.remove_leftovers.cache_clear()
            memory.remove_leftovers()
        assert [path.exists() for path in (left, held, other)] == [False, True, True]
    finally:
        for path in (left, held, other):
            path.unlink(missing_ok=True)
