"""Traces in Chrome's JSON format: each rank drains a ring into its file. Rank 0 merges the files.

A file is complete JSON between any two writes: each write replaces the end of the file. One event is one line.

Ranks that read the same clock need no correction when they are merged. Handshakes align the clocks of hosts: no rank
leaves one before all ranks arrive, and all leave it at nearly the same time. For each second, the offset of a host is
the median difference of these ends, limited so that no rank leaves before another arrives.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np

from mpidist.collectives.observe.record import (
    ENTRY_BYTES,
    Entry,
    EntryRing,
    Kind,
    RankFile,
    State,
    clock,
    record_thread,
)
from mpidist.core.files import folder_to_write, open_regular, replacing
from mpidist.core.settings import TRACE

MERGED = "trace-merged.json"
# About 300 MB, which viewers still open.
MOST_EVENTS = 1_000_000
# Entries of the ring, 9 MB.
_SLOTS = 1 << 14
# How long the program waits for a thread that does not drain the ring. Then it loses entries.
_ROOM_SECONDS = 1.0
_HEAD, _BETWEEN = '{"displayTimeUnit":"ns","traceEvents":[\n', ",\n"


def trace_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """Return the path of a rank's file.

    >>> trace_path("traces", 3).name
    'trace-rank-0003.json'
    """
    return Path(folder, f"trace-rank-{rank:04}.json")


def _tail(facts: object) -> str:
    return f'\n],\n"otherData":{json.dumps(facts)}}}\n'


class TraceFacts(TypedDict):
    """The last line of a file."""

    rank: int
    ranks: int
    host: str
    clock: str
    dropped: int


class TraceFile(RankFile):
    """The trace file of this process, and the ring that it drains. Entries beyond ``most_events`` are dropped."""

    def __init__(self, folder: str, rank: int, ranks: int, slots: int = _SLOTS, most_events: int = MOST_EVENTS) -> None:
        super().__init__(f"the trace of rank {rank}", every=1.0)
        self.folder = folder
        self.ring = EntryRing(memoryview(bytearray(slots * ENTRY_BYTES)))
        self._rank = rank
        # Number and name of each track.
        self._tracks: dict[Hashable, tuple[int, str]] = {}
        self._named_tracks = 0
        # The newest entries that were drained and saved, and entries that were still running.
        self._drained, self._saved, self._running = 0, 0, list[int]()
        self._has_room = threading.Event()
        self._waited_at = -1
        host = os.uname().nodename
        self._facts: TraceFacts = {"rank": rank, "ranks": ranks, "host": host, "clock": _clock_name(), "dropped": 0}
        self._room = most_events
        self._end = 0
        with folder_to_write(folder, TRACE.name):
            names = self._names("process", 0, f"rank {rank} on {host}", rank)
            self._append(_HEAD + _BETWEEN.join(names), os.O_CREAT | os.O_TRUNC)

    def track(self, communicator: str, title: str) -> int:
        """Return the number of a track, by default of the current thread."""
        key = (communicator, title) if title else threading.get_ident()
        if key not in self._tracks:
            name = f"{title} of {communicator}" if title else threading.current_thread().name
            with self.ring.lock:
                self._tracks.setdefault(key, (len(self._tracks) + 1, name))
        return self._tracks[key][0]

    def make_room(self) -> None:
        """Have the thread drain a ring that is half full. If the file system hangs, this waits only once."""
        if self.ring.serial - self._drained > self.ring.slots // 2 and self._drained != self._waited_at:
            self._waited_at = self._drained
            self._has_room.clear()
            record_thread.wake()
            self._has_room.wait(_ROOM_SECONDS)

    def write(self, is_saving: bool) -> None:
        """Append the finished entries, and each running one once if the program may end."""
        newest, entries = self.ring.serial, list[Entry]()
        wanted, self._running = [*self._running, *range(self._drained + 1, newest + 1)], []
        for serial in wanted:
            entry = self.ring.entry(serial)
            if entry is None:
                self._facts["dropped"] += 1
                continue
            is_running = entry.state == State.RUNNING
            if is_running:
                self._running.append(serial)
            if not is_running or (is_saving and serial > self._saved):
                entries.append(entry)
        self._drained = newest
        if is_saving:
            self._saved = newest
        self._has_room.set()
        self._facts["dropped"] += max(0, len(entries) - self._room)
        tracks = list(self._tracks.values())[self._named_tracks :]
        lines = [line for number, name in tracks for line in self._names("thread", number, name, number)]
        lines += [line for entry in entries[: self._room] for line in _lines(entry, self._rank)]
        self._append("".join(_BETWEEN + line for line in lines))
        self._room -= min(len(entries), self._room)
        self._named_tracks += len(tracks)

    def _names(self, kind: str, track: int, name: str, order: int) -> Sequence[str]:
        head = f'{{"ph":"M","pid":{self._rank},"tid":{track},"name":"{kind}'
        return (
            f'{head}_name","args":{{"name":{json.dumps(name)}}}}}',
            f'{head}_sort_index","args":{{"sort_index":{order}}}}}',
        )

    def _append(self, text: str, flags: int = 0) -> None:
        """Replace the end of the file. It is closed between two writes, which makes it visible on other hosts."""
        data = text.encode()
        view, start = memoryview(data + _tail(self._facts).encode()), self._end
        descriptor = open_regular(trace_path(self.folder, self._rank), os.O_WRONLY | flags)
        try:
            while view:
                written = os.pwrite(descriptor, view, start)
                view, start = view[written:], start + written
        finally:
            os.close(descriptor)
        self._end += len(data)


def _lines(entry: Entry, rank: int) -> list[str]:
    """Return the events of an entry. Asynchronous events have an identity, and may overlap others of their track."""
    text, number, nbytes = entry.text, entry.number, entry.nbytes
    title, is_async = text.partition(" of ")[0], entry.state == State.RUNNING
    args: dict[str, object] = {"text": text, "communicator": entry.communicator, "number": number, "bytes": nbytes}
    if entry.note:
        args["error" if entry.state == State.FAILED else "algorithm"] = entry.note
    match entry.kind:
        case Kind.COLLECTIVE:
            category = "collective"
        case Kind.MESSAGE:
            category, is_async = "message", True
        case Kind.QUEUE if text:
            category, title, is_async = "queue", f"queue {title}", True
        case Kind.QUEUE:
            category, title, args = "queue", "queue", {}
        case Kind.WAIT:
            category, title, args = "wait", f"wait for {title}", {"text": text}
        case Kind.CHUNK:
            category, title = "between nodes" if nbytes else "inside the node", text
            args = {"chunk": number, "bytes": nbytes} if nbytes else {"chunk": number}
        case _:
            category, title = "phase", text
            args = {"meeting": f"{entry.communicator}, {number}, {entry.note}"} if entry.note else {}
    if entry.state == State.RUNNING:
        category, title = "unfinished", f"unfinished {title}"
    start, end = f'{{"ts":{entry.begin / 1000:.3f}', entry.end or clock()
    event = f'"pid":{rank},"tid":{entry.track},"cat":"{category}","name":{json.dumps(title)}'
    arguments = f',"args":{json.dumps(args)}' if args else ""
    if not is_async:
        return [f'{start},"dur":{(end - entry.begin) / 1000:.3f},"ph":"X",{event}{arguments}}}']
    event = f'"id2":{{"local":"{entry.kind} {entry.serial}"}},{event}'
    return [f'{start},"ph":"b",{event}{arguments}}}', f'{{"ts":{end / 1000:.3f},"ph":"e",{event}}}']


def _clock_name() -> str:
    """Return a name of the clock, the same in all processes that read it."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/time"
    host = boot.read_text().strip() if boot.exists() else os.uname().nodename
    return f"{host} {os.readlink(namespace)}" if os.path.exists(namespace) else host


