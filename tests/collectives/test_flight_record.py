"""Flight records: the last collectives of each rank, which survive whatever ends it, and those of all ranks merged."""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import pytest

from mpidist.cli import flight
from mpidist.collectives.watch.flight_record import (
    CALL_DONE,
    CALL_FAILED,
    CALL_RUNNING,
    ENTRIES,
    FlightEntry,
    FlightFile,
    flight_path,
    read_flight,
    read_folder,
)
from mpidist.collectives.watch.flight_text import Divergence, Section, merged_text
from tests.support.ranks.cores import needs_core
from tests.support.ranks.jobs import run_script

pytestmark = pytest.mark.one_rank


def test_the_last_entries_are_kept(tmp_path: Path) -> None:
    file = FlightFile(tmp_path / "new", 3, 4)
    for number in range(1, ENTRIES + 11):
        serial = file.begin("communicator 1 of ranks 0-3", number, f"all_reduce {number}", "train.py:3 (step)")
        if number < ENTRIES + 9:
            file.end(serial, failed=number == ENTRIES + 8)
    flight = read_flight(flight_path(tmp_path / "new", 3))
    assert (flight.rank, flight.ranks) == (3, 4)
    assert [entry.number for entry in flight.entries] == list(range(11, ENTRIES + 11))
    assert [entry.state for entry in flight.entries[-4:]] == [CALL_DONE, CALL_FAILED, CALL_RUNNING, CALL_RUNNING]
    last = flight.entries[-3]
    assert (last.text, last.call_site) == (f"all_reduce {ENTRIES + 8}", "train.py:3 (step)")
    assert last.begin <= last.end


def test_long_texts_are_cut_and_others_are_refused(tmp_path: Path) -> None:
    file = FlightFile(tmp_path, 0, 1)
    file.begin("c" * 500, 1, "ä" * 500, "/a" * 500 + "/train.py:3 (step)")
    (entry,) = read_flight(flight_path(tmp_path, 0)).entries
    assert entry.communicator == "c" * 80
    assert entry.text.startswith("ä" * 100)
    assert entry.call_site.endswith("/train.py:3 (step)")
    flight_path(tmp_path, 0).write_bytes(b"{}")
    with pytest.raises(ValueError, match="no flight record of this version"):
        read_flight(flight_path(tmp_path, 0))
    with pytest.raises(FileNotFoundError, match="run the job with MPIDIST_FLIGHT_RECORD="):
        next(read_folder(str(tmp_path / "nothing"), []))


KILLED = """
import os, signal, sys, numpy, mpidist
comm = mpidist.Communicator()
for step in range(3):
    comm.all_reduce("SUM", numpy.ones(5))
if comm.rank == 1:
    work = comm.all_reduce_async("SUM", numpy.ones(1 << 20))
    os.kill(os.getpid(), signal.SIGKILL)
comm.barrier()
"""


@pytest.mark.jobs
def test_a_rank_that_is_killed_leaves_its_record(tmp_path: Path) -> None:
    job = run_script(KILLED, 3, env={"MPIDIST_FLIGHT_RECORD": str(tmp_path)})
    assert job.returncode != 0
    problems: list[str] = []
    flights = [*read_folder(str(tmp_path), problems)]
    assert not problems
    assert [flight.rank for flight in flights] == [0, 1, 2]
    killed = flights[1].entries
    assert [entry.text for entry in killed[-4:-1]] == ["all_reduce SUM of float64(5,)"] * 3
    assert killed[-1].text == "all_reduce SUM of float64(1048576,)"
    assert killed[-1].state == CALL_RUNNING
    text = merged_text(flights, 3)
    number = killed[-1].number
    assert f"  the ranks went apart at number {number}:\n" in text
    assert "    rank 1: all_reduce SUM of float64(1048576,), at " in text
    assert f"    ranks 0,2: barrier, at {flights[0].entries[-1].call_site}\n" in text
    assert f"came to number {number}, which had not ended" in text


SHORT = """
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


@needs_core
@pytest.mark.jobs
def test_the_core_writes_the_calls_that_take_the_short_way(tmp_path: Path) -> None:
    job = run_script(SHORT, 2, env={"MPIDIST_FLIGHT_RECORD": str(tmp_path)})
    assert job.returncode == 0, job.stderr
    counts = [int(line) for line in job.stdout.split()]
    assert 1 <= max(counts) <= 5, "four of the sums and one broadcast, without calls that had to wait"
    for record in read_folder(str(tmp_path), []):
        entries = [entry for entry in record.entries if entry.text.startswith(("all_reduce", "barrier", "broadcast"))]
        sums, last = entries[:10], entries[10:]
        assert [entry.text for entry in sums] == ["all_reduce SUM of float64(5,)", "barrier"] * 5
        assert [entry.number for entry in entries] == list(range(entries[0].number, entries[0].number + 13))
        assert [entry.state for entry in entries] == [CALL_DONE] * 12 + [CALL_FAILED]
        assert all(entry.begin <= entry.end <= later.begin for entry, later in pairwise(entries))
        assert len({entry.call_site for entry in sums[::2]}) == 1
        assert sums[0].call_site.endswith(":7 (<module>)")
        assert last[-1].text == f"broadcast from rank {record.rank} of float64(2,)"


def entry(number: int, text: str, state: int = CALL_DONE) -> FlightEntry:
    end = 2.0 if state else 0.0
    return FlightEntry(number, number, 1.0, end, state, "communicator 1 of ranks 0-1", text, "a.py:1 (f)")


def test_the_first_difference() -> None:
    def divergence(*ranks: list[FlightEntry]) -> Divergence | None:
        section = Section("communicator 1 of ranks 0-1")
        for rank, entries in enumerate(ranks):
            section.add(rank, entries, 10)
        return section.divergence()

    same = [entry(n, "barrier") for n in range(5, 9)]
    assert divergence(same, same[1:]) is None
    late = divergence(same, same[:3])
    assert late is not None
    assert (late.number, late.groups) == (8, [("barrier, at a.py:1 (f)", [0]), ("has not come to it", [1])])
    other = divergence(same, [*same[:2], entry(7, "all_reduce"), same[3]])
    assert other is not None
    assert other.number == 7


@pytest.mark.jobs
def test_the_command_line(tmp_path: Path) -> None:
    job = run_script(
        """
import mpidist
comm = mpidist.Communicator()
comm.barrier()
comm.close()
""",
        2,
        env={"MPIDIST_FLIGHT_RECORD": str(tmp_path)},
    )
    assert job.returncode == 0, job.stderr
    problems: list[str] = []
    flights = [*read_folder(str(tmp_path), problems)]
    assert not problems
    text = merged_text(flights, 10)
    assert "ranks 0-1 came to number" in text
    assert "went apart" not in text
    assert merged_text(flights[:1], 10).splitlines()[1] == "  without rank 1: no file to read"


def test_a_truncated_file_is_named_and_the_others_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        FlightFile(tmp_path, rank, 2).begin("world", 1, "all_reduce", "train.py:3")
    flight_path(tmp_path, 1).write_bytes(flight_path(tmp_path, 1).read_bytes()[:1000])
    assert flight.run(argparse.Namespace(folder=str(tmp_path), last=10, json=False)) == 0
    shown = capsys.readouterr()
    assert "all_reduce, at train.py:3" in shown.out
    assert "left out: " + str(flight_path(tmp_path, 1)) in shown.err
    flight_path(tmp_path, 0).write_bytes(b"")
    assert flight.run(argparse.Namespace(folder=str(tmp_path), last=10, json=False)) == 2
