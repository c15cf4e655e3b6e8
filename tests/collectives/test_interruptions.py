"""Interrupted collectives, forked processes and early exits: no wrong results, and no rank waits forever."""

from __future__ import annotations

import re
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mpidist import CollectiveTimeoutError, Communicator
from mpidist.collectives.channel.fast_path import ChannelLock, FastPath
from mpidist.experimental import CommunicationOptions
from tests.support.ranks.jobs import run_alone, run_script
from tests.support.speed import deadlines

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]


@pytest.mark.parametrize("error", ["Alarm", "SystemExit"])
def test_a_raising_handler_ends_the_job(error: str) -> None:
    program = """
    import signal, sys, time, numpy, mpidist
    class Alarm(Exception): pass
    error = {"Alarm": Alarm, "SystemExit": SystemExit}[sys.argv[1]]
    def handler(*_): raise error
    comm = mpidist.Communicator()
    if comm.rank == 0:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            comm.all_reduce("SUM", numpy.ones(100_000))
        except error:
            pass
        try:
            comm.all_reduce("SUM", numpy.full(100_000, 10.0))
        except RuntimeError as error:
            print(error)
        sys.exit()
    time.sleep(1.0)
    print(comm.all_reduce("SUM", numpy.ones(100_000))[0])
    """
    job = run_script(program, 2, error)
    assert job.returncode != 0
    assert f"can no longer be used: all_reduce SUM of float64(100000,) was interrupted by {error}" in job.stdout
    assert f"rank 0 ends the job: all_reduce SUM of float64(100000,) was interrupted by {error}" in job.stderr
    assert "11.0" not in job.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_forked_child_cannot_take_part(ranks: int) -> None:
    program = """
    import os, numpy, mpidist
    comm = mpidist.Communicator()
    child = os.fork()
    if child == 0:
        errors = []
        calls = [lambda: comm.all_reduce("SUM", numpy.ones(3)), comm.barrier, lambda: comm.all_reduce("SUM", 1),
                 lambda: comm.all_reduce_async("SUM", numpy.ones(9)), mpidist.Communicator, lambda: comm.split(0),
                 comm.step_agreement]
        if comm.size > 1:
            calls.append(mpidist.MultiWorkerMirroredStrategy)  # alone it needs no communicator
        for call in calls:
            try:
                call()
            except RuntimeError as error:
                errors.append("forked from a rank" in str(error))
        os._exit(0 if errors == [True] * len(calls) else 1)
    print(comm.all_reduce("SUM", 1), os.waitpid(child, 0)[1])
    """
    job = run_script(program, ranks, timeout=20)
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines() == [f"{ranks} 0"] * ranks


def test_a_child_forked_before_mpi_starts() -> None:
    program = """
    import os, mpidist
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(mpidist.MultiWorkerMirroredStrategy().num_replicas_in_sync)
    """
    job = run_script(program, 2)
    assert (job.returncode, job.stdout.split()) == (0, ["2", "2"]), job.stderr


def test_the_abort_status_of_mpi4py_is_kept() -> None:
    program = """
    import sys, mpidist
    from mpi4py import MPI
    from mpi4py.run import set_abort_status
    if MPI.COMM_WORLD.Get_rank():
        set_abort_status(3)
        sys.exit(3)
    MPI.COMM_WORLD.recv(source=1)
    """
    assert run_script(program, 2, timeout=30).returncode == 3


@pytest.mark.parametrize(
    ("end", "status"),
    [("pass", 0), ("sys.exit(0)", 0), ("sys.exit(3)", 3), ("raise ValueError", 1), ("os._exit(4)", 4)],
)
def test_the_end_of_a_forked_child_is_its_own(end: str, status: int, tmp_path: Path) -> None:
    program = """
    import os, sys, numpy, mpidist
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variable = mpidist.Variable(numpy.ones(1 << 20))
    data = mpidist.Dataset.from_tensor_slices(numpy.arange(64.0)).batch(2).prefetch(2)
    batches = iter(strategy.experimental_distribute_dataset(data))
    next(batches)
    checkpoint = mpidist.Checkpoint(variable=variable)
    checkpoint.save(sys.argv[1], async_save=True)
    child = os.fork() if mpidist.rank() == 0 else None
    if child == 0:
        {end}
    else:
        if child is not None:
            print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        for size in (1, 100_000) * 50:
            assert (strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", numpy.ones(size))) == 2).all()
        checkpoint.sync()
        print(len(list(batches)))
    """
    recording = {"MPIDIST_STATUS": str(tmp_path / "status"), "MPIDIST_TRACE": str(tmp_path / "trace")}
    job = run_script(program.format(end=end), 2, str(tmp_path / "model"), env=recording, timeout=30)
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == ["31", "31", f"child {status}"]


