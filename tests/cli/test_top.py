"""``python -m mpidist top``: where the ranks of a job are, from the files that MPIDIST_STATUS has them write."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mpidist.__main__ import main
from mpidist.cli.top import GONE, SILENT, screen, states_of
from mpidist.collectives.observe.job_status import (
    COMPUTING,
    ENDED,
    FAILED,
    RUNNING,
    WAITING,
    Activity,
    RankReport,
    StatusFolder,
    WorkCount,
    read_report,
    read_status_folder,
    status_path,
    write_report,
)
from tests.support.ranks.cores import needs_core
from tests.support.ranks.jobs import child_environment, mpirun_command, run_script
from tests.support.speed import scaled

pytestmark = pytest.mark.one_rank

NOW = 1_000_000.0
SUM = "all_reduce SUM of float64(5,)"


def report(rank: int, ranks: int = 4, **changes: Any) -> RankReport:
    return dataclasses.replace(
        RankReport(
            rank=rank,
            ranks=ranks,
            job="one",
            host=f"node{rank // 8}",
            process=1000 + rank,
            born=1,
            program="train.py --epochs 3",
            started=NOW - 100.0,
            written=NOW,
            every=1.0,
            state=RUNNING,
            error="",
            activity=Activity(WAITING, SUM, 17, "communicator 1", 11.0, "/home/me/net/train.py:41 (step)"),
            totals=WorkCount(16, 17, 640, 1.0, 0.0, 0.0),
            rates=WorkCount(1.5, 2.0, 2048.0, 0.1, 0.0, 0.0),
            straggler="",
        ),
        **changes,
    )


def late(site: str = "/home/me/net/train.py:30 (load)") -> Activity:
    return Activity(COMPUTING, "barrier", 16, "communicator 1", 12.0, site)


def shown(reports: list[RankReport], now: float = NOW, *, there: bool = True, width: int = 300) -> list[str]:
    folder = StatusFolder(reports, 0, [])
    return screen(folder, states_of(folder, now, lambda _: there), now, width, 40)


def test_the_rank_the_others_wait_for_comes_first() -> None:
    lines = shown([report(0), report(1), report(2, activity=late()), report(3)])
    assert lines[0] == "job of 4 ranks on node0: train.py --epochs 3"
    assert lines[1] == "running for 1 min 40 s; 1.5 steps/s, 2 collectives/s, 2 KiB/s on each rank"
    assert lines[3:] == [
        "ranks   for  steps/s  bytes/s",
        "2      12 s      1.5    2 KiB  is at net/train.py:30 (load); its last collective: barrier, number 16",
        f"0-1,3  11 s      1.5    2 KiB  waits in {SUM}, number 17, at net/train.py:41 (step)",
    ]


def test_ten_thousand_ranks_fit_on_a_screen() -> None:
    reports = [report(rank, 10_000, every=20.0) for rank in range(10_000) if rank != 77]
    reports[5] = dataclasses.replace(reports[5], activity=late())
    for odd in range(200, 2_200, 2):
        reports[odd] = dataclasses.replace(reports[odd], activity=late(f"/home/me/data.py:{odd % 60} (read)"))
    reports[9_000] = dataclasses.replace(reports[9_000], written=NOW - 300.0)
    folder = StatusFolder(reports, 0, [])
    lines = screen(folder, states_of(folder, NOW, lambda _: True), NOW, 100, 24)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert lines[4].split()[:3] == ["9001", "5", "min"], "the one that has fallen silent first"
    assert lines[5].split()[:3] == ["77", "-", "-"], "then the one that has written nothing"
    assert lines[6].startswith("5 ")
    assert "net/train.py:30" in lines[6]
    assert lines[-1].startswith("and ")
    assert "ranks; all: --json" in lines[-1]


@pytest.mark.parametrize(
    ("changes", "age", "is_there", "head", "line"),
    [
        (
            {"state": ENDED},
            300.0,
            True,
            "the job has ended, after 1 min 40 s, 5 min ago",
            "5 min - - ended its program",
        ),
        (
            {"state": FAILED, "error": "ValueError: no rows"},
            7.0,
            False,
            "the job has failed, after 1 min 40 s, 7 s ago",
            "7 s - - failed with ValueError: no rows, at net/train.py:41 (step)",
        ),
        (
            {},
            3700.0,
            False,
            "the job was killed, after 1 min 40 s, 1 h 1 min ago",
            f"1 h 1 min - - has ended without a last report, as by kill -9; it waits in {SUM}",
        ),
        (
            {},
            60.0,
            True,
            "the job was last heard of, after 1 min 40 s, 1 min ago",
            "1 min - - has written nothing since",
        ),
    ],
)
def test_a_job_that_is_over(changes: dict[str, Any], age: float, is_there: bool, head: str, line: str) -> None:
    lines = shown([report(rank, **changes) for rank in range(4)], NOW + age, there=is_there)
    assert lines[1] == head
    assert " ".join(lines[4].split()).startswith(f"0-3 {line}")
    assert len(lines) == 5


def test_a_straggler_is_named_above_the_table() -> None:
    verdict = "rank 2 (node0) is 11.8 ms late in 92% of steps"
    lines = shown([report(0, straggler=verdict), *(report(rank) for rank in range(1, 4))])
    assert lines.index(verdict) < lines.index("")


def test_text_cannot_control_the_terminal(tmp_path: Path) -> None:
    write_report(tmp_path, report(0, 1, program="\x1b[2Jtrain.py\n"))
    assert read_report(status_path(tmp_path, 0)).program == "?[2Jtrain.py?"


def test_files_are_whole_private_and_no_links(tmp_path: Path) -> None:
    folder = tmp_path / "status"
    folder.mkdir()
    write_report(folder, report(0, 1))
    assert read_report(status_path(folder, 0)) == report(0, 1)
    assert stat.S_IMODE(status_path(folder, 0).stat().st_mode) == 0o600
    assert [path.name for path in folder.iterdir()] == ["status-rank-0000.json"]
    status_path(folder, 1).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        write_report(folder, report(1, 2))
    with pytest.raises(OSError, match="symbolic link"):
        read_report(status_path(folder, 1))
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "is not a file of this kind"),
        ("{}", "is not a file of this kind"),
        ("[]", "is not a file of this kind"),
        pytest.param("[" * 60_000, "is not a file of this kind", id="deep"),
        ('{"format": "mpidist status 1"}', "has the format 'mpidist status 1', not 'mpidist record 3'. Read it with"),
        ('{"format": "mpidist record 3"}', "is not a file of this kind. Name the folder"),
        ('{"format": "mpidist record 3", "rank": "0"}', "is not a file of this kind"),
    ],
)
def test_other_files_are_refused(content: str, problem: str, tmp_path: Path) -> None:
    status_path(tmp_path, 0).write_text(content)
    with pytest.raises(ValueError, match=problem):
        read_status_folder(tmp_path)


def test_short_writes_leave_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:100]))
    write_report(tmp_path, report(0, 1))
    assert read_report(status_path(tmp_path, 0)) == report(0, 1)


def test_files_of_an_earlier_job_are_left_out(tmp_path: Path) -> None:
    for rank in range(4):
        write_report(tmp_path, report(rank, job="before", started=NOW - 900.0))
    for rank in range(2):
        write_report(tmp_path, report(rank, 2))
    found = read_status_folder(tmp_path)
    assert [each.rank for each in found.reports] == [0, 1]
    assert found.others == 2


def test_a_missing_folder_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MPIDIST_STATUS", raising=False)
    assert main(["top"]) == 2
    assert "MPIDIST_STATUS: python -m mpidist top DIR" in capsys.readouterr().err
    assert main(["top", str(tmp_path)]) == 2
    assert f"Start the job with MPIDIST_STATUS={tmp_path}" in capsys.readouterr().err


# Jobs -----------------------------------------------------------------------------------------------------------------


SLEEPS = """
import time, numpy, mpidist
strategy = mpidist.MultiWorkerMirroredStrategy()

