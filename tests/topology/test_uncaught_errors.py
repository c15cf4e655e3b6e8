"""Uncaught errors: the job ends soon, not with code 0, and the traceback names the rank."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpidist.topology import install_excepthook
from tests.support.ranks.jobs import child_environment, mpirun_command, run_script
from tests.support.speed import scaled

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

# From the failure of the rank to the end of mpirun.
LIMIT_SECONDS = scaled(5.0)

INSTALL = "from mpidist.topology import install_excepthook; install_excepthook()\n"
MPI = "import os, signal, sys; from mpi4py import MPI; world = MPI.COMM_WORLD\n"
FAILS = "if world.Get_rank() == 1: raise ArithmeticError('only here')\n"
WAIT = "\nworld.Barrier()\n"
PRINTED = re.compile(r"^rank (\d) of \d on host \S+:\nTraceback", re.MULTILINE)


def test_error_of_one_rank_ends_the_job() -> None:
    # Only the hook flushes a line without an end.
    done = run_script(INSTALL + MPI + "print(f'rank {world.Get_rank()} said this', end='')\n" + FAILS + WAIT, 2)
    assert done.returncode == 1
    assert PRINTED.findall(done.stderr) == ["1"]
    assert done.stderr.count("ArithmeticError: only here") == 1
    assert "rank 1 said this" in done.stdout


# Like torch.distributed.init_process_group.
BUFFERS = """
import io
ours = sys.excepthook
def buffering(*args):
    stderr, sys.stderr = sys.stderr, io.StringIO()
    ours(*args)
    stderr.write(sys.stderr.getvalue())
    sys.stderr = stderr
sys.excepthook = buffering
world.Barrier()
raise ArithmeticError("on all")
"""
REPORTS_ITSELF = """
import sys
def report(kind, error, trace):
    print("reported", kind.__name__, file=sys.stderr)
    raise OSError("the report failed")