def test_making_a_strategy_alone_has_a_deadline() -> None:
    program = """
    import mpidist
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank == 0:
        mpidist.MultiWorkerMirroredStrategy()
    else:
        import time; time.sleep(60)
    """
    job = run_script(program, 2, env=deadlines(2, 0.3))
    assert job.returncode != 0
    assert re.search(r"has waited \d+ s for the other ranks in making the first strategy or communicator", job.stderr)
    assert "CollectiveTimeoutError" in job.stderr


def test_errors_of_abandoned_works_are_printed() -> None:
    program = """
    import numpy, mpidist
    comm = mpidist.Communicator()
    comm.all_reduce_async("SUM", numpy.ones(3 + comm.rank))
    comm.close()
    """
    job = run_script(program, 2)
    assert "never waited for, ended with MismatchError" in job.stderr


def test_a_work_past_its_deadline_still_finishes() -> None:
    program = """
    import time, numpy, mpidist
    from mpidist.experimental import CommunicationOptions
    comm = mpidist.Communicator()
    if comm.rank == 0:
        work = comm.all_reduce_async("SUM", numpy.ones(100), options=CommunicationOptions(timeout_seconds=0.3))
        try:
            work.wait()
        except mpidist.CollectiveTimeoutError:
            print("gave up")
    else:
        time.sleep(1.0)
        print(comm.all_reduce_async("SUM", numpy.ones(100)).wait()[0])
    """
    job = run_script(program, 2)
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.split("\n")) == ["", "2.0", "gave up"]


