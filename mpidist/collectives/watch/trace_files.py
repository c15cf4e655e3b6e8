"""Trace files: each rank's events in the JSON format of Chrome's tracing, and their merging.

Each rank writes in pieces. Between any two pieces the file is complete: each piece is written over the end of the file,
and ends it anew. One event is one line, and begins with its time, so that merging need not parse events that it shifts.

They are merged by rank 0 at the end of a program, and by hand: ``python -m mpidist trace DIR``. Ranks that read the
same clock are taken as they are. Between hosts the collectives say how the clocks stand: no rank leaves the opening of
a collective before all ranks have come, and all leave it at nearly the same time. The offset of a host is the median
difference of these ends, within the bounds that nobody leaves before another comes, anew for each second, because
clocks drift.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.core.files import folder_to_write, open_regular, replacing
from mpidist.core.settings import TRACE
from mpidist.core.text import names_text, numbered_ranks

# About 300 MB, as much as viewers still open.
MOST_EVENTS = 1_000_000
MERGED = "trace-merged.json"
HEAD = '{"displayTimeUnit":"ns","traceEvents":[\n'
_BETWEEN = ",\n"
_BLOCK_MICROSECONDS = 1e6
_FEWEST_MEETINGS = 5
# How an event that has a time begins.
_TIMES = re.compile(r'{"ts":([0-9.]+)(?:,"dur":([0-9.]+))?,')
# A host's meetings by name: when its last rank came, and its first one left.
Meetings = dict[str, tuple[float, float]]


class Span(NamedTuple):
    """Something that took time, in nanoseconds of the clock of this host.

    With an ``identity`` it may overlap others of its track that it does not contain (an asynchronous event).
    """

    name: str
    category: str
    track: int
    start: int
    stop: int
    args: dict[str, object] | None = None
    identity: str | None = None


class _About(TypedDict):
    """The facts about one file, in its last line."""

    rank: int
    ranks: int
    host: str
    clock: str
    dropped: int


def trace_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """Return the path of a rank's file.

    >>> trace_path("traces", 3).name
    'trace-rank-0003.json'
    """
    return Path(folder, f"trace-rank-{rank:04}.json")


def tail(about: object) -> str:
    """Return the end of a file, with facts about it in one line."""
    return f'\n],\n"otherData":{json.dumps(about)}}}\n'


class TraceFile:
    """The file of this rank, begun anew.

    Args:
        folder: Where; made if need be.
        rank, ranks: Of the job.
        most_events: Events beyond so many are counted, and dropped.

    Raises:
        OSError: The folder cannot be written to.
    """

    def __init__(self, folder: str, rank: int, ranks: int, most_events: int = MOST_EVENTS) -> None:
        self.folder = folder
        self._rank = rank
        with folder_to_write(folder, TRACE.name):
            self._descriptor = open_regular(trace_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._room = most_events
        self._about: _About = {
            "rank": rank,
            "ranks": ranks,
            "host": socket.gethostname(),
            "clock": _clock(),
            "dropped": 0,
        }
        self._end = os.pwrite(self._descriptor, HEAD.encode(), 0)
        self._is_empty = True
        self._name("process", 0, f"rank {rank} on {self._about['host']}", rank)

    def name_track(self, track: int, name: str) -> None:
        """Name a track, as viewers show it below the rank; they sort tracks by number."""
        self._name("thread", track, name, track)

    def write(self, spans: list[Span]) -> None:
        """Append spans, as far as there is room."""
        kept = spans[: self._room]
        self._room -= len(kept)
        self._about["dropped"] += len(spans) - len(kept)
        lines = []
        for span in kept:
            lines.extend(_lines(span, self._rank))
        self._append(lines)

    def close(self) -> None:
        """Close the file, which is complete."""
        os.close(self._descriptor)

    def _name(self, kind: str, track: int, name: str, order: int) -> None:
        head = f'{{"ph":"M","pid":{self._rank},"tid":{track},"name":"{kind}'
        self._append(
            [
                f'{head}_name","args":{{"name":{json.dumps(name)}}}}}',
                f'{head}_sort_index","args":{{"sort_index":{order}}}}}',
            ]
        )

    def _append(self, lines: list[str]) -> None:
        text = _BETWEEN.join(lines)
        if text and not self._is_empty:
            text = _BETWEEN + text
        self._is_empty = self._is_empty and not text
        data, ending = text.encode(), tail(self._about).encode()
        _write_all(self._descriptor, data + ending, self._end)
        self._end += len(data)


def _write_all(descriptor: int, data: bytes, start: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, start)
        view, start = view[written:], start + written


def _lines(span: Span, rank: int) -> list[str]:
    start, stop = f"{span.start / 1000:.3f}", f"{span.stop / 1000:.3f}"
    name, args = json.dumps(span.name), "" if span.args is None else f',"args":{json.dumps(span.args)}'
    subject = f'"pid":{rank},"tid":{span.track},"cat":"{span.category}","name":{name}'
    if span.identity is None:
        return [f'{{"ts":{start},"dur":{(span.stop - span.start) / 1000:.3f},"ph":"X",{subject}{args}}}']
    identity = f'"id2":{{"local":"{span.identity}"}}'
    return [
        f'{{"ts":{start},"ph":"b",{identity},{subject}{args}}}',
        f'{{"ts":{stop},"ph":"e",{identity},{subject}}}',
    ]


def _clock() -> str:
    """Return a name of this process's clock (CLOCK_MONOTONIC), equal where the clock is the same."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/time"
    host = boot.read_text().strip() if boot.exists() else socket.gethostname()
    return f"{host} {os.readlink(namespace)}" if os.path.exists(namespace) else host


