"""Coordinators whose workers, servers or chiefs die, hang or leave: the others go on or end, and nobody waits on."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.elastic.test_run import needs_ulfm
from tests.support.ranks.jobs import ROOT, run_script
from tests.support.speed import scaled

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

# Who is left ends within this time of what went wrong.
SOON_SECONDS = scaled(5.0)
ULFM = ("--with-ft", "ulfm")
WITH_AND_WITHOUT_ULFM = [
    pytest.param((), id="no-ulfm"),
    pytest.param(ULFM, id="ulfm", marks=needs_ulfm),
]


def job(
    case: str, folder: Path, jobs: str, flags: tuple[str, ...] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    ranks = sum(int(count) for count in re.findall(r":(\d+)", jobs))
    script = ROOT / "tests" / "parameter_server" / "fault_programs.py"
    done = run_script(script, ranks, case, str(folder), env={"MPIDIST_JOBS": jobs, **env}, flags=flags, timeout=50)
    ended = time.time()
    for moment in re.findall(r"KILLED ([\d.]+)", done.stdout)[-1:]:
        assert ended - float(moment) < SOON_SECONDS
    return done


def left(done: subprocess.CompletedProcess[str]) -> list[str]:
    return sorted(re.findall(r"LEFT (\w+ \d)", done.stdout))


@needs_ulfm
def test_other_workers_carry_out_what_a_killed_one_was_doing(tmp_path: Path) -> None:
    done = job("workers_die", tmp_path, "chief:1,ps:1,worker:3", ULFM)
    assert re.search(r"CARRIED OUT BY worker \d", done.stdout), done.stdout + done.stderr
    assert "COUNT 50 BY 2" in done.stdout
    assert re.search(r"worker \d \(rank \d\) was lost in .*die_at_first; 2 workers are left", done.stderr)
    assert f"LENGTHS {{{32 << 20}}}" in done.stdout
    lost = r"RankLostError: worker \d \(rank \d\), the last worker, was lost in .*index; start the job again"
    for what in ("JOIN", "FETCH", "SCHEDULE"):
        assert re.search(f"{what} {lost}", done.stdout), done.stdout
    assert "CHIEF AT THE END" in done.stdout
    assert left(done) == ["ps 0"]


@pytest.mark.long
@needs_ulfm
def test_a_worker_that_dies_while_a_large_argument_is_on_its_way(tmp_path: Path) -> None:
    done = job("worker_dies_taking", tmp_path, "chief:1,ps:1,worker:2", ULFM)
    assert f"LENGTHS {{{64 << 20}}}" in done.stdout, done.stdout + done.stderr
    assert left(done) == ["ps 0", "worker 1"]


@pytest.mark.long
def test_a_killed_worker_ends_the_job_where_mpi_does_not_survive_it(tmp_path: Path) -> None:
    done = job("workers_die", tmp_path, "chief:1,ps:1,worker:2")
    assert done.returncode != 0
    assert "CARRIED OUT" not in done.stdout


@needs_ulfm
def test_a_killed_server_is_an_error_to_the_program(tmp_path: Path) -> None:
    done = job("server_dies", tmp_path, "chief:1,ps:1,worker:1", ULFM)
    for what in ("JOIN", "READ"):
        assert re.search(rf"{what} (RankLost|Peer)Error: ps 0", done.stdout), done.stdout + done.stderr
    assert "CHIEF AT THE END" in done.stdout
    assert left(done) == ["worker 0"]


@pytest.mark.parametrize("flags", WITH_AND_WITHOUT_ULFM)
def test_when_the_chief_is_killed_the_others_end(tmp_path: Path, flags: tuple[str, ...]) -> None:
    done = job("chief_dies", tmp_path, "chief:1,ps:1,worker:2", flags)
    assert done.returncode != 0
    if flags:
        # Also those do not wait that are in a function.
        assert re.search(r"RankLostError: (the coordinator|chief 0 \(rank 0\)) was lost", done.stderr)
    assert left(done) == []


def test_when_the_chief_raises_the_job_ends(tmp_path: Path) -> None:
    done = job("chief_raises", tmp_path, "chief:1,ps:1,worker:1")
    assert done.returncode != 0
    assert "ZeroDivisionError: of the chief" in done.stderr


def test_when_the_chief_exits_with_functions_under_way_all_end(tmp_path: Path) -> None:
    done = job("chief_exits", tmp_path, "chief:1,ps:1,worker:2")
    assert done.returncode == 0, done.stderr
    assert left(done) == ["ps 0", "worker 0", "worker 1"]


@pytest.mark.parametrize("case", ["interrupted", pytest.param("launcher_interrupted", marks=pytest.mark.long)])
def test_an_interrupt_ends_the_job(tmp_path: Path, case: str) -> None:
    done = job(case, tmp_path, "chief:1,ps:1,worker:1")
    assert done.returncode != 0
    assert "CHIEF AT THE END" not in done.stdout
    if case == "interrupted":
        assert "KeyboardInterrupt" in done.stderr


def test_join_reports_which_worker_is_in_what(tmp_path: Path) -> None:
    done = job("worker_hangs", tmp_path, "chief:1,ps:1,worker:2", MPIDIST_WARN_AFTER="0.25")
    assert done.returncode == 0, done.stderr
    assert "HUNG READY" in done.stdout
    assert re.search(r"the coordinator has waited \d+ s for the scheduled functions; 0 functions are", done.stderr)
    assert re.search(r"worker 0 \(rank 2\) has been in \S*hang for \d s", done.stderr)
    assert "worker 1 (rank 3) is idle" in done.stderr


@pytest.mark.long
def test_a_chief_that_is_stopped_for_a_while_goes_on(tmp_path: Path) -> None:
    done = job("chief_pauses", tmp_path, "chief:1,ps:1,worker:2")
    assert done.returncode == 0, done.stderr
    assert "COUNT 40" in done.stdout
