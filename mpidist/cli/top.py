"""``python -m mpidist top``: where the ranks of a running job are.

Ranks in the same state share a line. Failed and outlying ranks come first.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from mpidist.cli.json_output import add_json_argument, json_text, seconds, table_lines
from mpidist.collectives.observe.job_status import (
    COMPUTING,
    ENDED,
    FAILED,
    IN_FLIGHT,
    WAITING,
    RankReport,
    StatusFolder,
    process_born,
    read_status_folder,
)
from mpidist.collectives.reduce.registry import size_text
from mpidist.core.settings import STATUS
from mpidist.core.text import groups_of, names_text, ranks_text

HELP = "show where the ranks of a running job are (MPIDIST_STATUS), and how it ended"
# The size of output that is no terminal.
_WIDTH, _HEIGHT = 200, 50
# Enter and leave the alternate screen of a terminal, and clear it.
_ENTER, _LEAVE, _CLEAR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[H\x1b[J"

GONE, SILENT, ABSENT = "gone", "silent", "absent"
"""More states: ended without a last report, has not written lately, has never written."""
_LIVE = (WAITING, IN_FLIGHT, COMPUTING)
# These states come first, in this order.
_TROUBLE = (FAILED, GONE, SILENT, ABSENT)
# A rank is silent after it missed this number of writes. A slow file system gets some seconds more.
_MISSED, _SLOW_SECONDS = 2, 2.0
_RANKS_WIDTH = 24
_SILENCE = {
    SILENT: "has written nothing since: it was killed or stopped, its host is lost, or code keeps Python's lock",
    GONE: "has ended without a last report, as by kill -9",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", metavar="DIR", nargs="?", help=f"folder that the job writes to, or {STATUS.name}")
    parser.add_argument("--once", action="store_true", help="print once, which is the default without a terminal")
    parser.add_argument("--every", type=seconds, metavar="SECONDS", default=2.0, help="time between two screens (2)")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Show the job once, or until Ctrl-C."""
    folder = arguments.folder or STATUS.read()
    if folder is None:
        raise ValueError(
            "the folder is missing. Pass the folder that the job was started with as "
            f"{STATUS.name}: python -m mpidist top DIR"
        )
    if not (arguments.once or arguments.json) and sys.stdout.isatty():
        _show(folder, arguments.every)
    found, now = read_status_folder(folder), time.time()
    states = states_of(found, now)
    if arguments.json:
        ranks = [
            {**state._asdict(), "report": None if state.report is None else dataclasses.asdict(state.report)}
            for state in states
        ]
        facts = {"ranks": ranks, "files_of_other_jobs": found.others, "problems": found.problems}
        print(json_text({"folder": os.path.abspath(folder), **facts}))
    else:
        print("\n".join(screen(found, states, now, *_size())))
    return 0


def _size() -> os.terminal_size:
    return shutil.get_terminal_size((_WIDTH, _HEIGHT)) if sys.stdout.isatty() else os.terminal_size((_WIDTH, _HEIGHT))


def _show(folder: str, every: float) -> None:
    """Redraw the screen until Ctrl-C."""
    sys.stdout.write(_ENTER)
    try:
        while True:
            width, height = _size()
            try:
                found, now = read_status_folder(folder), time.time()
                lines = screen(found, states_of(found, now), now, width, height - 2)
            except (OSError, ValueError) as error:
                lines = [str(error)]
            foot = f"{time.strftime('%H:%M:%S')}, every {every:g} s; Ctrl-C ends"
            sys.stdout.write(_CLEAR + "\n".join([*lines, "", foot[:width]]))
            sys.stdout.flush()
            time.sleep(every)
    except KeyboardInterrupt:
        return  # the caller prints the last screen
    finally:
        sys.stdout.write(_LEAVE)


# States -----------------------------------------------------------------------------------------------------------


class RankState(NamedTuple):
    """The state of a rank."""

    rank: int
    kind: str  # FAILED, GONE, SILENT, ABSENT, ENDED, WAITING, IN_FLIGHT or COMPUTING
    text: str  # the same for all ranks that share a line
    seconds: float  # in this state
    report: RankReport | None


def may_exist(report: RankReport) -> bool:
    """Return whether the process of a rank exists, or is on another host."""
    return report.host != socket.gethostname() or process_born(report.process) == report.born


def states_of(folder: StatusFolder, now: float, exists: Callable[[RankReport], bool] = may_exist) -> list[RankState]:
    """Return the state of each rank at a time of the wall clock."""
    reports = {report.rank: report for report in folder.reports}
    absent = "has written nothing: it has created no strategy or communicator yet"
    return [
        _state(reports[rank], now, exists) if rank in reports else RankState(rank, ABSENT, absent, 0.0, None)
        for rank in range(folder.reports[0].ranks)
    ]


def _state(report: RankReport, now: float, exists: Callable[[RankReport], bool]) -> RankState:
    activity, age = report.activity, max(0.0, now - report.written)
    kind, seconds = report.state, age
    if kind == FAILED:
        text = f"failed with {report.error}, at {_short(activity.call_site)}"
    elif kind == ENDED:
        text = "ended its program"
    elif age > _MISSED * report.every + _SLOW_SECONDS:
        kind = SILENT if exists(report) else GONE
        text = f"{_SILENCE[kind]}; it {_doing(report)}"
    else:
        kind, seconds, text = activity.kind, activity.seconds, _doing(report)
    return RankState(report.rank, kind, text, seconds, report)