def how(folder: str | os.PathLike[str]) -> str:
    """Return how to merge by hand."""
    return f"once all files are in {folder}, type: python -m mpidist trace {folder}"


def merge(folder: str | os.PathLike[str]) -> Path:
    """Merge the files of all ranks into one in the folder, and return its path.

    Raises:
        FileNotFoundError: A rank's file is not there.
        ValueError: A file is no trace, or ranks on different hosts have no collective in common.
    """
    paths = _paths(Path(folder))
    about = [_about(path) for path in paths]
    clocks = [entry["clock"] for entry in about]
    offsets = _offsets(paths, clocks)
    hosts = {entry["host"]: _summary(offsets[entry["clock"]]) for entry in about}
    merged = Path(folder, MERGED)
    with replacing(merged) as descriptor, open(descriptor, "w", closefd=False) as out:
        out.write(HEAD)
        before = ""
        for path, clock in zip(paths, clocks, strict=True):
            for line in _shifted(_events(path), offsets[clock]):
                out.write(before + line)
                before = ",\n"
        dropped = sum(entry["dropped"] for entry in about)
        out.write(tail({"ranks": len(paths), "dropped": dropped, "clocks": hosts}))
    return merged


def _paths(folder: Path) -> list[Path]:
    first = trace_path(folder, 0)
    if not first.exists():
        raise FileNotFoundError(f"{first} is not there; expected the folder that MPIDIST_TRACE named")
    paths = [trace_path(folder, rank) for rank in range(_about(first)["ranks"])]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise FileNotFoundError(
            f"{names_text(missing)} {'are' if len(missing) > 1 else 'is'} not in {folder}; where the hosts do not "
            "share it, copy the files of all into one folder"
        )
    return paths


