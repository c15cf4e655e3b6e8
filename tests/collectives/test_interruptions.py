"""What breaks into a collective, or into its preparation: no wrong numbers afterwards, and nobody waits for ever."""

from __future__ import annotations

import gc
import re
import signal
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpidist import Communicator, PeerError
from mpidist.collectives.channel.fast_path import ChannelLock, FastPath
from tests.support.ranks.jobs import run_script
from tests.support.speed import deadlines

pytestmark = [pytest.mark.jobs, pytest.mark.nodes]

ALARM = """
import signal, sys, time, numpy, mpidist
class Alarm(Exception): pass
def handler(*_): raise Alarm
comm = mpidist.Communicator()
if comm.rank == 0:
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        comm.all_reduce("SUM", numpy.ones(100_000))
    except Alarm:
        pass
    try:
        comm.all_reduce("SUM", numpy.full(100_000, 10.0))
    except RuntimeError as error:
        print(error)
    sys.exit()
time.sleep(1.0)
print(comm.all_reduce("SUM", numpy.ones(100_000))[0])
"""


@pytest.mark.one_rank
def test_a_signal_handler_that_raises_ends_the_communicator_and_the_job() -> None:
    job = run_script(ALARM, 2)
    assert job.returncode != 0
    assert "can no longer be used: all_reduce SUM of float64(100000,) was interrupted by Alarm" in job.stdout
    assert "rank 0 ends the job: all_reduce SUM of float64(100000,) was interrupted by Alarm" in job.stderr
    assert "11.0" not in job.stdout


TERMINATED = """
import os, signal, sys, threading, numpy, mpidist
comm = mpidist.Communicator()
if comm.rank == 0:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    comm.all_reduce("SUM", numpy.ones(3))
import time; time.sleep(1.5)
comm.barrier()
"""


@pytest.mark.one_rank
def test_a_handler_that_exits_in_a_collective_ends_the_job() -> None:
    job = run_script(TERMINATED, 2)
    assert job.returncode != 0
    assert "rank 0 ends the job: all_reduce SUM of float64(3,) was interrupted by SystemExit" in job.stderr


FORKED = """
import os, mpidist, mpidist.collectives.channel.channel
comm = mpidist.Communicator()
if comm.rank == 0:
    child = os.fork()
    if child == 0:
        os._exit(len(mpidist.collectives.channel.channel.open_channels))
    assert os.waitpid(child, 0)[1] == 0
print(comm.all_reduce("SUM", 1))
"""


@pytest.mark.one_rank
def test_a_forked_child_does_not_speak_for_its_parent() -> None:
    job = run_script(FORKED, 2)
    assert job.returncode == 0, job.stderr
    assert job.stdout.split() == ["2", "2"]


FORKED_AND_TAKES_PART = """
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


@pytest.mark.one_rank
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_forked_child_cannot_take_part(ranks: int) -> None:
    job = run_script(FORKED_AND_TAKES_PART, ranks, timeout=20)
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines() == [f"{ranks} 0"] * ranks


FORKED_FIRST = """
import os, mpidist
child = os.fork()
if child:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(mpidist.MultiWorkerMirroredStrategy().num_replicas_in_sync)
"""


@pytest.mark.one_rank
def test_a_child_forked_before_mpi_starts() -> None:
    job = run_script(FORKED_FIRST, 2)
    assert (job.returncode, job.stdout.split()) == (0, ["2", "2"]), job.stderr


ABORTS = """
import sys, mpidist
from mpi4py import MPI
from mpi4py.run import set_abort_status
if MPI.COMM_WORLD.Get_rank():
    set_abort_status(3)
    sys.exit(3)
MPI.COMM_WORLD.recv(source=1)
"""


@pytest.mark.one_rank
def test_the_abort_status_of_mpi4py_is_kept() -> None:
    assert run_script(ABORTS, 2, timeout=30).returncode == 3


FORKED_AND_ENDS = """
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


