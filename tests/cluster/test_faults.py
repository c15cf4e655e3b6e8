"""Hosts that fail under a job that reduces round after round: a cable out for a while and for good, power cut."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.cluster.jobs import PLACEMENTS, results_in, start
from tests.cluster.lab import Lab

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

WARN_SECONDS, TIMEOUT_SECONDS = 2.0, 6.0
# How long after that deadline all ranks that the network still reaches have ended. They take up to 4 s to find out who
# keeps them waiting; those that catch the error and end wait 5 s for the others.
ENDED_SECONDS = 15.0
# Of ranks that raise where nobody hears of it, how much later.
UNHEARD_SECONDS = 10.0
# And of the launcher after the fault: mpirun waits for the host until Slurm takes it for dead, after SlurmdTimeout, 15
# s here, and up to as much between two looks.
LAUNCHER_SECONDS = 75.0
OUT_SECONDS = 5.0
HOSTS = PLACEMENTS["block"].hosts
LaunchersEnd = Future[CompletedProcess[str]]


class Rounds:
    """A job of programs/rounds.py that is going on.

    Attributes:
        folder: Where its ranks leave what became of them.
        launcher: What its launcher printed, when it has ended.
    """

    def __init__(self, folder: Path, launcher: LaunchersEnd) -> None:
        self.folder, self.launcher = folder, launcher

    def until(self, has_come: Callable[[], object], what: str, deadline: float) -> None:
        """Wait for something, until ``deadline`` of time.monotonic()."""
        while not has_come():
            assert time.monotonic() < deadline, f"not in time: {what}; results: {results_in(self.folder)}"
            time.sleep(0.05)

    def processes(self) -> set[int]:
        """Return the ranks that have a process."""
        mark, found = f"RESULTS={self.folder}".encode(), set()
        for entry in Path("/proc").iterdir():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if mark in variables:
                found |= {int(line.partition(b"=")[2]) for line in variables if line.startswith(b"PMIX_RANK=")}
        return found


@contextmanager
def going(lab: Lab, by: str, then: str, **env: str) -> Iterator[Rounds]:
    """Start it, and wait until all ranks reduce; the block ends when it is over."""
    with tempfile.TemporaryDirectory(dir=lab.scratch) as name, ThreadPoolExecutor(1) as thread:
        folder = Path(name)
        launcher = thread.submit(start, lab, folder, "rounds", then, by=by, env=env, timeout=150.0)
        job = Rounds(folder, launcher)
        is_on = folder / "going"
        job.until(lambda: is_on.exists() or launcher.done(), "its first rounds", time.monotonic() + 60)
        assert is_on.exists(), launcher.result()
        yield job


@pytest.fixture
def repair(lab: Lab) -> Iterator[Callable[[str], None]]:
    """Start a host anew, whatever became of it, and wait until Slurm runs steps on all hosts again."""
    broken: list[str] = []
    yield broken.append
    for host in broken:
        lab.off(host)
        lab.boot(host)
    lab.wait_until_idle(60)
    deadline = time.monotonic() + 60
    while lab.run("login", ["srun", "--nodes=4", "--ntasks-per-node=1", "true"], timeout=30).returncode != 0:
        assert time.monotonic() < deadline, "Slurm starts nothing on all hosts after the repair"


@pytest.mark.parametrize("by", ["mpirun", "srun"])
def test_a_cable_that_is_out_for_a_while_costs_time_only(lab: Lab, by: str) -> None:
    with going(lab, by, "raises", MPIDIST_TIMEOUT="60") as job:
        lab.cut("node1")
        time.sleep(OUT_SECONDS)  # the fault itself
        lab.mend("node1")
        (job.folder / "enough").touch()
        done = job.launcher.result()
        results = results_in(job.folder)
    assert done.returncode == 0, done.stderr
    # They compare every result with what it must be.
    assert {rank: found["error"] for rank, found in results.items()} == dict.fromkeys(range(len(HOSTS)))
    assert len({found["rounds"] for found in results.values()}) == 1


@pytest.mark.parametrize(
    ("fault", "lost", "then", "by"),
    [
        ("cut", 1, "raises", "mpirun"),
        ("cut", 1, "ends", "srun"),
        ("off", 1, "ends", "mpirun"),
        ("off", 1, "raises", "srun"),
        ("cut", 0, "ends", "srun"),
    ],
)
def test_a_host_that_is_lost_is_named_by_all_others_and_the_job_ends(
    lab: Lab,
    repair: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
    fault: str,
    lost: int,
    then: str,
    by: str,
) -> None:
    host, gone = f"node{lost}", {rank for rank, at in enumerate(HOSTS) if at == lost}
    reachable = set(range(len(HOSTS))) - gone
    limits = {"MPIDIST_WARN_AFTER": f"{WARN_SECONDS:g}", "MPIDIST_TIMEOUT": f"{TIMEOUT_SECONDS:g}"}
    with going(lab, by, then, **limits) as job:
        repair(host)
        getattr(lab, fault)(host)
        began = time.monotonic()
        ended = began + TIMEOUT_SECONDS + ENDED_SECONDS
        job.until(lambda: not reachable & job.processes(), "the end of all others", ended)
        results = results_in(job.folder)
        unheard = ended + UNHEARD_SECONDS
        job.until(lambda: not results_in(job.folder).keys() & job.processes(), "the end of ranks cut off", unheard)
        job.until(job.launcher.done, "the end of the launcher", began + LAUNCHER_SECONDS)
        launchers_end = time.monotonic() - began
        done = job.launcher.result()
    # The first that raises ends the job, the others may just be about to.
    told = reachable if then == "ends" else reachable & results.keys()
    check_reports({rank: results[rank] for rank in told}, done, gone)
    with capsys.disabled():
        errors = max(results[rank]["at"] for rank in told) - began
        print(f"\n{host} {fault}, {by}: errors within {errors:.1f} s, the launcher within {launchers_end:.1f} s")


def check_reports(results: dict[int, Any], done: CompletedProcess[str], gone: set[int]) -> None:
    """Check that ranks name those that are gone, in their errors and in the report before."""
    named = f"  ranks {min(gone)}-{max(gone)}: gave no answer within 1.5 s: its host cannot be reached"
    assert done.returncode != 0
    assert results
    for found in results.values():
        assert found["error"] == "CollectiveTimeoutError"
        assert named in found["text"]
    report, *_ = done.stderr.partition("Traceback")
    assert "for the other ranks in all_reduce SUM" in report, done.stderr
    assert named in report, done.stderr
