"""The text of ``python -m mpidist top``.

Ranks that say the same share a line, and the odd ones come first.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpidist.collectives.reduce.table import size_text
from mpidist.collectives.watch.status_files import (
    COMPUTING,
    ENDED,
    FAILED,
    UNDER_WAY,
    WAITING,
    RankReport,
    StatusFolder,
)
from mpidist.collectives.watch.status_writer import process_born
from mpidist.core.text import groups_of, names_text, ranks_text

GONE, SILENT, ABSENT = "gone", "silent", "absent"
"""More states: the process is gone; nothing was written lately; nothing at all."""
# The states that come first in the list, worst first.
_ORDER = (FAILED, GONE, SILENT, ABSENT)
# A rank is silent when it has left out two writings, and so many seconds for a slow file system.
_MISSED, _SLOW_SECONDS = 2, 2.0
_RANKS_WIDTH = 24
_SILENCE = {
    SILENT: "has written nothing since: it was killed or stopped, its host is lost, or code keeps Python's lock",
    GONE: "has ended without a word, as by kill -9",
}


@dataclass(frozen=True)
class RankState:
    """The state of a rank, and the text that says so.

    Args:
        rank: Its number.
        kind: ``FAILED``, ``GONE``, ``SILENT``, ``ABSENT``, ``ENDED``, ``WAITING``, ``UNDER_WAY`` or ``COMPUTING``.
        text: The same of all ranks that share a line.
        seconds: How long it has been so.
        report: Its last one.
    """

    rank: int
    kind: str
    text: str
    seconds: float
    report: RankReport | None


def states_of(folder: StatusFolder, now: float, is_there: Callable[[RankReport], bool]) -> list[RankState]:
    """Return the state of each rank of a job.

    Args:
        folder: With the reports of the ranks.
        now: Seconds of the wall clock.
        is_there: Returns whether the process of a rank may still be there.
    """
    reports = {report.rank: report for report in folder.reports}
    return [
        _state(reports[rank], now, is_there)
        if rank in reports
        else RankState(rank, ABSENT, "has written nothing: it has made no strategy or communicator yet", 0.0, None)
        for rank in range(folder.reports[0].ranks)
    ]


def may_be_there(report: RankReport) -> bool:
    """Return whether the process of a rank is there, if this host can tell."""
    return report.host != socket.gethostname() or process_born(report.process) == report.born


def _state(report: RankReport, now: float, is_there: Callable[[RankReport], bool]) -> RankState:
    activity, age = report.activity, max(0.0, now - report.written)
    kind, seconds = report.state, age
    if kind == FAILED:
        text = f"failed with {report.error}, at {_shown(activity.call_site)}"
    elif kind == ENDED:
        text = "ended its program"
    elif age > _MISSED * report.every + _SLOW_SECONDS:
        kind = SILENT if is_there(report) else GONE
        text = f"{_SILENCE[kind]}; it {_doing(report)}"
    else:
        kind, seconds, text = activity.kind, activity.seconds, _doing(report)
    return RankState(report.rank, kind, text, seconds, report)


def _doing(report: RankReport) -> str:
    activity, place = report.activity, _shown(report.activity.call_site)
    number = f", number {activity.number}" if activity.number else ""
    if activity.kind == WAITING:
        return f"waits in {activity.operation}{number}, at {place}"
    if activity.kind == UNDER_WAY:
        return f"is at {place}, with {activity.operation}{number} under way"
    last = f"its last collective: {activity.operation}{number}" if activity.operation else "no collective yet"
    return f"is at {place}; {last}"


def _shown(call_site: str) -> str:
    """Return a line of a program with the last two parts of its path.

    >>> _shown("/home/me/net/train.py:30 (load)")
    'net/train.py:30 (load)'
    """
    path, colon, rest = call_site.rpartition(":")
    return "/".join(Path(path).parts[-2:]) + colon + rest


@dataclass(frozen=True)
class _Group:
    """The ranks that share a line."""

    states: list[RankState]

    @property
    def order(self) -> tuple[int, int, bool, int]:
        """The place of the line: trouble first, then the fewest ranks, waiting ones last."""
        first = self.states[0]
        trouble = _ORDER.index(first.kind) if first.kind in _ORDER else len(_ORDER)
        return trouble, len(self.states), first.kind == WAITING, first.rank

    def cells(self) -> tuple[str, str, str, str, str]:
        """Return the texts of the columns."""
        reports = [state.report for state in self.states if state.report is not None]
        alive = [report for state, report in zip(self.states, reports, strict=False) if state.kind in _LIVE]
        seconds = max(state.seconds for state in self.states)
        return (
            ranks_text([state.rank for state in self.states], _RANKS_WIDTH),
            "-" if not reports else duration_text(seconds),
            _range([report.rates.steps for report in alive], _number_text),
            _range([report.rates.nbytes for report in alive], lambda number: size_text(int(number))),
            self._text(),
        )

    def _text(self) -> str:
        first = self.states[0]
        if len(self.states) > 1 or first.kind not in _SILENCE or first.report is None:
            return first.text
        return f"{first.text} (process {first.report.process} on {first.report.host})"


_LIVE = (WAITING, UNDER_WAY, COMPUTING)


def _range(numbers: Sequence[float], text_of: Callable[[float], str]) -> str:
    if not numbers:
        return "-"
    least, most = text_of(min(numbers)), text_of(max(numbers))
    return least if least == most else f"{least} to {most}"


def _number_text(number: float) -> str:
    """Return a rate to about two digits.

    >>> _number_text(0.125), _number_text(6.17), _number_text(321.7), _number_text(0.0)
    ('0.12', '6.2', '322', '0')
    """
    return f"{number:.2g}" if number < 10 else f"{number:.0f}"


def duration_text(seconds: float) -> str:
    """Return a time in two units at the most.

    >>> duration_text(3.2), duration_text(72), duration_text(7325), duration_text(200000)
    ('3 s', '1 min 12 s', '2 h 2 min', '2 d 7 h')
    """
    whole = int(seconds)
    for (large, size), (small, part) in (
        (("d", 86400), ("h", 3600)),
        (("h", 3600), ("min", 60)),
        (("min", 60), ("s", 1)),
    ):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {large}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"


def screen(folder: StatusFolder, states: Sequence[RankState], now: float, width: int, height: int) -> list[str]:
    """Return the lines of a screen.

    Args:
        folder, states: See ``states_of``.
        now: Seconds of the wall clock.
        width: Characters of a line; longer ones are cut.
        height: Lines at most.
    """
    by_rank = {state.rank: state for state in states}
    alike = groups_of((state.rank, (state.kind, state.text)) for state in states)
    groups = sorted((_Group([by_rank[rank] for rank in ranks]) for _, ranks in alike), key=lambda group: group.order)
    head = _head(folder, states, now)
    room = height - len(head) - 2
    shown = groups if len(groups) <= room else groups[: max(room - 1, 1)]
    rows = [("ranks", "for", "steps/s", "bytes/s", ""), *(group.cells() for group in shown)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(row[column].rjust(widths[column]) for column in range(1, 4)), row[4]]
        ).rstrip()
        for row in rows
    ]
    if len(shown) < len(groups):
        left = sum(len(group.states) for group in groups[len(shown) :])
        lines.append(f"and {len(groups) - len(shown)} more lines, of {left} ranks; all: --json")
    return [line if len(line) <= width else f"{line[: width - 3]}..." for line in [*head, "", *lines]]


def _head(folder: StatusFolder, states: Sequence[RankState], now: float) -> list[str]:
    first = folder.reports[0]
    hosts = list(dict.fromkeys(report.host for report in folder.reports))
    ranks = f"{first.ranks} rank{'s' * (first.ranks != 1)}"
    lines = [f"job of {ranks} on {names_text(hosts)}: {first.program}", _summary(folder, states, now)]
    if folder.others:
        lines.append(
            f"{folder.others} more files here are of other jobs; jobs that run at the same time want a folder each"
        )
    if folder.problems:
        lines.append(f"{len(folder.problems)} files cannot be read, as {folder.problems[0]}")
    return lines


def _summary(folder: StatusFolder, states: Sequence[RankState], now: float) -> str:
    """Return how long the job has run, and the rates of its ranks."""
    started = min(report.started for report in folder.reports)
    last = max(report.written for report in folder.reports)
    live = [state.report for state in states if state.kind in _LIVE and state.report is not None]
    if live:
        each = [sum(getattr(report.rates, name) for report in live) / len(live) for name in _RATES]
        steps, collectives = _number_text(each[0]), _number_text(each[1])
        rates = f"{steps} steps/s, {collectives} collectives/s, {size_text(int(each[2]))}/s on each rank"
        return f"running for {duration_text(now - started)}; {rates}"
    ran = f"after {duration_text(last - started)}, {duration_text(max(0.0, now - last))} ago"
    if all(state.kind == ENDED for state in states):
        return f"the job has ended, {ran}"
    if any(state.kind == FAILED for state in states):
        return f"the job has failed, {ran}"
    is_gone = all(state.kind in (GONE, ENDED, ABSENT) for state in states)
    return f"the job {'was killed' if is_gone else 'was last heard of'}, {ran}"


_RATES = ("steps", "collectives", "nbytes")


def facts_of(folder: StatusFolder, states: Sequence[RankState], path: str) -> dict[str, object]:
    """Return the same as JSON types, every rank by itself."""
    return {
        "folder": os.path.abspath(path),
        "ranks": [_facts(state) for state in states],
        "files_of_other_jobs": folder.others,
        "problems": folder.problems,
    }


def _facts(state: RankState) -> dict[str, object]:
    written = None if state.report is None else vars(state.report)
    report = written and {
        name: vars(value) if name in ("activity", "totals", "rates") else value for name, value in written.items()
    }
    return {"rank": state.rank, "kind": state.kind, "text": state.text, "seconds": state.seconds, "report": report}