@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("end", "status"),
    [("pass", 0), ("sys.exit(0)", 0), ("sys.exit(3)", 3), ("raise ValueError", 1), ("os._exit(4)", 4)],
)
def test_the_end_of_a_forked_child_is_its_own(end: str, status: int, tmp_path: Path) -> None:
    recording = {"MPIDIST_STATUS": str(tmp_path / "status"), "MPIDIST_TRACE": str(tmp_path / "trace")}
    job = run_script(FORKED_AND_ENDS.format(end=end), 2, str(tmp_path / "model"), env=recording, timeout=30)
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == ["31", "31", f"child {status}"]


ONE_ASKS = """
import mpidist
comm = mpidist.Communicator()
if comm.rank == 0:
    try:
        comm.step_agreement()
    except mpidist.MismatchError as error:
        print("told")
else:
    try:
        comm.barrier()
    except mpidist.MismatchError as error:
        print("told")
print(comm.all_reduce("SUM", 1))
"""


@pytest.mark.one_rank
def test_a_step_agreement_on_one_rank_is_an_error_on_all() -> None:
    job = run_script(ONE_ASKS, 2, timeout=20)
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.split()) == ["2", "2", "told", "told"]


LONELY = """
import mpidist
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 0:
    mpidist.MultiWorkerMirroredStrategy()
else:
    import time; time.sleep(60)
"""


@pytest.mark.one_rank
def test_making_a_strategy_alone_has_a_deadline() -> None:
    job = run_script(LONELY, 2, env=deadlines(2, 0.3))
    assert job.returncode != 0
    assert re.search(r"has waited \d+ s for the other ranks in making the first strategy or communicator", job.stderr)
    assert "CollectiveTimeoutError" in job.stderr


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("call", ["all_gather_object", "broadcast_object", "split"])
def test_what_cannot_be_sent_is_an_error_on_all_ranks(comm: Communicator, call: str) -> None:
    bad: dict[str, Any] = {"all_gather_object": lambda: 0, "broadcast_object": lambda: 0, "split": -5}
    with pytest.raises((PeerError, AttributeError, TypeError, ValueError, ImportError)):
        getattr(comm, call)(bad[call] if comm.rank == 0 else 1)
    assert comm.all_reduce("SUM", 1) == comm.size


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("bad", [{"color": 2**40}, {"color": 0, "key": 2**40}, {"color": 0, "key": "a"}])
def test_a_split_that_mpi_cannot_do_is_an_error_on_all_ranks(comm: Communicator, bad: dict[str, Any]) -> None:
    with pytest.raises((ValueError, PeerError)):
        comm.split(**(bad if comm.rank == 0 else {"color": 0}))
    assert comm.all_reduce("SUM", 1) == comm.size


@pytest.mark.parametrize("count", [1, 10, 100_000])
@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_nan_is_kept(comm: Communicator, op: str, count: int) -> None:
    value = np.full(count, float(comm.rank))
    if comm.rank == 0:
        value[:] = np.nan
    assert np.isnan(comm.all_reduce(op, value)).all()
    assert np.isnan(comm.all_reduce(op, value.astype("f2"))).all()


@pytest.mark.parametrize("op", ["SUM", "MAX"])
def test_an_empty_list(comm: Communicator, op: str) -> None:
    assert comm.all_reduce(op, []) == []
    reduced = comm.reduce(op, [])
    assert reduced == ([] if comm.rank == 0 else None)


def test_out_that_is_another_input(comm: Communicator) -> None:
    first, second = np.arange(300.0), np.full(300, 7.0)
    from mpidist.experimental import CommunicationOptions

    options = CommunicationOptions(bytes_per_pack=1)
    comm.all_reduce("SUM", [first, second], out=[second, first], options=options)
    np.testing.assert_array_equal(second, np.arange(300.0) * comm.size)
    np.testing.assert_array_equal(first, 7.0 * comm.size)


@pytest.mark.parametrize("bytes_per_pack", [0, 1, 47])
def test_out_that_is_another_small_input(comm: Communicator, bytes_per_pack: int) -> None:
    from mpidist.experimental import CommunicationOptions

    values = [np.full(3, float(k)) for k in range(4)]
    comm.all_reduce("MAX", values, out=values[::-1], options=CommunicationOptions(bytes_per_pack=bytes_per_pack))
    assert [value.tolist() for value in values] == [[3.0 - k] * 3 for k in range(4)]