def step():
    return mpidist.get_replica_context().all_reduce("SUM", numpy.ones(1000))

def load():
    time.sleep(600)

for _ in range(20):
    strategy.run(step)
if mpidist.rank() == 2:
    load()
strategy.run(step)
"""


@contextmanager
def job(folder: Path, ranks: int, source: str = SLEEPS) -> Iterator[subprocess.Popen[bytes]]:
    script = folder.parent / "train.py"
    script.write_text(source)
    command = [*mpirun_command(), "-n", str(ranks), sys.executable, str(script)]
    environment = child_environment({"MPIDIST_STATUS": str(folder)})
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, **quiet) as running:
        try:
            yield running
        finally:
            running.terminate()
            running.wait(30)


def top(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "mpidist", "top", str(folder), *arguments]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=scaled(60))
    return done.stdout


def until(is_so: Callable[[], bool], seconds: float = 60.0) -> None:
    give_up = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < give_up
        time.sleep(0.1)


def kinds(folder: Path) -> dict[int, str]:
    text = top(folder, "--json")
    return {each["rank"]: each["kind"] for each in json.loads(text)["ranks"]} if text else {}


@pytest.mark.jobs
def test_sleeping_and_killed_ranks_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "status"
    sleeping = SLEEPS.splitlines().index("    time.sleep(600)") + 1
    waiting = (
        SLEEPS.splitlines().index('    return mpidist.get_replica_context().all_reduce("SUM", numpy.ones(1000))') + 1
    )
    with job(folder, 4) as running:
        until(lambda: kinds(folder) == {0: WAITING, 1: WAITING, 2: COMPUTING, 3: WAITING})
        lines = top(folder, "--once").splitlines()
        assert lines[0].startswith("job of 4 ranks on ")
        assert lines[1].startswith("running for ")
        assert lines[4].startswith("2 ")
        assert f"train.py:{sleeping} (load); its last collective: all_reduce SUM of float64(1000,), " in lines[4]
        assert lines[5].startswith("0-1,3 ")
        assert "waits in all_reduce SUM of float64(1000,), number " in lines[5]
        assert f"train.py:{waiting} (step)" in lines[5]
        totals = [each["report"]["totals"] for each in json.loads(top(folder, "--json"))["ranks"]]
        assert [each["steps"] for each in totals] == [21, 21, 20, 21]
        assert [each["nbytes"] >= 20 * 8000 for each in totals] == [True] * 4
        os.kill(read_report(status_path(folder, 1)).process, signal.SIGKILL)
        running.wait(60)
        until(lambda: set(kinds(folder).values()) == {GONE})
    assert "\nthe job was killed, after " in top(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name for path in folder.iterdir()} >= {status_path(folder, rank).name for rank in range(4)}


@pytest.mark.long
@pytest.mark.jobs
def test_a_stopped_rank_falls_silent(tmp_path: Path) -> None:
    folder = tmp_path / "status"
    with job(folder, 2, SLEEPS.replace("== 2", "== 1")):
        until(lambda: kinds(folder) == {0: WAITING, 1: COMPUTING})
        stopped = read_report(status_path(folder, 1)).process
        os.kill(stopped, signal.SIGSTOP)
        until(lambda: kinds(folder) == {0: WAITING, 1: SILENT})
        os.kill(stopped, signal.SIGCONT)
        until(lambda: kinds(folder) == {0: WAITING, 1: COMPUTING})


SHORT = """
import numpy, mpidist
with mpidist.Communicator() as comm:
    for _ in range(50):
        comm.all_reduce("SUM", numpy.ones(5))
    print(comm._channel.executor.fast.count, flush=True)