sys.excepthook = report
"""


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        (INSTALL + MPI + BUFFERS, "ArithmeticError: on all"),
        (INSTALL + MPI + "if world.Get_rank() == 1: raise KeyboardInterrupt", "KeyboardInterrupt"),
        (INSTALL + MPI + "if world.Get_rank() == 1: os.kill(os.getpid(), signal.SIGINT)", "KeyboardInterrupt"),
        (REPORTS_ITSELF + INSTALL + INSTALL + MPI + FAILS, "reported ArithmeticError"),
    ],
    ids=["buffered stderr", "interrupt", "signal", "previous hook fails"],
)
def test_error_is_printed_below_the_rank(program: str, printed: str) -> None:
    done = run_script(program + WAIT, 2)
    assert done.returncode != 0
    assert "rank 1 of 2 on host " in done.stderr or printed.endswith("on all")
    assert len(re.findall(rf"^{printed}$", done.stderr, re.MULTILINE)) == done.stderr.count(" of 2 on host ") >= 1


def test_closed_output_does_not_stop_the_abort() -> None:
    done = run_script(INSTALL + MPI + "sys.stdout.close(); sys.stderr = None\n" + FAILS + WAIT, 2)
    assert done.returncode == 1


def test_error_before_mpi_starts_exits_with_1() -> None:
    done = run_script(INSTALL + "raise ImportError('no such module')", 2)
    assert done.returncode == 1
    assert "no such module" in done.stderr
    assert "on host" not in done.stderr


CALLS_HOOK = "if world.Get_rank() == 1: sys.excepthook(ArithmeticError, ArithmeticError('told'), None)\n"
FAILS_IN_THREAD = "import threading; thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()\n"


@pytest.mark.parametrize(
    ("program", "setting"),
    [
        (CALLS_HOOK, "0"),
        (FAILS_IN_THREAD, "0"),
        ("sys.ps1 = '>>> '\n" + CALLS_HOOK, "1"),
        ("os.getpid = lambda: -1\n" + CALLS_HOOK, "1"),
    ],
    ids=["turned off", "turned off in a thread", "prompt", "forked child"],
)
def test_job_continues(program: str, setting: str) -> None:
    script = INSTALL + MPI + program + WAIT + "print('after')"
    done = run_script(script, 2, env={"MPIDIST_ABORT_ON_EXCEPTION": setting})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("after") == 2
    assert "told" in done.stderr or "ZeroDivisionError" in done.stderr
    assert "on host" not in done.stderr


def test_one_rank_alone_prints_what_python_prints() -> None:
    done = _python(INSTALL + MPI + "raise ArithmeticError('alone')")
    assert done.returncode == 1
    assert done.stderr.endswith("\nArithmeticError: alone\n")
    assert "on host" not in done.stderr


def test_wrong_setting_is_an_error_when_it_is_read() -> None:
    # `import mpidist` alone leaves it to doctor.
    uses = (
        "import mpidist.topology; mpidist.topology.import_mpi()",
        "import mpidist.topology; from mpi4py import MPI; mpidist.topology.world_topology()",
        MPI + INSTALL,
    )
    for script in uses:
        done = _python(script, MPIDIST_ABORT_ON_EXCEPTION="yes")
        assert done.returncode == 1, script
        assert "MPIDIST_ABORT_ON_EXCEPTION='yes': expected 0 or 1" in done.stderr
    assert _python(INSTALL, MPIDIST_ABORT_ON_EXCEPTION="yes").returncode == 0


def _python(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, env=child_environment(env), capture_output=True, text=True, timeout=scaled(60), check=False
    )


def test_installing_twice_is_installing_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    install_excepthook()
    first = sys.excepthook
    install_excepthook()
    assert sys.excepthook is first


def test_exit_code_under_the_runner_of_mpi4py(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(INSTALL + MPI + "if world.Get_rank() == 1: sys.exit(3)" + WAIT)
    runner = "import runpy, sys\nsys.argv[0] = 'mpi4py'\nrunpy.run_module('mpi4py.run', run_name='__main__')"
    assert run_script(runner, 2, str(program)).returncode != 0


def test_stopped_launcher_keeps_no_rank_waiting(tmp_path: Path) -> None:
    script = f"""
import pathlib, time
from tests.support.speed import scaled
launcher = os.getppid()
process = world.allgather(os.getpid())[1]
if world.Get_rank() == 1:
    world.Recv(bytearray(1))
    raise ArithmeticError("only here")
os.kill(launcher, signal.SIGSTOP)
try:
    world.Send(bytearray(1), 1)
    give_up, state = time.monotonic() + scaled(30), ""
    while state != "Z" and time.monotonic() < give_up:
        state = pathlib.Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()[0]
        time.sleep(0.05)
    pathlib.Path({str(tmp_path)!r}, "state").write_text(state)
finally:
    os.kill(launcher, signal.SIGCONT)
world.Recv(bytearray(1), 1)
"""
    done = run_script(INSTALL + MPI + script, 2)
    assert done.returncode != 0
    assert (tmp_path / "state").read_text() == "Z"
    assert "ArithmeticError: only here" in done.stderr


BEGIN = """
import atexit, os, signal, sys, threading, time
import numpy as np
import mpidist
from mpi4py import MPI
comm = mpidist.Communicator()
def now():
    print("at", time.monotonic(), flush=True)
"""
FAILURES = {
    "between calls": """
def fails():
    now()
    raise ArithmeticError("only here")
""",
    "in run": """
strategy = mpidist.MultiWorkerMirroredStrategy()
def step():
    if comm.rank == 1:
        now()
        raise ArithmeticError("only here")
    return mpidist.get_replica_context().all_reduce("SUM", 1.0)
def fails():
    try:
        strategy.run(step)
    finally:
        time.sleep(1)  # the others raise PeerError in this time
""",
    "in a collective": """
def fails():
    def handler(*_):
        now()
        raise ArithmeticError("only here")
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    other = mpidist.Communicator()
    other.all_reduce("SUM", np.ones(1000))