def test_a_masked_array_is_refused(comm: Communicator) -> None:
    with pytest.raises(TypeError, match=r"masked.*filled\(0\)"):
        comm.all_reduce("SUM", np.ma.masked_array([1.0, 2.0], mask=[False, True]))


@pytest.mark.min_ranks(2)
def test_an_announced_error_is_not_kept(comm: Communicator) -> None:
    class Large:
        """Something that a frame of the traceback refers to."""

    def fails() -> None:
        local = Large()
        seen.append(weakref.ref(local))
        raise KeyError("lost")

    seen: list[Any] = []
    with pytest.raises(KeyError), comm.shared_errors("a test"):
        fails()
    assert comm.all_reduce("SUM", 1) == comm.size
    gc.collect()
    assert seen[0]() is None


NEVER_WAITED = """
import numpy, mpidist
comm = mpidist.Communicator()
comm.all_reduce_async("SUM", numpy.ones(3 + comm.rank))
comm.close()
"""


@pytest.mark.one_rank
def test_a_work_that_nobody_waits_for_does_not_fail_in_silence() -> None:
    job = run_script(NEVER_WAITED, 2)
    assert "never waited for, ended with MismatchError" in job.stderr


GIVEN_UP = """
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


@pytest.mark.one_rank
def test_a_work_that_was_given_up_is_carried_through_at_the_end() -> None:
    job = run_script(GIVEN_UP, 2)
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


@pytest.mark.one_rank
@pytest.mark.parametrize("power", [3, 20])
def test_a_work_that_no_other_rank_starts_does_not_keep_the_job(power: int) -> None:
    for ranks_per_node in (None, 1):
        job = run_script(STARTED_ALONE, 2, str(power), "0", timeout=20, ranks_per_node=ranks_per_node)
        assert job.returncode == 0, job.stderr
        assert "never waited for, ended with PeerError: rank 0 was in all_reduce SUM" in job.stderr
        assert "when rank 1 has left the program" in job.stderr


@pytest.mark.one_rank
def test_the_deadline_of_a_work_holds_at_the_end_of_the_program() -> None:
    job = run_script(STARTED_ALONE, 2, "20", "60", timeout=20, env=deadlines(2))
    assert job.returncode != 0
    assert "rank 0 ends the job: the other ranks never called all_reduce SUM of float64(1048576,)" in job.stderr


LEFT_ALONE = """
import sys, mpidist
comm = mpidist.Communicator()
if comm.rank == 1:
    sys.exit()
try:
    comm.barrier()
except mpidist.PeerError:
    pass
try:
    with comm.shared_errors("a test"):
        raise KeyError("mine")
except KeyError as error:
    print(error)
"""


@pytest.mark.one_rank
def test_an_error_of_its_own_is_not_replaced_after_a_peer_has_left() -> None:
    job = run_script(LEFT_ALONE, 2)
    assert job.returncode == 0, job.stderr
    assert job.stdout.strip() == "'mine'"


DAEMON = """
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


@pytest.mark.one_rank
def test_a_thread_that_is_still_in_a_collective_at_the_end_ends_the_job() -> None:
    job = run_script(DAEMON, 2, timeout=25)
    assert job.returncode != 0
    assert "a thread was still in one of its collectives when the program ended" in job.stderr


DAEMON_WORK = """
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


@pytest.mark.one_rank
def test_waiting_thread_finishes_at_the_end() -> None:
    job = run_script(DAEMON_WORK, 2, timeout=30)
    assert (job.returncode, job.stdout.split()) == (0, ["[2.", "2.", "2.]"]), job.stderr


INTERRUPTED_START = """
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


@pytest.mark.one_rank
def test_interrupted_start_keeps_calls_in_order() -> None:
    job = run_script(INTERRUPTED_START, 2, timeout=30)
    assert sorted(job.stdout.split()) == ["2.0"] * 4 + ["20.0", "interrupted"], job.stderr


@pytest.mark.min_ranks(2)
def test_raising_handler_during_a_step_frees_the_lock() -> None:
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
