"""Flight records: the last collectives of each rank, which survive the process, and the text about all ranks."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from mpidist.__main__ import main
from mpidist.cli.flight import merged_text
from mpidist.collectives.observe.record import (
    CALLS,
    MESSAGES,
    Entry,
    Flight,
    FlightFile,
    FlightHead,
    Kind,
    State,
    flight_path,
    read_flight,
    read_flights,
)
from tests.support.ranks.cores import needs_core
from tests.support.ranks.jobs import run_script

pytestmark = pytest.mark.one_rank
NAME = "communicator 1 of ranks 0-1"


def begin(file: FlightFile, number: int, text: str = "barrier", call_site: str = "train.py:3 (step)") -> int:
    return file.calls.begin(Kind.COLLECTIVE, number, NAME, text, call_site)


def test_the_last_entries_are_kept(tmp_path: Path) -> None:
    file = FlightFile(tmp_path / "new", 3, 4)
    for number in range(1, CALLS + 11):
        serial = begin(file, number, f"all_reduce {number}")
        if number == CALLS + 8:
            file.calls.finish(serial, State.FAILED, "ValueError")
        elif number < CALLS + 8:
            file.calls.finish(serial)
    flight = read_flight(flight_path(tmp_path / "new", 3))
    assert (flight.head.rank, flight.head.ranks) == (3, 4)
    assert [entry.number for entry in flight.entries] == list(range(11, CALLS + 11))
    assert [entry.state for entry in flight.entries[-4:]] == [State.DONE, State.FAILED, State.RUNNING, State.RUNNING]
    failed = flight.entries[-3]
    assert (failed.text, failed.call_site, failed.note) == (
        f"all_reduce {CALLS + 8}",
        "train.py:3 (step)",
        "ValueError",
    )
    assert failed.begin <= failed.end


def test_running_messages_keep_their_slots(tmp_path: Path) -> None:
    ring = FlightFile(tmp_path, 0, 1).messages
    first = ring.begin(Kind.MESSAGE, 0, NAME, "recv")
    for _ in range(2 * MESSAGES):
        ring.finish(ring.begin(Kind.MESSAGE, 0, NAME, "send"))
    entries = read_flight(flight_path(tmp_path, 0)).entries
    assert len(entries) == MESSAGES
    assert [entry.serial for entry in entries if entry.state == State.RUNNING] == [first]
    for _ in range(2 * MESSAGES):
        ring.begin(Kind.MESSAGE, 0, NAME, "never received")
    ring.finish(first)
    assert {entry.text for entry in read_flight(flight_path(tmp_path, 0)).entries} == {"never received"}


def test_long_texts_are_cut(tmp_path: Path) -> None:
    file = FlightFile(tmp_path, 0, 1)
    file.calls.begin(Kind.COLLECTIVE, 1, "c" * 500, "ä" * 500, "/a" * 500 + "/train.py:3 (step)")
    (entry,) = read_flight(flight_path(tmp_path, 0)).entries
    assert entry.communicator == "c" * 80
    assert entry.text.startswith("ä" * 100)
    assert entry.call_site.endswith("/train.py:3 (step)")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda content: b"", "is not a file of this kind"),
        (lambda content: b"{}", "is not a file of this kind"),
        (lambda content: content[:5000], "is incomplete. Copy the whole file"),
        (lambda content: content.replace(b"record 3", b"record 2"), "has the format 'mpidist record 2', not"),
    ],
    ids=["empty", "another file", "truncated", "another version"],
)
def test_an_unreadable_file_is_left_out(change, problem, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        begin(FlightFile(tmp_path, rank, 2), 1)
    paths = [flight_path(tmp_path, rank) for rank in range(2)]
    paths[1].write_bytes(change(paths[1].read_bytes()))
    assert main(["flight", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "barrier, at train.py:3" in shown.out
    assert f"left out: {paths[1]} {problem}" in shown.err
    paths[0].unlink()
    assert main(["flight", str(tmp_path)]) == 2
    assert problem in capsys.readouterr().err


def test_a_folder_without_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flight", str(tmp_path)]) == 2
    assert f"Start the job with MPIDIST_FLIGHT_RECORD={tmp_path}" in capsys.readouterr().err


@pytest.mark.jobs
def test_a_killed_rank_leaves_its_record(tmp_path: Path) -> None:
    program = """
    import os, signal, sys, numpy, mpidist
    comm = mpidist.Communicator()
    for step in range(3):
        comm.all_reduce("SUM", numpy.ones(5))
    if comm.rank == 1:
        work = comm.all_reduce_async("SUM", numpy.ones(1 << 20))
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()
    """
    job = run_script(program, 3, env={"MPIDIST_FLIGHT_RECORD": str(tmp_path)})
    assert job.returncode != 0
    problems: list[str] = []
    flights = [*read_flights(str(tmp_path), problems)]
    assert not problems
    assert [flight.head.rank for flight in flights] == [0, 1, 2]
    killed = flights[1].entries
    assert [entry.text for entry in killed[-4:-1]] == ["all_reduce SUM of float64(5,)"] * 3
    assert killed[-1].text == "all_reduce SUM of float64(1048576,)"
    assert killed[-1].state == State.RUNNING
    text = merged_text(flights, 3)
    number = killed[-1].number
    assert f"  the ranks diverged at number {number}:\n" in text
    assert "    rank 1: all_reduce SUM of float64(1048576,), at " in text
    assert f"    ranks 0,2: barrier, at {flights[0].entries[-1].call_site}\n" in text
    assert f"reached number {number}, which had not ended" in text


@needs_core
@pytest.mark.jobs
def test_calls_of_the_fast_path_are_recorded(tmp_path: Path) -> None:
    program = """
    import time, numpy, mpidist
    comm = mpidist.Communicator()
    for step in range(5):
        if comm.rank == 0 and step == 3:
            time.sleep(0.1)
        comm.all_reduce("SUM", numpy.ones(5))
        comm.barrier()
    for root in (0, 0, comm.rank):
        try:
            comm.broadcast(numpy.ones(2), root)
        except mpidist.MismatchError:
            pass
    print(comm._channel.executor.fast.count, flush=True)
    """
    job = run_script(program, 2, env={"MPIDIST_FLIGHT_RECORD": str(tmp_path)})
    assert job.returncode == 0, job.stderr
    counts = [int(line) for line in job.stdout.split()]
    assert 1 <= max(counts) <= 5, "four of the sums and one broadcast, without calls that had to wait"
    for flight in read_flights(str(tmp_path), []):
        entries = [entry for entry in flight.entries if entry.text.startswith(("all_reduce", "barrier", "broadcast"))]
        sums, last = entries[:10], entries[10:]
        assert [entry.text for entry in sums] == ["all_reduce SUM of float64(5,)", "barrier"] * 5
        assert [entry.number for entry in entries] == list(range(entries[0].number, entries[0].number + 13))
        assert [entry.state for entry in entries] == [State.DONE] * 12 + [State.FAILED]
        assert all(entry.begin <= entry.end <= later.begin for entry, later in pairwise(entries))
        assert len({entry.call_site for entry in sums[::2]}) == 1
        assert sums[0].call_site.endswith(":7 (<module>)")
        assert last[-1].text == f"broadcast from rank {flight.head.rank} of float64(2,)"


@pytest.mark.jobs
def test_signal_handlers_may_call_collectives(tmp_path: Path) -> None:
    program = """
    import signal, numpy, mpidist
    comm, other, value = mpidist.Communicator(), mpidist.Communicator(), numpy.ones(5)
    handled = []
    def handle(*_):
        handled.append(other.all_reduce("SUM", value))
        signal.setitimer(signal.ITIMER_REAL, 1e-4)
    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 1e-4)
    while len(handled) < 1000:
        comm.all_reduce("SUM", value)
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(len(handled))
    """
    job = run_script(program, 1, env={"MPIDIST_FLIGHT_RECORD": str(tmp_path)}, timeout=60)
    assert job.stdout.split() == ["1000"], job.stderr


def entry(number: int, text: str = "barrier") -> Entry:
    return Entry(number, number, 0, 1.0, 2.0, "", State.DONE, Kind.COLLECTIVE, 0, NAME, text, "a.py:1 (f)")


def flight(rank: int, entries: list[Entry]) -> Flight:
    return Flight(FlightHead(rank, 2, "a", 1, 0), entries)


BARRIERS = [entry(number) for number in range(5, 9)]


@pytest.mark.parametrize(
    ("other", "divergence"),
    [
        (BARRIERS[1:], []),
        (BARRIERS[:3], ["number 8:", "rank 0: barrier, at a.py:1 (f)", "rank 1: did not reach it"]),
        (
            [*BARRIERS[:2], entry(7, "all_reduce"), BARRIERS[3]],
            ["number 7:", "rank 0: barrier, at a.py:1 (f)", "rank 1: all_reduce, at a.py:1 (f)"],
        ),
    ],
    ids=["none", "late", "other"],
)
def test_the_first_divergence(other: list[Entry], divergence: list[str]) -> None:
    lines = merged_text([flight(0, BARRIERS), flight(1, other)], 10).splitlines()
    found = [at for at, line in enumerate(lines) if "the ranks diverged at " in line]
    assert [lines[at + more].strip().removeprefix("the ranks diverged at ") for at in found for more in range(3)] == (
        divergence
    )


def test_ranks_without_a_file_are_named() -> None:
    lines = merged_text([flight(0, BARRIERS)], 10).splitlines()
    assert lines[:2] == ["flight record of 2 ranks", "  without rank 1: no file to read"]


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = FlightFile(tmp_path, 1, 2)
    file.calls.finish(begin(file, 1))
    assert main(["flight", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (flight,) = document["flights"]
    (found,) = flight["entries"]
    assert (flight["rank"], flight["ranks"], document["left_out"]) == (1, 2, [])
    assert (found["number"], found["state"], found["text"], found["communicator"]) == (1, State.DONE, "barrier", NAME)