STARTED_ALONE = """
import sys, time, numpy, mpidist
comm = mpidist.Communicator()
comm.barrier()
if comm.rank == 0:
    started = [comm.all_reduce_async("SUM", numpy.ones(1 << int(sys.argv[1])))]
else:
    time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("power", [3, 20])
def test_a_work_started_alone_ends_with_the_job(power: int) -> None:
    for ranks_per_node in (None, 1):
        job = run_script(STARTED_ALONE, 2, str(power), "0", timeout=20, ranks_per_node=ranks_per_node)
        assert job.returncode == 0, job.stderr
        assert "never waited for, ended with PeerError: rank 0 was in all_reduce SUM" in job.stderr
        assert "when rank 1 has left the program" in job.stderr


def test_works_have_a_deadline_at_exit() -> None:
    job = run_script(STARTED_ALONE, 2, "20", "60", timeout=20, env=deadlines(2))
    assert job.returncode != 0
    assert "rank 0 ends the job: the other ranks never called all_reduce SUM of float64(1048576,)" in job.stderr


def test_a_daemon_thread_in_a_collective_aborts() -> None:
    program = """
    import threading, time, numpy, mpidist
    comm = mpidist.Communicator()
    started = threading.Event()
    def evaluate():
        started.set()
        comm.all_reduce("SUM", numpy.ones(100_000))
    if comm.rank == 0:
        threading.Thread(target=evaluate, daemon=True).start()
        started.wait()
        time.sleep(0.3)
    else:
        time.sleep(30)
    """
    job = run_script(program, 2, timeout=25)
    assert job.returncode != 0
    assert "a thread was still in one of its collectives when the program ended" in job.stderr


def test_waiting_thread_finishes_at_the_end() -> None:
    program = """
    import atexit, threading, time
    threads = []
    # Runs after the shutdown of mpidist, because it is registered first. Python cannot end while the thread prints.
    atexit.register(lambda: [thread.join(20) for thread in threads])
    import numpy, mpidist
    comm = mpidist.Communicator()
    started = threading.Event()
    def evaluate():
        started.set()
        print(comm.all_reduce_async("SUM", numpy.ones(3)).wait(20))
    if comm.rank == 0:
        threads.append(threading.Thread(target=evaluate, daemon=True))
        threads[0].start()
        started.wait()
        time.sleep(0.3)
    else:
        time.sleep(1.3)
        comm.all_reduce("SUM", numpy.ones(3))
    """
    job = run_script(program, 2, timeout=30)
    assert (job.returncode, job.stdout.split()) == (0, ["[2.", "2.", "2.]"]), job.stderr


def test_interrupted_start_keeps_calls_in_order() -> None:
    program = """
    import os, signal, sys, numpy, mpidist
    def interrupt(*_): raise KeyboardInterrupt
    signal.signal(signal.SIGUSR1, interrupt)
    comm = mpidist.Communicator()
    one, ten = numpy.ones(3), numpy.full(3, 10.0)
    for _ in range(3):
        comm.all_reduce("SUM", one)
    def trace(frame, event, arg):
        if frame.f_code.co_name == "_step_oldest" and frame.f_back.f_code.co_name == "start":
            sys.settrace(None)
            os.kill(os.getpid(), signal.SIGUSR1)
    if comm.rank == 0:
        sys.settrace(trace)
    try:
        print(comm.all_reduce_async("SUM", ten).wait()[0])
    except KeyboardInterrupt:
        print("interrupted")
    for _ in range(2):
        print(comm.all_reduce("SUM", one)[0])
    """
    job = run_script(program, 2, timeout=30)
    assert sorted(job.stdout.split()) == ["2.0"] * 4 + ["20.0", "interrupted"], job.stderr


def test_a_raising_handler_frees_the_lock() -> None:
    lock = ChannelLock(FastPath(SimpleNamespace(core=None), lambda: False))
    has_begun, may_end = threading.Event(), threading.Event()

    def step() -> None:
        has_begun.set()
        may_end.wait()

    def interrupt(*_: object) -> None:
        raise InterruptedError

    thread = threading.Thread(target=lock.try_step, args=(step,))
    thread.start()
    has_begun.wait()
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(InterruptedError), lock:
            raise AssertionError("the program has the lock")
    finally:
        signal.signal(signal.SIGALRM, before)
        may_end.set()
        thread.join()
    steps: list[int] = []
    with lock:
        lock.try_step(lambda: steps.append(1))
    assert steps == []
    lock.try_step(lambda: steps.append(1))
    assert steps == [1]


def late_rank() -> str:
    """Rank 0 reaches its deadline before rank 1 arrives."""
    comm = Communicator()
    # The first call allocates memory, which needs all ranks.
    comm.all_reduce("SUM", np.ones(5))
    if comm.rank == 1:
        time.sleep(1.0)
        comm.all_reduce("SUM", np.ones(5))
        return "late"
    with pytest.raises(CollectiveTimeoutError) as gave_up:
        comm.all_reduce("SUM", np.ones(5), options=CommunicationOptions(timeout_seconds=0.3))
    assert gave_up.value.rank == 0
    assert gave_up.value.waited_seconds >= 0.3
    assert "all_reduce SUM of float64(5,)" in gave_up.value.operation
    with pytest.raises(RuntimeError) as after:
        comm.barrier()
    return str(after.value)


def test_a_deadline_ends_the_communicator() -> None:
    gave_up, late = run_alone(late_rank, 2)
    assert "can no longer be used" in gave_up
    assert "did not finish within its deadline" in gave_up
    assert late == "late"


def test_waiting_ranks_notice_an_exit() -> None:
    program = """
    import sys, numpy, mpidist
    first, second = mpidist.Communicator(), mpidist.Communicator()
    if first.rank == 1:
        sys.exit(3)
    second.all_reduce("SUM", numpy.ones(5))
    """
    job = run_script(program, 3)
    assert job.returncode != 0
    assert "PeerError: rank 0 was in all_reduce SUM of float64(5,)" in job.stderr
    assert "when rank 1 has left the program (at its end). Make this call on every rank" in job.stderr


def test_a_job_ends_although_a_rank_left_early() -> None:
    program = """
    import sys, mpidist
    comm = mpidist.Communicator()
    if comm.rank == 1:
        sys.exit()
    for _ in range(2):
        try:
            comm.barrier()
        except mpidist.PeerError as error:
            print(error)
    try:
        with comm.shared_errors("a test"):
            raise KeyError("mine")
    except KeyError as error:
        print(error)
    """
    job = run_script(program, 2)
    assert job.returncode == 0, job.stderr
    assert job.stdout.endswith("\n'mine'\n")
    assert "rank 1 has left the program" in job.stdout
    assert "can no longer be used: rank 1 left the program" in job.stdout
