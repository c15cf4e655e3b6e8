"""Merging the trace files of all ranks into one, with the clocks of the hosts aligned.

Done by rank 0 at the end of a program, and by hand: ``python -m mpidist trace DIR``.

Ranks that read the same clock are taken as they are. Between hosts the collectives say how the clocks stand: no rank
leaves the opening of a collective before all ranks have come, and all leave it at nearly the same time. The offset of
a host is the median difference of these ends, within the bounds that nobody leaves before another comes, anew for each
second, because clocks drift.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.collectives.watch.trace_file import HEAD, MERGED, path_of, tail
from mpidist.core.files import replacing

_BLOCK_MICROSECONDS = 1e6
_FEWEST_MEETINGS = 5
# How an event that has a time begins.
_TIMES = re.compile(r'{"ts":([0-9.]+)(?:,"dur":([0-9.]+))?,')
# A host's meetings by what they are called: when its last rank came, and its first one left.
Meetings = dict[str, tuple[float, float]]


def how(folder: str | os.PathLike[str]) -> str:
    """Say how to merge by hand."""
    return f"once all files are in {folder}, type: python -m mpidist trace {folder}"


def merge(folder: str | os.PathLike[str]) -> Path:
    """Merge the files of all ranks in ``folder`` into one file there, and return its path.

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
    first = path_of(folder, 0)
    if not first.exists():
        raise FileNotFoundError(f"{first} is not there; expected the folder that MPIDIST_TRACE named")
    paths = [path_of(folder, rank) for rank in range(_about(first)["ranks"])]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise FileNotFoundError(
            f"{', '.join(missing)} {'are' if len(missing) > 1 else 'is'} not in {folder}; where the hosts do not share "
            "it, copy the files of all into one folder"
        )
    return paths


def _about(path: Path) -> dict[str, Any]:
    """Return what is told about the whole of a file in its last line."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        last = file.read().decode().rstrip("\n").rpartition("\n")[2]
    if not last.startswith('"otherData":') or not last.endswith("}"):
        raise ValueError(f"{path} ends in {last[:80]!r}; expected a trace file that mpidist wrote, in full")
    about: dict[str, Any] = json.loads("{" + last)["otherData"]
    return about


def _events(path: Path) -> Iterator[str]:
    with path.open() as file:
        next(file)
        for line in file:
            if line.startswith("]"):
                return
            yield line.rstrip(",\n")


class Offset:
    """What to add to the times of a clock, which changes slowly.

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
                    f"ranks {ranks}, on another host than rank 0, have no collective in common with the ranks of that "
                    "host; expected one at least, from which to tell how far their clocks are apart"
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
    """Return what makes the meetings of two hosts fall together."""
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
    """Cut rising times into blocks of a second and a few meetings at least."""
    start = 0
    for stop in range(1, len(times) + 1):
        is_long = times[stop - 1] - times[start] >= _BLOCK_MICROSECONDS and stop - start >= _FEWEST_MEETINGS
        if stop == len(times) or is_long:
            yield slice(start, stop)
            start = stop


def _shifted(lines: Iterable[str], offset: Offset) -> Iterator[str]:
    """Return events with their times shifted: what was inside something else stays there."""
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
