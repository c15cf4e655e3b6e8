"""Trace files: the events of one rank in the JSON format of Chrome's tracing, written in pieces.

Between any two pieces the file is complete: each piece is written over the end of the file, and ends it anew. One
event is one line, and begins with its time, so that merging need not parse what it only shifts.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any, NamedTuple

from mpidist.core.files import folder_to_write, open_regular
from mpidist.core.settings import TRACE

# About 300 MB, which is what viewers still open.
MOST_EVENTS = 1_000_000
MERGED = "trace-merged.json"
HEAD = '{"displayTimeUnit":"ns","traceEvents":[\n'
_BETWEEN = ",\n"


class Span(NamedTuple):
    """Something that took time, in nanoseconds of the clock of this host.

    With an ``identity`` it may overlap others of its track that it does not contain (an asynchronous event).
    """

    name: str
    category: str
    track: int
    start: int
    stop: int
    args: dict[str, Any] | None = None
    identity: str | None = None


def path_of(folder: str | os.PathLike[str], rank: int) -> Path:
    """Return the path of a rank's file.

    >>> path_of("traces", 3).name
    'trace-rank-0003.json'
    """
    return Path(folder, f"trace-rank-{rank:04}.json")


def tail(about: dict[str, Any]) -> str:
    """Return the end of a file, which holds what is told about the whole of it in a line of its own."""
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
            self._descriptor = open_regular(path_of(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._room = most_events
        self._about: dict[str, Any] = {
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
        """Say what a track, as a viewer shows it below the rank, is called; tracks are shown by their number."""
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

    def _name(self, what: str, track: int, name: str, order: int) -> None:
        head = f'{{"ph":"M","pid":{self._rank},"tid":{track},"name":"{what}'
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
    what = f'"pid":{rank},"tid":{span.track},"cat":"{span.category}","name":{name}'
    if span.identity is None:
        return [f'{{"ts":{start},"dur":{(span.stop - span.start) / 1000:.3f},"ph":"X",{what}{args}}}']
    identity = f'"id2":{{"local":"{span.identity}"}}'
    return [
        f'{{"ts":{start},"ph":"b",{identity},{what}{args}}}',
        f'{{"ts":{stop},"ph":"e",{identity},{what}}}',
    ]


def _clock() -> str:
    """Return what is the same for two processes if they read the same clock (CLOCK_MONOTONIC)."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/time"
    host = boot.read_text().strip() if boot.exists() else socket.gethostname()
    return f"{host} {os.readlink(namespace)}" if os.path.exists(namespace) else host
