"""Hang reports: the ranks that keep a collective waiting, with their state and the line of their program."""

from __future__ import annotations

import re

import pytest

from mpidist.collectives.channel.executor import ChannelStatus
from mpidist.collectives.observe.hang_report import Answer, report_text
from tests.support.ranks.jobs import run_script
from tests.support.ranks.programs import run_program
from tests.support.speed import deadlines, scaled

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

LATE = """
import os, signal, sys, time, numpy, mpidist

comm = mpidist.Communicator()
comm.all_reduce("SUM", numpy.ones(2))

def load():
    time.sleep(3.5)                                 # line 8

if comm.rank == 1:
    load()
if comm.rank == 2:
    end = time.monotonic() + 3.5
    while time.monotonic() < end:
        pass
if comm.rank == 3:
    child = os.fork()
    if child == 0:
        time.sleep(3.5)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
comm.all_reduce("SUM", numpy.ones(5))               # line 23
comm.close()
print("done")
"""


def test_one_report_names_all_late_ranks() -> None:
    job = run_program(LATE, 5, env={"MPIDIST_WARN_AFTER": "0.5"})
    assert job.returncode == 0, job.stderr
    assert job.stdout.split() == ["done"] * 5
    assert job.stderr.count("for the other ranks") == 1
    assert "ranks 0,4 of 5 have waited" in job.stderr
    assert "for the other ranks in all_reduce SUM of float64(5,), collective number 3:\n" in job.stderr
    last = "has not reached it: its last collective was number 2, all_reduce SUM of float64(2,)"
    lines = {line.split(":")[0].strip(): line for line in job.stderr.splitlines() if line.startswith("  rank")}
    assert set(lines) == {"rank 1", "rank 2", "rank 3", "ranks 0,4"}
    assert last in lines["rank 1"]
    assert ":8 (load) (process " in lines["rank 1"]
    assert last in lines["rank 2"]
    assert "(<module>)" in lines["rank 2"]
    assert "gave no answer within 1.5 s" in lines["rank 3"]
    assert lines["ranks 0,4"].endswith(":23 (<module>)")


def test_the_error_of_a_deadline_has_the_report() -> None:
    job = run_script(LATE, 2, env=deadlines(1))
    assert job.returncode != 0
    error = job.stderr[job.stderr.index("CollectiveTimeoutError") :]
    assert re.search(r"rank 0 of 2 has waited \d+ s for the other ranks in all_reduce SUM of float64\(5,\)", error)
    assert "  rank 1: has not reached it: its last collective was number 2" in error


def test_without_the_guard_each_rank_reports() -> None:
    job = run_program(LATE, 3, env={"MPIDIST_WARN_AFTER": "1", "MPIDIST_GUARD": "0"})
    assert job.returncode == 0, job.stderr
    assert re.search(r"rank 0 of 3 has waited \d+ s for the other ranks in all_reduce SUM of float64\(5,\)", job.stderr)
    assert "its collective number 3, at " in job.stderr


def test_a_work_that_nobody_advances_is_named() -> None:
    program = """
    import time, numpy, mpidist
    comm = mpidist.Communicator()
    work = comm.all_reduce_async("SUM", numpy.ones(1 << 22))
    if comm.rank == 1:
        time.sleep(3)
    work.wait()
    comm.close()
    """
    job = run_program(program, 2, env={"MPIDIST_WARN_AFTER": "1", "MPIDIST_PROGRESS_THREAD": "0"})
    assert job.returncode == 0, job.stderr
    assert "rank 1: has started it but does not advance it: its program is at" in job.stderr


# Ranks given as arguments stop until a child process resumes or kills them, or hold Python's lock for a while.
STOP = """
import ctypes, os, signal, sys, time, numpy, mpidist
comm = mpidist.Communicator()
how, seconds, *ranks = sys.argv[1:]
if str(comm.rank) in ranks and how == "lock":
    ctypes.PyDLL(None).sleep(int(seconds))
elif str(comm.rank) in ranks:
    child = os.fork()
    if child == 0:
        time.sleep(float(seconds))
        os.kill(os.getppid(), getattr(signal, how))
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
"""
WAIT = f"""{STOP}
comm.all_reduce("SUM", numpy.ones(5))
comm.close()
"""
FAIL = f"""{STOP}
start = time.monotonic()
try:
    comm.all_reduce("SUM", numpy.ones(5))
except mpidist.CollectiveTimeoutError as error:
    report = "ranks 0,4: gave no answer" in str(error)
    print(comm.rank, f"{{time.monotonic() - start:.1f}}", report, flush=True)
time.sleep(20)
"""