def _doing(report: RankReport) -> str:
    activity, line = report.activity, _short(report.activity.call_site)
    operation = f"{activity.operation}, number {activity.number}" if activity.number else activity.operation
    if activity.kind == WAITING:
        return f"waits in {operation}, at {line}"
    if activity.kind == IN_FLIGHT:
        return f"is at {line}, with {operation} in flight"
    return f"is at {line}; its last collective: {operation}" if operation else f"is at {line}; no collective yet"


def _short(call_site: str) -> str:
    """Return a line of a program with the last two parts of its path.

    >>> _short("/home/me/net/train.py:30 (load)")
    'net/train.py:30 (load)'
    """
    path, colon, rest = call_site.rpartition(":")
    return "/".join(Path(path).parts[-2:]) + colon + rest


# The screen -------------------------------------------------------------------------------------------------------


def screen(folder: StatusFolder, states: Sequence[RankState], now: float, width: int, height: int) -> list[str]:
    """Return at most ``height`` lines of at most ``width`` characters."""
    by_rank = {state.rank: state for state in states}
    alike = groups_of((state.rank, (state.kind, state.text)) for state in states)
    groups = sorted(([by_rank[rank] for rank in ranks] for _, ranks in alike), key=_order)
    head = _head(folder, states, now)
    head += [line for report in folder.reports for line in textwrap.wrap(report.straggler, width)]
    room = height - len(head) - 2
    shown = groups if len(groups) <= room else groups[: max(room - 1, 1)]
    rows = [("ranks", "for", "steps/s", "bytes/s", ""), *map(_cells, shown)]
    lines = table_lines(rows, right=(1, 2, 3))
    if len(shown) < len(groups):
        left = sum(map(len, groups[len(shown) :]))
        lines.append(f"and {len(groups) - len(shown)} more lines, of {left} ranks; all: --json")
    return [line if len(line) <= width else f"{line[: width - 3]}..." for line in [*head, "", *lines]]


def _order(group: list[RankState]) -> tuple[int, int, bool, int]:
    """Return the place of a group: failures first, then small groups, waiting ranks last."""
    kind = group[0].kind
    trouble = _TROUBLE.index(kind) if kind in _TROUBLE else len(_TROUBLE)
    return trouble, len(group), kind == WAITING, group[0].rank


def _cells(group: list[RankState]) -> tuple[str, str, str, str, str]:
    first = group[0]
    live = [state.report for state in group if state.kind in _LIVE and state.report is not None]
    text = first.text
    if len(group) == 1 and first.kind in _SILENCE and first.report is not None:
        text += f" (process {first.report.process} on {first.report.host})"
    return (
        ranks_text([state.rank for state in group], _RANKS_WIDTH),
        "-" if first.report is None else _duration_text(max(state.seconds for state in group)),
        _range([report.rates.steps for report in live], _rate_text),
        _range([report.rates.nbytes for report in live], lambda number: size_text(int(number))),
        text,
    )


def _range(numbers: Sequence[float], text_of: Callable[[float], str]) -> str:
    if not numbers:
        return "-"
    least, most = text_of(min(numbers)), text_of(max(numbers))
    return least if least == most else f"{least} to {most}"


def _rate_text(number: float) -> str:
    """Return a rate to about two digits.

    >>> _rate_text(0.125), _rate_text(6.17), _rate_text(321.7), _rate_text(0.0)
    ('0.12', '6.2', '322', '0')
    """
    return f"{number:.2g}" if number < 10 else f"{number:.0f}"


def _duration_text(seconds: float) -> str:
    """Return a time in at most two units.

    >>> _duration_text(3.2), _duration_text(72), _duration_text(7325), _duration_text(200000)
    ('3 s', '1 min 12 s', '2 h 2 min', '2 d 7 h')
    """
    left, parts = int(seconds), list[str]()
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if parts or count or unit == "s":
            parts.append(f"{count} {unit}" if count or not parts else "")
    return " ".join(filter(None, parts[:2]))


def _head(folder: StatusFolder, states: Sequence[RankState], now: float) -> list[str]:
    first = folder.reports[0]
    hosts = list(dict.fromkeys(report.host for report in folder.reports))
    ranks = f"{first.ranks} rank{'s' * (first.ranks != 1)}"
    lines = [f"job of {ranks} on {names_text(hosts)}: {first.program}", _summary(folder, states, now)]
    if folder.others:
        lines.append(f"{folder.others} more files here belong to other jobs. Use one folder for each job")
    if folder.problems:
        lines.append(f"{len(folder.problems)} files cannot be read. The first problem: {folder.problems[0]}")
    return lines


def _summary(folder: StatusFolder, states: Sequence[RankState], now: float) -> str:
    """Return how long the job has run, and the rates of its ranks."""
    started = min(report.started for report in folder.reports)
    last = max(report.written for report in folder.reports)
    live = [state.report.rates for state in states if state.kind in _LIVE and state.report is not None]
    if live:
        steps, collectives, nbytes = (
            sum(getattr(rates, name) for rates in live) / len(live) for name in ("steps", "collectives", "nbytes")
        )
        rates = f"{_rate_text(steps)} steps/s, {_rate_text(collectives)} collectives/s, {size_text(int(nbytes))}/s"
        return f"running for {_duration_text(now - started)}; {rates} on each rank"
    ran = f"after {_duration_text(last - started)}, {_duration_text(max(0.0, now - last))} ago"
    kinds = {state.kind for state in states}
    if kinds == {ENDED}:
        return f"the job has ended, {ran}"
    if FAILED in kinds:
        return f"the job has failed, {ran}"
    return f"the job was killed, {ran}" if SILENT not in kinds else f"the job was last heard of, {ran}"
