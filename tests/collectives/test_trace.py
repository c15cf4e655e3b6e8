"""MPIDIST_TRACE and MPIDIST_REPORT: files and text after normal and failed programs."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from mpidist.__main__ import main
from mpidist.collectives.observe.record import EntryRing, Kind
from mpidist.collectives.observe.recorder import report_text
from mpidist.collectives.observe.trace import MERGED, TraceFile, merge, trace_path
from tests.support.ranks.jobs import run_script
from tests.support.ranks.programs import run_program
from tests.support.speed import deadlines

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

# Times are rounded to a nanosecond.
ROUNDING = 0.002
PROGRAM = """
import numpy, mpidist
comm = mpidist.Communicator()
large = numpy.ones(1 << 20, "f4")
comm.all_reduce("SUM", 1.0)
comm.all_reduce("SUM", [large, numpy.ones(5, "f4")])
comm.all_gather(numpy.ones((3, 2)))
comm.broadcast(large)
comm.reduce("SUM", large)
comm.reduce_scatter("SUM", large)
comm.barrier()
works = [comm.all_reduce_async("MAX", large) for _ in range(3)]
comm.barrier()
works = [comm.all_reduce_async("MIN", large) for _ in range(3)]
for work in works:
    work.wait()
print("done")
"""
CALLS = ["all_reduce SUM", "all_reduce SUM", "all_gather along axis 0", "broadcast from rank 0", "reduce to rank 0 SUM"]
CALLS += ["reduce_scatter SUM", "barrier", "all_reduce MAX", "all_reduce MAX", "all_reduce MAX", "barrier"]
CALLS += ["all_reduce MIN", "all_reduce MIN", "all_reduce MIN"]
Event = dict[str, Any]


def events_of(path: Path) -> list[Event]:
    events: list[Event] = json.loads(path.read_text())["traceEvents"]
    return events


def of(events: list[Event], **wanted: Any) -> list[Event]:
    return [event for event in events if all(event.get(key) == value for key, value in wanted.items())]


def calls_of(events: list[Event]) -> list[Event]:
    """Return the user's collectives of one rank, in order."""
    calls = sorted(of(events, cat="collective"), key=lambda event: event["args"]["number"])
    return [call for call in calls if not call["name"].startswith("agreeing")]


def is_inside(inner: Event, outer: Event) -> bool:
    return bool(
        inner["pid"] == outer["pid"]
        and inner["tid"] == outer["tid"]
        and inner["ts"] >= outer["ts"] - ROUNDING
        and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + ROUNDING
    )


def check_nesting(events: list[Event]) -> None:
    """Check that spans of a track contain one another, or do not meet."""
    spans = sorted(of(events, ph="X"), key=lambda e: (e["pid"], e["tid"], e["ts"], -e["dur"]))
    for _, track in groupby(spans, key=lambda e: (e["pid"], e["tid"])):
        around: list[Event] = []
        for span in track:
            while around and span["ts"] >= around[-1]["ts"] + around[-1]["dur"] - ROUNDING:
                around.pop()
            assert not around or is_inside(span, around[-1]), (span, around[-1])
            around.append(span)


def handshakes_of(events: list[Event]) -> Iterator[list[Event]]:
    by_name: dict[str, list[Event]] = {}
    for event in of(events, name="wait for others"):
        by_name.setdefault(event.get("args", {}).get("meeting", "of a node"), []).append(event)
    by_name.pop("of a node", None)
    yield from by_name.values()


@pytest.fixture(scope="module", params=[None, 1], ids=["one_node", "two_nodes"])
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int | None]:
    """The folder of a program of two ranks, and how many of them are on a node."""
    folder = tmp_path_factory.mktemp("traced") / "made by the program"
    job = run_program(PROGRAM, 2, env={"MPIDIST_TRACE": str(folder)}, ranks_per_node=request.param)
    assert (job.returncode, job.stderr) == (0, "")
    return folder, request.param