def _about(path: Path) -> _About:
    """Return the facts about a file, from its last line."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        last = file.read().decode().rstrip("\n").rpartition("\n")[2]
    if not last.startswith('"otherData":') or not last.endswith("}"):
        raise ValueError(f"{path} ends in {last[:80]!r}; expected a trace file that mpidist wrote, in full")
    about: _About = json.loads("{" + last)["otherData"]
    return about


def _events(path: Path) -> Iterator[str]:
    with path.open() as file:
        next(file)
        for line in file:
            if line.startswith("]"):
                return
            yield line.rstrip(",\n")


class Offset:
    """The offset to add to the times of a clock, which changes slowly.

    Args:
        times: In microseconds of that clock, rising; none for a clock that needs nothing.
        offsets: At these times, in microseconds.
        spread: By how much single meetings differ from it, but for the worst of 20, in microseconds.
    """

    def __init__(self, times: Sequence[float], offsets: Sequence[float], spread: float) -> None:
        self.times, self.offsets, self.spread = times, offsets, spread

    def at(self, time: float) -> float:
        """Return the offset at a time."""
        return float(np.interp(time, self.times, self.offsets))


_NONE = Offset([], [], 0.0)


def _summary(offset: Offset) -> dict[str, float]:
    first = offset.offsets[0] if offset.times else 0.0
    return {"offset_us": round(first, 3), "spread_us": round(offset.spread, 3)}


def _offsets(paths: Sequence[Path], clocks: Sequence[str]) -> dict[str, Offset]:
    offsets = {clocks[0]: _NONE}
    if len(set(clocks)) > 1:
        reference = _meetings(path for path, clock in zip(paths, clocks, strict=True) if clock == clocks[0])
        for other in sorted(set(clocks[1:]) - {clocks[0]}):
            own = _meetings(path for path, clock in zip(paths, clocks, strict=True) if clock == other)
            if not own.keys() & reference.keys():
                ranks = [rank for rank, clock in enumerate(clocks) if clock == other]
                raise ValueError(
                    f"{numbered_ranks(ranks)}, on another host than rank 0, {'have' if len(ranks) > 1 else 'has'} no "
                    "collective in common with the ranks of that host; expected one at least, from which to tell how "
                    "far their clocks are apart"
                )
            offsets[other] = _offset(reference, own)
    return offsets


def _meetings(paths: Iterable[Path]) -> Meetings:
    found: Meetings = {}
    for path in paths:
        for line in _events(path):
            if '"meeting"' in line:
                event = json.loads(line)
                came, left = event["ts"], event["ts"] + event["dur"]
                name = event["args"]["meeting"]
                last, first = found.get(name, (came, left))
                found[name] = max(last, came), min(first, left)
    return found


def _offset(reference: Meetings, own: Meetings) -> Offset:
    """Return the offset that makes the meetings of two hosts fall together."""
    names = sorted(own.keys() & reference.keys(), key=lambda name: own[name][1])
    there, here = np.array([reference[name] for name in names]), np.array([own[name] for name in names])
    differences = there[:, 1] - here[:, 1]
    times, offsets = [], []
    for block in _blocks(here[:, 1]):
        at_least = float(np.max(there[block, 0] - here[block, 1]))
        at_most = float(np.min(there[block, 1] - here[block, 0]))
        median = float(np.median(differences[block]))
        times.append(float(np.mean(here[block, 1])))
        offsets.append(min(max(median, at_least), at_most))
    residues = np.abs(differences - np.interp(here[:, 1], times, offsets))
    return Offset(times, offsets, float(np.quantile(residues, 0.95)))


def _blocks(times: Array) -> Iterator[slice]:
    """Yield blocks of rising times, each of a second and a few meetings at least."""
    start = 0
    for stop in range(1, len(times) + 1):
        is_long = times[stop - 1] - times[start] >= _BLOCK_MICROSECONDS and stop - start >= _FEWEST_MEETINGS
        if stop == len(times) or is_long:
            yield slice(start, stop)
            start = stop


def _shifted(lines: Iterable[str], offset: Offset) -> Iterator[str]:
    """Yield events with their times shifted: one that was inside another stays there."""
    if not offset.times:
        yield from lines
        return
    for line in lines:
        times = _TIMES.match(line)
        if times is None:
            yield line
            continue
        start = float(times[1])
        shifted = start + offset.at(start)
        head = f'{{"ts":{shifted:.3f},'
        if times[2] is not None:
            stop = start + float(times[2])
            head += f'"dur":{stop + offset.at(stop) - shifted:.3f},'
        yield head + line[times.end() :]