# Merging ----------------------------------------------------------------------------------------------------------


def merge(folder: str | os.PathLike[str]) -> Path:
    """Merge the files of all ranks into one in the folder, and return its path."""
    facts = [_facts(trace_path(folder, 0))]
    paths = [trace_path(folder, rank) for rank in range(facts[0]["ranks"])]
    facts += map(_facts, paths[1:])
    offsets = _offsets(paths, [each["clock"] for each in facts])
    merged = Path(folder, MERGED)
    with replacing(merged) as descriptor, open(descriptor, "w", closefd=False) as out:
        out.write(_HEAD)
        between = ""
        for path, each in zip(paths, facts, strict=True):
            for line in _events(path):
                out.write(between + offsets[each["clock"]].corrected(line))
                between = _BETWEEN
        hosts = {each["host"]: offsets[each["clock"]].summary for each in facts}
        out.write(_tail({"ranks": len(paths), "dropped": sum(each["dropped"] for each in facts), "clocks": hosts}))
    return merged


def _facts(path: Path) -> TraceFacts:
    """Return the facts in the last line of a file."""
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing. Name the folder that the job had as MPIDIST_TRACE. If the hosts do not share it, copy "
            "the files of all ranks into one folder"
        )
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        last = file.read().decode().rstrip("\n").rpartition("\n")[2]
    if not last.startswith('"otherData":') or not last.endswith("}"):
        raise ValueError(f"{path} ends in {last[:80]!r}, which is not the end of a trace. Copy the whole file")
    facts: TraceFacts = json.loads("{" + last)["otherData"]
    return facts


