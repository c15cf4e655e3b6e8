"""All-reduces that write into the results of other ranks: short transfers, refused access, deadlines, killed ranks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.elastic.test_run import needs_ulfm
from tests.support.ranks.cores import needs_core
from tests.support.ranks.jobs import run_script
from tests.support.speed import scaled

pytestmark = [pytest.mark.one_rank, pytest.mark.jobs, needs_core]

FAULTS = Path(__file__).parents[1] / "support" / "memory_faults.c"
START = """
import os, pathlib, signal, sys, time
import numpy as np
import mpidist
from mpidist.errors import CollectiveTimeoutError, PeerError
from tests.support.speed import scaled

mpidist.Communicator().close()
os.environ["MPIDIST_TIMEOUT"] = sys.argv[2]  # set after MPI starts, so that the start keeps its own timeout
comm = mpidist.Communicator()
rank, size = comm.rank, comm.size
pids = comm.all_gather_object(os.getpid())
marks = pathlib.Path(sys.argv[1])
count = 2_000_000  # several blocks for each rank
mine = (np.arange(count) % 1000 + rank).astype("f4")
right = (np.arange(count) % 1000 * size + sum(range(size))).astype("f4")

def wait_until(condition):
    end = time.monotonic() + scaled(20)
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)

def leave(*ranks):
    # mpirun ends the other ranks when one exits without MPI_Finalize.
    (marks / f"done {rank}").touch()
    wait_until(lambda: all((marks / f"done {r}").exists() for r in ranks or range(size)))
    os._exit(0)

def is_stopped(pid):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
"""


@pytest.fixture(name="faults", scope="module")
def _faults(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("the library that injects faults needs a C compiler")
    library = tmp_path_factory.mktemp("faults") / "memory_faults.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(FAULTS)], check=True)
    return str(library)


def run(
    program: str,
    ranks: int,
    marks: Path,
    faults: str = "",
    fault: str = "",
    timeout: float = 60,
    *flags: str,
    errors: bool = False,
) -> list[str]:
    """Run a program with a fault; return the lines that it printed, or those on stderr."""
    environment = {"MPIDIST_PUSH_FROM": "1", "MEMORY_FAULT": fault, "LD_PRELOAD": faults}
    arguments = (str(marks), str(scaled(timeout)))
    job = run_script(START + program, ranks, *arguments, env=environment, timeout=300, flags=flags)
    assert "Traceback" not in job.stderr, job.stderr
    return sorted((job.stderr if errors else job.stdout).splitlines())


@pytest.mark.parametrize("ranks", [2, 4])
def test_short_counts_are_continued(ranks: int, faults: str, tmp_path: Path) -> None:
    program = """
for _ in range(3):
    assert np.array_equal(comm.all_reduce("SUM", mine), right)
    assert all(np.array_equal(a, right) for a in comm.all_reduce("SUM", [mine] * 3))
print("right")
"""
    for function in ("readv", "writev"):
        assert run(program, ranks, tmp_path, faults, f"1 {function} 1 short") == ["right"] * ranks


@pytest.mark.long
@pytest.mark.all_cores
def test_results_are_complete_when_a_call_returns(tmp_path: Path) -> None:
    program = """
few = (np.arange(65_600) % 251).astype("f4")
given = [few + i + rank for i in range(89)]
expected = [few * size + i * size + sum(range(size)) for i in range(89)]
out = np.empty_like(few)
for i in range(100_000):
    mine = given[i % 89].copy()
    comm.all_reduce("SUM", mine, out=out)
    mine[:] = -1.0
    assert np.array_equal(out, expected[i % 89]), i
print("right")
"""
    assert run(program, 2, tmp_path) == ["right"] * 2


@pytest.mark.parametrize("function", ["readv", "writev"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_refused_access_fails_all_ranks(ranks: int, function: str, faults: str, tmp_path: Path) -> None:
    program = """
try:
    comm.all_reduce("SUM", mine)
except PeerError as error:
    assert "MPIDIST_READ_NEIGHBOURS=0" in str(error), error
    print("failed", flush=True)
leave()
"""
    assert run(program, ranks, tmp_path, faults, f"1 {function} 3 fail") == ["failed"] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_write_after_a_rank_has_left(ranks: int, faults: str, tmp_path: Path) -> None:
    """Rank 1 stops inside a piece; the others reach their deadline, use their arrays again, and let it continue."""
    program = """
out = np.zeros(count, "f4")
try:
    comm.all_reduce("SUM", mine, out=out)
except CollectiveTimeoutError:
    if rank == 1:
        (marks / "continued").touch()