@pytest.mark.parametrize("how", ["SIGCONT", "lock"])
@pytest.mark.parametrize("ranks_per_node", [None, pytest.param(1, marks=pytest.mark.long)])
def test_another_rank_asks_if_the_first_hangs(how: str, ranks_per_node: int | None) -> None:
    env = {"MPIDIST_WARN_AFTER": "0.5"}
    job = run_program(WAIT, 3, how, "5", "0", env=env, ranks_per_node=ranks_per_node)
    assert job.returncode == 0, job.stderr
    assert "ranks 1-2 of 3 have waited" in job.stderr
    assert job.stderr.count("mpidist: rank") == 1
    assert "mpidist: none of" not in job.stderr
    assert "rank 0: gave no answer" in job.stderr


@pytest.mark.long
def test_the_second_rank_answers_for_the_leader() -> None:
    env = {"MPIDIST_WARN_AFTER": "0.5"}
    job = run_script(WAIT, 6, "SIGCONT", "5", "3", env=env, ranks_per_node=3)
    assert job.returncode == 0, job.stderr
    assert "ranks 0-2,4-5 of 6 have waited" in job.stderr
    assert "rank 3: gave no answer" in job.stderr
    assert job.stderr.count("for the other ranks") == 1


@pytest.mark.long
def test_errors_arrive_if_leaders_hang() -> None:
    env = {**deadlines(1), "MPIDIST_ABORT_ON_EXCEPTION": "0"}
    job = run_script(FAIL, 6, "SIGKILL", "8", "0", "4", env=env, ranks_per_node=2)
    waited = [line.split() for line in job.stdout.splitlines()]
    assert sorted(int(rank) for rank, _, _ in waited) == [1, 2, 3, 5], job.stderr
    assert all(float(seconds) < scaled(1) + 2.5 + 1 for _, seconds, _ in waited), waited
    assert all(report == "True" for _, _, report in waited), waited


@pytest.mark.long
def test_each_communicator_has_its_own_report() -> None:
    program = """
    import time, numpy, mpidist
    world = mpidist.Communicator()
    part = world.split(world.rank // 2)
    if world.rank == 3:
        time.sleep(2.5)
    part.all_reduce("SUM", numpy.ones(5))
    world.barrier()
    part.close()
    world.close()
    """
    job = run_script(program, 4, env={"MPIDIST_WARN_AFTER": "1"})
    assert job.returncode == 0, job.stderr
    assert "rank 0 of 2 has waited" in job.stderr
    assert re.search(r"ranks 0-1 of 4 have waited \d+ s for the other ranks in barrier", job.stderr)
    assert "ranks 2-3: has not reached it" not in job.stderr


def test_a_report_without_waiting_ranks() -> None:
    late = Answer(ChannelStatus(6, 6, "barrier", False, 70.0, False), None, "train.py:9", "process 2 on b")
    (head, *_) = report_text(7, {0: late}, 2).splitlines()
    assert head == "none of 2 ranks reports that it waits in collective number 7:"


def test_reports_of_many_ranks_are_short() -> None:
    waiting = {
        rank: Answer(ChannelStatus(7, 7, "barrier", True, 60.0, False), None, "train.py:3 (step)", "process 1 on a")
        for rank in range(900)
    }
    found = {
        **waiting,
        900: Answer(ChannelStatus(6, 6, "barrier", False, 70.0, False), None, "train.py:9 (load)", "process 2 on b"),
        901: Answer(ChannelStatus(9, 9, "reduce", True, 70.0, False), None, "train.py:9 (load)", "process 3 on b"),
        902: Answer(ChannelStatus(0, 0, "", False, 70.0, True), process="process 4 on b"),
    }
    assert report_text(7, found, 904).splitlines() == [
        "ranks 0-899 of 904 have waited 60 s for the other ranks in barrier, collective number 7:",
        "  rank 900: has not reached it: its last collective was number 6, barrier, 70 s ago; its program is at "
        "train.py:9 (load) (process 2 on b)",
        "  rank 901: waiting in number 9, reduce, at train.py:9 (load) (process 3 on b)",
        "  rank 902: has ended its program; it has issued no collective yet (process 4 on b)",
        "  rank 903: gave no answer within 1.5 s: its host cannot be reached, its process has ended or was stopped, or "
        "runs code that holds Python's lock",
        "  ranks 0-899: waiting for them at train.py:3 (step)",
    ]