def _events(path: Path) -> Iterator[str]:
    with path.open() as file:
        next(file)
        for line in file:
            if line.startswith("]"):
                return
            yield line.rstrip(_BETWEEN)


def _offsets(paths: Sequence[Path], clocks: Sequence[str]) -> dict[str, _Offset]:
    """Return the offset of each clock from the clock of rank 0."""
    paths_of: dict[str, list[Path]] = {}
    for path, name in zip(paths, clocks, strict=True):
        paths_of.setdefault(name, []).append(path)
    if len(paths_of) == 1:
        return {clocks[0]: _Offset({}, {})}
    found = {name: _handshakes(own) for name, own in paths_of.items()}
    reference = found[clocks[0]]
    for name, own in paths_of.items():
        if not found[name].keys() & reference.keys():
            raise ValueError(
                f"{own[0]} and the ranks on the host of rank 0 have no collective in common, so their clocks cannot be "
                "compared. Add a barrier of all ranks to the program"
            )
    return {name: _Offset(reference, own) for name, own in found.items()}


def _handshakes(paths: Iterable[Path]) -> dict[str, tuple[float, float]]:
    """Return for each handshake when the last rank arrived and the first rank left."""
    found: dict[str, tuple[float, float]] = {}
    for path in paths:
        for line in _events(path):
            if '"meeting"' in line:
                event = json.loads(line)
                arrived, left = event["ts"], event["ts"] + event["dur"]
                name = event["args"]["meeting"]
                last, first = found.get(name, (arrived, left))
                found[name] = max(last, arrived), min(first, left)
    return found


class _Offset:
    """The offset of a host's clock from its handshakes. Without handshakes, the offset is 0.

    Attributes:
        summary: The first offset, and the error that 95 % of the handshakes do not exceed, in microseconds.
    """

    def __init__(self, reference: dict[str, tuple[float, float]], own: dict[str, tuple[float, float]]) -> None:
        self._times, self._offsets = list[float](), list[float]()
        self.summary = {"offset_us": 0.0, "spread_us": 0.0}
        names = own.keys() & reference.keys()
        if names:
            there = np.array([reference[name] for name in names])
            here = np.array([own[name] for name in names])
            difference = there[:, 1] - here[:, 1]
            seconds = here[:, 1] // 1e6
            for second in np.unique(seconds):
                block = seconds == second
                at_least, at_most = there[block, 0] - here[block, 1], there[block, 1] - here[block, 0]
                self._times.append(float(here[block, 1].mean()))
                median = float(np.median(difference[block]))
                self._offsets.append(min(max(median, float(at_least.max())), float(at_most.min())))
            errors = np.abs(difference - np.interp(here[:, 1], self._times, self._offsets))
            spread = float(np.quantile(errors, 0.95))
            self.summary = {"offset_us": round(self._offsets[0], 3), "spread_us": round(spread, 3)}

    def corrected(self, line: str) -> str:
        """Return an event with corrected times. Nested events stay nested."""
        if not self._times or not line.startswith('{"ts"'):
            return line
        event = json.loads(line)
        end = event["ts"] + event.get("dur", 0.0)
        start, stop = (time + float(np.interp(time, self._times, self._offsets)) for time in (event["ts"], end))
        event["ts"] = round(start, 3)
        if "dur" in event:
            event["dur"] = round(stop - event["ts"], 3)
        return json.dumps(event, separators=(",", ":"))