def test_rank_0_merges_the_files_of_all_ranks(traced: tuple[Path, int | None]) -> None:
    folder, _ = traced
    assert sorted(path.name for path in folder.iterdir()) == [MERGED, "trace-rank-0000.json", "trace-rank-0001.json"]
    merged = events_of(folder / MERGED)
    assert Counter(map(str, merged)) == Counter(str(e) for rank in (0, 1) for e in events_of(trace_path(folder, rank)))
    assert [name["args"]["name"].split(" on ")[0] for name in of(merged, name="process_name")] == ["rank 0", "rank 1"]
    named = {(event["pid"], event["tid"]) for event in of(merged, name="thread_name")}
    assert {(event["pid"], event["tid"]) for event in of(merged, ph="X")} == named


def test_each_collective_has_a_span(traced: tuple[Path, int | None]) -> None:
    folder, ranks_per_node = traced
    for rank in (0, 1):
        calls = calls_of(events_of(trace_path(folder, rank)))
        assert [call["name"] for call in calls] == CALLS
        first, second, gathering = (call["args"] for call in calls[:3])
        assert (first["bytes"], first["algorithm"]) == (8, "leaders" if ranks_per_node else "hierarchical")
        assert second["text"] == "all_reduce SUM of float32(1048576,), float32(5,)"
        assert second["bytes"] == 4 * ((1 << 20) + 5)
        assert second["algorithm"] in (("ring", "halving_doubling") if ranks_per_node else ("hierarchical",))
        assert gathering["bytes"] == 48
        assert len({call["args"]["number"] for call in calls}) == len(calls)


def test_phases_and_chunks_are_inside(traced: tuple[Path, int | None]) -> None:
    folder, ranks_per_node = traced
    events = events_of(trace_path(folder, 1))
    check_nesting(events)
    calls = calls_of(events)
    inside = [[phase["name"] for phase in of(events, cat="phase") if is_inside(phase, call)] for call in calls]
    # The first call makes the algorithm before it packs. Between nodes the second call takes another algorithm.
    first, later = [["wait for others", "pack", "reduce", "unpack"], ["pack", "wait for others", "reduce", "unpack"]]
    assert inside[:2] == ([first, first] if ranks_per_node else [first, later])
    assert inside[2] == inside[3] == ["wait for others", "move"]
    assert inside[5] == ["wait for others", "reduce"]
    assert inside[6] == ["wait for others"]
    assert inside[-1] == later
    (reduction,) = (phase for phase in of(events, name="reduce") if is_inside(phase, calls[1]))
    # A rank that is alone on its node has nothing to do with others there.
    for what in () if ranks_per_node else ("fill chunk", "reduce chunk", "copy chunk"):
        chunks = [span["args"]["chunk"] for span in of(events, name=what) if is_inside(span, reduction)]
        assert chunks == sorted(set(chunks))
        assert len(chunks) > 1
    end = reduction["ts"] + reduction["dur"]
    on_wire = [span for span in of(events, cat="between nodes") if reduction["ts"] <= span["ts"] <= end]
    assert sum(span["args"]["bytes"] for span in on_wire) == (calls[1]["args"]["bytes"] if ranks_per_node else 0)


def test_works_wait_in_a_queue(traced: tuple[Path, int | None]) -> None:
    folder, _ = traced
    events = events_of(trace_path(folder, 0))
    works = [call for call in calls_of(events) if call["name"] in ("all_reduce MAX", "all_reduce MIN")]
    assert len(works) == 6
    (track,) = {work["tid"] for work in works}
    assert track not in {call["tid"] for call in calls_of(events) if call not in works}
    begins, ends = (of(events, cat="queue", ph=kind) for kind in "be")
    assert [event["args"]["number"] for event in begins] == [work["args"]["number"] for work in works]
    assert [event["id2"] for event in begins] == [event["id2"] for event in ends]
    for begin, end, work in zip(begins, ends, works, strict=True):
        assert begin["ts"] <= end["ts"] <= work["ts"] + ROUNDING
    waits = of(events, cat="wait")
    assert {wait["name"] for wait in waits} <= {"wait for all_reduce MIN"}