out[:] = mine[:] = -1.0
(marks / f"refilled {rank}").touch()
if rank == 0:
    wait_until(lambda: all((marks / f"refilled {r}").exists() for r in range(size) if r != 1))
    os.kill(pids[1], signal.SIGCONT)
wait_until((marks / "continued").exists)
assert (out == -1).all() and (mine == -1).all()
print("unchanged", flush=True)
leave()
"""
    found = run(program, ranks, tmp_path, faults, "1 readv 4 stop", 2.0)
    assert found == ["unchanged"] * ranks


@needs_ulfm
def test_a_rank_stopped_in_a_write_is_named(faults: str, tmp_path: Path) -> None:
    program = """
try:
    comm.all_reduce("SUM", mine)
except CollectiveTimeoutError:
    if rank == 0:
        os.kill(pids[1], signal.SIGKILL)
leave(0)
"""
    said = run(program, 2, tmp_path, faults, "1 writev 2 stop", 2.0, "--with-ft", "ulfm", errors=True)
    assert any("rank 1 of this node did not stop writing within 1 s. Do not reuse the arrays" in line for line in said)


@pytest.mark.parametrize("fault", ["", "1 writev 1 slow"], ids=["", "inside a write"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_running_write_ends_before_the_error(ranks: int, fault: str, faults: str, tmp_path: Path) -> None:
    """A signal handler raises on rank 0 in the middle of calls; no element of its result changes after that."""
    program = """
class Stop(Exception): pass
def stop(*_): raise Stop
signal.signal(signal.SIGALRM, stop)
out = np.zeros(count, "f4")
try:
    if rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    while True:
        comm.all_reduce("SUM", mine, out=out)
except Stop:
    out[:] = -1.0
    for _ in range(50):
        assert (out == -1).all()
        time.sleep(0.01)
    print("unchanged", flush=True)
except (PeerError, CollectiveTimeoutError, RuntimeError):
    print("failed", flush=True)
leave()
"""
    assert run(program, ranks, tmp_path, faults, fault, 2.0) == ["failed"] * (ranks - 1) + ["unchanged"]


def test_a_rank_past_its_deadline_pushes_nothing(faults: str, tmp_path: Path) -> None:
    """Rank 0 gives up in its stripe and changes its input. Rank 1 must not get a sum, so rank 0 ends the job."""
    program = """
os.environ["MPIDIST_TIMEOUT"] = str(scaled(1.0 if rank == 0 else 60.0))
with_deadline = mpidist.Communicator()
try:
    assert np.array_equal(with_deadline.all_reduce("SUM", mine), right)
except CollectiveTimeoutError:
    mine[:] = -1.0
    print("deadline", flush=True)
"""
    assert run(program, 2, tmp_path, faults, "0 readv 2 slow") == ["deadline"]


@needs_ulfm
def test_elastic_ends_a_rank_stopped_in_a_write(faults: str, tmp_path: Path) -> None:
    """Rank 1 stops inside a write, and rank 2 is killed: rank 0 continues alone, and rank 1 writes nothing later."""
    program = """
import threading
from mpidist import elastic

def die():
    wait_until(lambda: is_stopped(pids[1]))
    os.kill(os.getpid(), signal.SIGKILL)

def train(state):
    if mpidist.size() == 1:
        assert not pathlib.Path(f"/proc/{pids[1]}").exists() or not is_stopped(pids[1])
        return "alone"
    with mpidist.Communicator() as everyone:
        if rank == 2:
            threading.Thread(target=die, daemon=True).start()
        everyone.all_reduce("SUM", mine)
        everyone.barrier()

print(elastic.run(train, elastic.State(step=0)), flush=True)
leave(0)
"""
    found = run(program, 3, tmp_path, faults, "1 writev 2 stop", 60, "--with-ft", "ulfm")
    assert found == ["alone"]


@needs_ulfm
@pytest.mark.parametrize("function", ["readv", "writev"])
def test_elastic_continues_after_a_kill(function: str, faults: str, tmp_path: Path) -> None:
    program = """
from mpidist import elastic

def train(state):
    with mpidist.Communicator() as everyone:
        for _ in range(5):
            result = everyone.all_reduce("SUM", np.ones(count, "f4"))
        return everyone.size, float(result[-1])

print(*elastic.run(train, elastic.State(step=0)), flush=True)
leave(0, 2)
"""
    found = run(program, 3, tmp_path, faults, f"1 {function} 5 kill", 60, "--with-ft", "ulfm")
    assert found == ["2 2.0"] * 2