"""


@needs_core
@pytest.mark.jobs
def test_status_keeps_the_fast_path_enabled(tmp_path: Path) -> None:
    done = run_script(SHORT, 2, env={"MPIDIST_STATUS": str(tmp_path / "new" / "status")})
    assert done.returncode == 0, done.stderr
    assert max(map(int, done.stdout.split())) > 25, "all but the first, and those that had to wait"
    assert [each.totals.nbytes >= 50 * 40 for each in read_status_folder(tmp_path / "new" / "status").reports] == [
        True
    ] * 2
    assert kinds(tmp_path / "new" / "status") == {0: ENDED, 1: ENDED}


@pytest.mark.jobs
def test_one_process_and_an_error(tmp_path: Path) -> None:
    done = run_script(
        "import mpidist\ncomm = mpidist.Communicator()\nraise ValueError('no rows')",
        1,
        env={"MPIDIST_STATUS": str(tmp_path / "status"), "MPIDIST_GUARD": "0"},
    )
    assert done.returncode == 1
    assert "failed with ValueError: no rows, at " in top(tmp_path / "status")


RECEIVES = """
import time, numpy, mpidist
comm = mpidist.Communicator()
if comm.rank == 0:
    comm.recv(numpy.empty(5), 1)
else:
    time.sleep(600)
"""


@pytest.mark.long
@pytest.mark.jobs
def test_a_wait_for_a_message_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / "status"
    with job(folder, 2, RECEIVES):
        until(lambda: kinds(folder) == {0: WAITING, 1: COMPUTING})
        assert "waits in recv from rank 1 " in top(folder)


HANGS = """
import threading, mpidist
from mpidist.collectives.observe import record
from mpidist.collectives.observe.job_status import StatusFile
began = threading.Event()

def hang(*_):
    assert threading.current_thread() is not threading.main_thread()
    began.set()
    threading.Event().wait()

StatusFile.write, record.END_SECONDS = hang, 0.2
comm = mpidist.Communicator()
began.wait()
"""


@pytest.mark.jobs
@pytest.mark.parametrize(("last", "code"), [("", 0), ("raise ValueError('no rows')", 1)])
def test_a_hanging_file_system_blocks_no_exit(last: str, code: int, tmp_path: Path) -> None:
    done = run_script(HANGS + last, 2, env={"MPIDIST_STATUS": str(tmp_path / "status")})
    assert done.returncode == code
    assert ("ValueError: no rows" in done.stderr) == bool(last)


FAILS_TWICE = """
import mpidist
from mpidist.collectives.channel.shutdown import on_uncaught_error

class Mute(Exception):
    def __str__(self):
        raise LookupError

on_uncaught_error(lambda _: 1 / 0)
comm = mpidist.Communicator()
if comm.rank == 1:
    raise Mute
comm.barrier()
"""


@pytest.mark.jobs
def test_an_error_without_a_text_is_reported(tmp_path: Path) -> None:
    done = run_script(FAILS_TWICE, 2, env={"MPIDIST_STATUS": str(tmp_path / "status")})
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "rank 1 of 2 on host " in done.stderr
    assert read_report(status_path(tmp_path / "status", 1)).error == "Mute: its message raised LookupError"


@pytest.mark.jobs
def test_a_folder_others_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    script = "import mpidist\nmpidist.Communicator()"
    done = run_script(script, 2, env={"MPIDIST_STATUS": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert done.stderr.count(f"the status file of rank {rank} cannot be written, and the program continues") == 1
    assert done.stderr.count("others may write there") == 2
    assert not list(tmp_path.glob("*rank*"))