def test_no_rank_leaves_a_handshake_early(traced: tuple[Path, int | None]) -> None:
    merged = events_of(traced[0] / MERGED)
    meetings = list(handshakes_of(merged))
    assert len(meetings) >= len(CALLS)
    for meeting in meetings:
        assert sorted(event["pid"] for event in meeting) == [0, 1]
        last = max(event["ts"] for event in meeting)
        assert all(event["ts"] + event["dur"] >= last - ROUNDING for event in meeting)


# Merging ---------------------------------------------------------------------------------------------------------


def on_another_host(source: Path, target: Path, seconds_ahead: float, parts_per_million: float) -> None:
    """Copy rank 1's file as from a host whose clock is ahead, and fast."""
    text = source.read_text()
    about = json.loads(text)["otherData"]
    text = text.replace(about["clock"], "another clock").replace(f'"host": "{about["host"]}"', '"host": "another"')
    start = float(re.findall(r'"ts":([\d.]+)', text)[0])

    def moved(time: float) -> float:
        return time + 1e6 * seconds_ahead + (time - start) * parts_per_million / 1e6

    def line(found: re.Match[str]) -> str:
        begin = float(found[1])
        parts = f'{{"ts":{moved(begin):.3f},'
        if found[2]:
            parts += f'"dur":{moved(begin + float(found[2])) - moved(begin):.3f},'
        return parts

    target.write_text(re.sub(r'{"ts":([\d.]+),(?:"dur":([\d.]+),)?', line, text))


def test_clocks_of_hosts_are_aligned(traced: tuple[Path, int | None], tmp_path: Path) -> None:
    trace_path(tmp_path, 0).write_text(trace_path(traced[0], 0).read_text())
    on_another_host(trace_path(traced[0], 1), trace_path(tmp_path, 1), 1000.0, 20.0)
    merged = merge(tmp_path)
    check_nesting(events_of(merged))
    clocks = json.loads(merged.read_text())["otherData"]["clocks"]
    assert clocks["another"]["offset_us"] == pytest.approx(-1e9, abs=1e5)
    for meeting in handshakes_of(events_of(merged)):
        last = max(event["ts"] for event in meeting)
        # 20 parts in a million of the seconds that the job took, at most.
        assert all(event["ts"] + event["dur"] >= last - 1000 for event in meeting)