""",
    "in a thread": """
def fails():
    def read():
        now()
        raise ArithmeticError("only here")
    thread = threading.Thread(target=read, name="reader")
    thread.start()
    thread.join()
    time.sleep(60)
""",
}
BYSTANDERS = {
    "in a collective": """
    if sys.argv[1] == "in run":
        strategy.run(step)
    if sys.argv[1] == "in a collective":
        other = mpidist.Communicator()
    comm.all_reduce("SUM", 1.0)
""",
    "in MPI": """
    MPI.COMM_WORLD.Recv(np.empty(1), source=1)
""",
    "computing": """
    while True:
        np.ones(1000).sum()
""",
}
PAIRS = [*((failure, "in a collective") for failure in FAILURES), ("between calls", "in MPI"), ("in run", "computing")]


@pytest.mark.parametrize(("failure", "doing"), PAIRS)
def test_one_traceback_and_the_end(failure: str, doing: str) -> None:
    program = BEGIN + FAILURES[failure] + "if comm.rank == 1:\n    fails()\nelse:" + BYSTANDERS[doing]
    job = run_script(program, 3, failure)
    ended = time.monotonic()
    assert job.returncode not in (0, None)
    failed = next(float(line.split()[1]) for line in job.stdout.splitlines() if line.startswith("at "))
    assert ended - failed < LIMIT_SECONDS
    assert re.findall(r"^rank (\d) of 3 on host ", job.stderr, re.MULTILINE) == ["1"]
    assert job.stderr.count("ArithmeticError: only here") == job.stderr.count("Traceback") == 1
    assert "most recent call first" not in job.stderr


def test_exit_of_one_rank_while_others_wait() -> None:
    job = run_script(BEGIN + "if comm.rank == 1:\n    now()\n    sys.exit(3)\ncomm.barrier()\n", 3)
    ended = time.monotonic()
    assert job.returncode not in (0, None)
    assert ended - float(job.stdout.split()[1]) < LIMIT_SECONDS
    assert "rank 0 was in barrier" in job.stderr
    assert "when rank 1 has left the program" in job.stderr
    assert "Traceback" not in job.stderr


CATCHES = """
if comm.rank == 0:
    try:
        comm.all_reduce("NO SUCH OPERATION", 1.0)
    except ValueError:
        time.sleep(60)
comm.barrier()
"""


def test_peer_error_is_printed_if_the_cause_is_caught() -> None:
    """By rank 1, the first rank that raises it."""
    job = run_script(BEGIN + CATCHES, 3)
    assert job.returncode != 0
    assert re.findall(r"^rank (\d) of 3 on host \S+:\n\S*PeerError", job.stderr, re.MULTILINE) == ["1"]
    assert "Traceback" not in job.stderr


def test_exit_code_of_one_rank_if_no_rank_waits() -> None:
    program = BEGIN + "if comm.rank == 1:\n    sys.exit(3)\ntime.sleep(0.5)\nprint('work is done')\n"
    job = run_script(program, 3)
    assert job.returncode == 3
    assert job.stdout.split("\n").count("work is done") == 2


IGNORED = """
class Broken:
    def __del__(self):
        raise ArithmeticError("in del")
def at_the_end():
    raise ArithmeticError("at the end")
if comm.rank == 1:
    Broken()
    atexit.register(at_the_end)
    stopped = threading.Thread(target=sys.exit)
    stopped.start()
    stopped.join()
comm.barrier()
print("work is done")
"""


def test_errors_that_python_ignores_name_the_rank() -> None:
    job = run_script(BEGIN + IGNORED, 2)
    assert job.returncode == 0, job.stderr
    assert job.stdout.split("\n").count("work is done") == 2
    assert job.stderr.count("rank 1 of 2 on host ") == 2
    assert "ArithmeticError: in del" in job.stderr
    assert "ArithmeticError: at the end" in job.stderr


READY = """
open(f"{sys.argv[1]}/{comm.rank}", "w").write(str(os.getpid()))
if comm.rank == 0:
    comm.barrier()