def test_merging_by_hand(traced: tuple[Path, int | None], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path)]) == 2
    assert (
        "trace-rank-0000.json is missing. Name the folder that the job had as MPIDIST_TRACE" in capsys.readouterr().err
    )
    trace_path(tmp_path, 0).write_text(trace_path(traced[0], 0).read_text())
    assert main(["trace", str(tmp_path)]) == 2
    assert "trace-rank-0001.json is missing" in capsys.readouterr().err
    whole = trace_path(traced[0], 1).read_text()
    trace_path(tmp_path, 1).write_text(whole[: len(whole) // 2])
    assert main(["trace", str(tmp_path)]) == 2
    assert "which is not the end of a trace. Copy the whole file" in capsys.readouterr().err
    trace_path(tmp_path, 1).write_text(whole)
    assert main(["trace", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / MERGED}\n"
    assert (tmp_path / MERGED).read_text() == (traced[0] / MERGED).read_text()


# The end of a program --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["raise ArithmeticError", "sys.exit(3)"])
def test_an_early_exit_leaves_whole_files(end: str, tmp_path: Path) -> None:
    program = f"""
    import sys, mpidist
    comm = mpidist.Communicator()
    comm.barrier()
    if comm.rank == 1:
        {end}
    comm.all_reduce("SUM", 1.0)
    """
    job = run_script(program, 2, env={"MPIDIST_TRACE": str(tmp_path)})
    assert job.returncode != 0
    assert [call["name"] for call in calls_of(events_of(trace_path(tmp_path, 1)))] == ["barrier"]
    first = calls_of(events_of(trace_path(tmp_path, 0)))
    assert "raise" in end or [call["args"].get("error") for call in first] == [None, "PeerError"]
    assert of(events_of(trace_path(tmp_path, 0)), name="process_name")
    assert not (tmp_path / MERGED).exists()


def test_an_unfinished_collective_is_written(tmp_path: Path) -> None:
    program = """
    import time, mpidist
    comm = mpidist.Communicator()
    if comm.rank == 1:
        time.sleep(60)  # longer than the others wait
    comm.all_reduce("SUM", 1.0)
    """
    job = run_script(program, 2, env={"MPIDIST_TRACE": str(tmp_path), **deadlines(2)})
    assert "CollectiveTimeoutError" in job.stderr
    begun = of(events_of(trace_path(tmp_path, 0)), cat="unfinished", ph="b")
    assert [event["name"] for event in begun] == ["unfinished all_reduce SUM", "unfinished wait for others"]


def test_traces_merge_after_close(tmp_path: Path) -> None:
    program = """
    import time, mpidist
    comm = mpidist.Communicator()
    comm.barrier()
    comm.close()
    if comm.rank == 1:
        time.sleep(0.5)  # rank 0 is at its end first
    """
    job = run_script(program, 2, env={"MPIDIST_TRACE": str(tmp_path), "MPIDIST_REPORT": "1"})
    assert job.returncode == 0, job.stderr
    assert [call["name"] for call in calls_of(of(events_of(tmp_path / MERGED), pid=1))] == ["barrier", "close"]
    assert "collectives of 2 ranks" in job.stderr


def test_rank_0_does_not_wait_for_a_missing_rank(tmp_path: Path) -> None:
    program = """
    from mpi4py import MPI
    import mpidist, os, mpidist.collectives.observe.recorder as recorder
    recorder.EXIT_SECONDS = 0.5
    comm = mpidist.Communicator()
    comm.barrier()
    comm.close()
    if comm.rank == 1:
        recorder.Recorder.finish = lambda self: None  # sends no totals
        MPI.Finalize()
        os._exit(0)
    """
    job = run_script(program, 2, env={"MPIDIST_TRACE": str(tmp_path), "MPIDIST_REPORT": "1"})
    assert "collectives of 1 of 2 ranks (without 1)" in job.stderr
    assert "the traces are not merged: rank 1 did not report the end of the program. When " in job.stderr
    assert f"run: python -m mpidist trace {tmp_path}" in job.stderr
    assert [call["name"] for call in calls_of(events_of(trace_path(tmp_path, 0)))] == ["barrier", "close"]
    assert of(events_of(trace_path(tmp_path, 1)), name="process_name")


def test_a_hanging_file_system_blocks_nothing(tmp_path: Path) -> None:
    program = """
    import threading, mpidist, mpidist.collectives.observe.record as record
    from mpidist.collectives.observe.trace import TraceFile
    record.END_SECONDS, TraceFile.write = 0.2, lambda self, is_saving: threading.Event().wait()
    comm = mpidist.Communicator()
    for _ in range(10_000):
        comm.barrier()
    print("done")
    """
    job = run_script(program, 2, env={"MPIDIST_TRACE": str(tmp_path)})
    assert (job.returncode, job.stdout) == (0, "done\n" * 2)
    assert "the traces are not merged: the file of rank 0 is incomplete" in job.stderr


def test_a_forked_child_leaves_the_file_alone(tmp_path: Path) -> None:
    program = """
    import os, sys, mpidist
    comm = mpidist.Communicator()
    comm.barrier()
    child = os.fork()
    if child == 0:
        sys.excepthook(ValueError, ValueError("the child's"), None)  # as an uncaught exception does
        os._exit(0)
    os.waitpid(child, 0)
    comm.barrier()
    """
    job = run_script(program, 2, env={"MPIDIST_TRACE": str(tmp_path)})
    assert job.returncode == 0, job.stderr
    merged = events_of(tmp_path / MERGED)
    assert [call["name"] for call in calls_of(of(merged, pid=0))] == ["barrier", "barrier"]


# Files -----------------------------------------------------------------------------------------------------------


def add(ring: EntryRing, number: int, begin: int = 1000, end: int = 1500) -> None:
    ring.begin(Kind.PHASE, number, "a", f'"{number}"', track=1, begin=begin, end=end)


def dropped(path: Path) -> int:
    return int(json.loads(path.read_text())["otherData"]["dropped"])


def test_a_file_is_whole_between_writes(tmp_path: Path) -> None:
    file, path = TraceFile(str(tmp_path), 3, 4, most_events=5), trace_path(tmp_path, 3)
    assert [event["args"] for event in events_of(path)] == [
        {"name": events_of(path)[0]["args"]["name"]},
        {"sort_index": 3},
    ]
    for number in range(3):
        for _ in range(2):
            add(file.ring, number, 1000 * number, 1000 * number + 500)
        file.write(False)
        assert len(of(events_of(path), cat="phase")) == min(2 * number + 2, 5)
    assert of(events_of(path), cat="phase")[-1] == {
        "ts": 2.0, "dur": 0.5, "ph": "X", "pid": 3, "tid": 1, "cat": "phase", "name": '"2"'
    }  # fmt: skip
    assert dropped(path) == 1


def test_lost_entries_are_counted(tmp_path: Path) -> None:
    file, path = TraceFile(str(tmp_path), 0, 1, slots=4), trace_path(tmp_path, 0)
    running = file.ring.begin(Kind.COLLECTIVE, 1, "a", "barrier")
    file.write(False)
    for number in range(2, 8):
        add(file.ring, number)
    file.ring.finish(running)
    file.write(False)
    assert [event["name"] for event in of(events_of(path), ph="X")] == ['"4"', '"5"', '"6"', '"7"']
    assert dropped(path) == 3


def test_an_unwritable_file_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = TraceFile(str(tmp_path), 0, 1, slots=4)
    trace_path(tmp_path, 0).unlink()
    assert [file.write_in_thread() for _ in range(2)] == [False, False]
    assert capsys.readouterr().err.count("the trace of rank 0 cannot be written, and the program continues") == 1


# The report ------------------------------------------------------------------------------------------------------


def test_the_report_of_a_program() -> None:
    program = """
    import time, numpy, mpidist
    comm = mpidist.Communicator()
    for _ in range(5):
        if comm.rank == 1:
            time.sleep(0.1)  # the slowest rank
        comm.all_reduce("SUM", numpy.ones(1024))
    work = comm.all_reduce_async("SUM", numpy.ones(1024))
    work.wait()
    comm.all_gather(numpy.ones(1))
    """
    job = run_script(program, 2, env={"MPIDIST_REPORT": "1"})
    assert job.returncode == 0, job.stderr
    assert job.stdout == ""
    title, header, *rows = job.stderr.splitlines()
    assert re.fullmatch(r"mpidist: collectives of 2 ranks, means over ranks, in [\d.]+ s", title)
    assert header.split() == ["operation", "calls", "bytes", "time", "for", "others", "hidden", "slowest", "rank"]
    (reductions,) = (row for row in rows if row.startswith("  all_reduce "))
    assert reductions.split()[:4] == ["all_reduce", "6", "48", "KiB"]
    assert re.search(r"\d+%  1 \(waited for [3-9]\d\d ms\)$|\d+%  1 \(waited for [\d.]+ s\)$", reductions)
    (gathering,) = (row for row in rows if row.startswith("  all_gather "))
    assert gathering.split()[1:4] == ["1", "8", "B"]


def test_works_are_hidden_without_a_wait() -> None:
    reduced = Counter(calls=10, nbytes=2048, time=4_000_000, works=3_000_000)
    by_rank = {
        0: {"all_reduce": reduced + Counter(for_others=900_000)},
        1: {"all_reduce": reduced + Counter(waited=1_500_000)},
        2: {"barrier": Counter(calls=1, time=1000)},
    }
    lines = report_text(by_rank, 4, 1.5).splitlines()
    assert lines[0] == "collectives of 3 of 4 ranks (without 3), means over ranks, in 1.5 s"
    assert " ".join(lines[2].split()) == "all_reduce 10 2 KiB 4 ms 450 us 75% 1 (waited for 900 us)"
    assert " ".join(lines[3].split()) == "barrier 1 0 B 1 us 0 us - -"