while True:
    time.sleep(1)
"""


@pytest.mark.parametrize("target", ["mpirun", "the terminal", "a rank"])
def test_interrupt_ends_the_job(tmp_path: Path, target: str) -> None:
    """Ctrl-C goes to the launcher, or to its process group if a shell script has started it."""
    program = tmp_path / "program.py"
    program.write_text(BEGIN + READY)
    job = subprocess.Popen(
        [*mpirun_command(), "-n", "3", sys.executable, str(program), str(tmp_path)],
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        pids = [_read(tmp_path / str(rank)) for rank in range(3)]
        start = time.monotonic()
        if target == "mpirun":
            job.send_signal(signal.SIGINT)
        elif target == "the terminal":
            os.killpg(job.pid, signal.SIGINT)
        else:
            os.kill(pids[1], signal.SIGINT)
        _, stderr = job.communicate(timeout=scaled(30))
        assert time.monotonic() - start < LIMIT_SECONDS
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode != 0
    assert "most recent call first" not in stderr
    assert stderr.count("Traceback") <= 1
    if target == "a rank":
        assert PRINTED.findall(stderr) == ["1"]
        assert "KeyboardInterrupt" in stderr


def _read(path: Path) -> int:
    give_up = time.monotonic() + scaled(30)
    while not path.exists() or not path.read_text():
        assert time.monotonic() < give_up, f"the ranks did not write {path}"
        time.sleep(0.05)
    return int(path.read_text())


# Errors that all ranks raise ------------------------------------------------------------------------------------

DIFFERENT = """
import sys, time, numpy, mpidist
comm = mpidist.Communicator()
caught = [int(rank) for rank in sys.argv[2:]]
try:
    comm.all_reduce("SUM", numpy.ones(1 + (comm.rank == int(sys.argv[1]))))
except mpidist.MismatchError:
    if comm.rank not in caught:
        raise
time.sleep(20)
"""


@pytest.mark.parametrize(
    ("outlier", "caught", "full", "prints"),
    [(1, (), "0", "01"), (2, (0,), "0", "2"), (2, (0, 2), "0", ""), (1, (), "1", "0123")],
    ids=["rank 0 and the outlier", "outlier", "only the message", "full tracebacks"],
)
def test_mismatch_is_printed_by(outlier: int, caught: tuple[int, ...], full: str, prints: str) -> None:
    """Rank 0 and the first rank of each differing call. If they catch the error, the others print its message."""
    start = time.monotonic()
    arguments = [str(outlier), *map(str, caught)]
    job = run_script(DIFFERENT, 4, *arguments, env={"MPIDIST_FULL_TRACEBACK": full}, ranks_per_node=2)
    assert job.returncode == 1
    assert time.monotonic() - start < scaled(15)
    # A rank that has printed it ends the job, maybe before another one has.
    found = PRINTED.findall(job.stderr)
    assert {*found} <= {*prints}
    assert bool(found) == bool(prints)
    assert job.stderr.count("Traceback") == len(found)
    assert job.stderr.count("MismatchError: the ranks made") >= 1


LATE = """
import time, numpy, mpidist
comm = mpidist.Communicator()
if comm.rank == {late}:
    time.sleep(60)
comm.all_reduce("SUM", numpy.ones(1), options=mpidist.experimental.CommunicationOptions(timeout_seconds={timeout}))
"""


@pytest.mark.parametrize(("late", "prints"), [(5, "0"), (0, "1")])
def test_report_is_printed_by_the_first_waiting_rank(late: int, prints: str) -> None:
    job = run_script(LATE.format(late=late, timeout=scaled(1)), 6, ranks_per_node=2)
    assert job.returncode != 0
    assert PRINTED.findall(job.stderr) == [prints]
    assert job.stderr.count("CollectiveTimeoutError: rank") == 1
