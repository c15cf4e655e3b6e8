"""The text of ``python -m mpidist flight``: progress of ranks, and where they differ.

Of the flight of a rank only that stays which the text may need: a call that many ranks made is kept once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from sys import intern

from mpidist.collectives.watch.flight_record import CALL_DONE, CALL_FAILED, CALL_RUNNING, MESSAGE, Flight, FlightEntry
from mpidist.core.text import group_lines, groups_of, numbered_ranks

_STATES = {CALL_RUNNING: "had not ended", CALL_FAILED: "failed"}
# A communicator more is shown where there are fewer lines so far; messages, and calls of one number, at the most.
_ENOUGH_LINES, _MOST_MESSAGES, _MOST_CALLS = 40, 40, 4
_ELSEWHERE = "; all: --json"


@dataclass(frozen=True)
class Divergence:
    """The first collective of a communicator that ranks did not make alike.

    Args:
        number: Of the collective.
        groups: The calls, and the ranks that made each; the odd ones first.
    """

    number: int
    groups: list[tuple[str, list[int]]]


class _Call:
    """The ranks that made one call, and when.

    Attributes:
        begin, end: Seconds of the wall clock: of the first that began, of the last that ended.
        has_ended: Whether it has ended on all of them.
    """

    __slots__ = ("_runs", "begin", "end", "has_ended")

    def __init__(self) -> None:
        # First and last of ranks that follow one another.
        self._runs: list[list[int]] = []
        self.begin, self.end, self.has_ended = math.inf, 0.0, True

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return sum(last + 1 - first for first, last in self._runs)

    @property
    def ranks(self) -> list[int]:
        """The ranks."""
        return [rank for first, last in self._runs for rank in range(first, last + 1)]

    def add(self, rank: int, entry: FlightEntry) -> None:
        """Add the call of the next rank."""
        if self._runs and self._runs[-1][1] == rank - 1:
            self._runs[-1][1] = rank
        else:
            self._runs.append([rank, rank])
        self.begin, self.end = min(self.begin, entry.begin), max(self.end, entry.end)
        self.has_ended = self.has_ended and bool(entry.end)

    @property
    def when(self) -> str:
        """When the first rank began, and how long all took."""
        took = f"{1e3 * (self.end - self.begin):.3f} ms" if self.has_ended else "not ended"
        return f"{time.strftime('%H:%M:%S', time.localtime(self.begin))}  {took:>12}"


def merged_text(flights: Iterable[Flight], last: int) -> str:
    """Return the last collectives of every communicator, rank beside rank.

    Args:
        flights: Of the ranks, in their order.
        last: How many collectives of each communicator are shown.
    """
    ranks, missing, sections = 0, set[int](), dict[str, Section]()
    for flight in flights:
        if not ranks:
            ranks = flight.ranks
            missing.update(range(ranks))
        missing.discard(flight.rank)
        by_name: dict[str, list[FlightEntry]] = {}
        for entry in flight.entries:
            by_name.setdefault(entry.communicator, []).append(entry)
        for name, entries in by_name.items():
            sections.setdefault(name, Section(name)).add(flight.rank, entries, last)
    lines = [f"flight record of {ranks} rank{'s' * (ranks != 1)}"]
    if missing:
        lines.append(f"  without {numbered_ranks(sorted(missing))}: no file to read")
    return "\n".join(lines + _section_lines(sections.values(), last, room=_ENOUGH_LINES - len(lines)))


def _section_lines(found: Iterable[Section], last: int, room: int) -> list[str]:
    """Return the lines of as many communicators as there is room for, the unwell first."""
    lines: list[str] = []
    sections = [(section, section.is_well()) for section in found]
    sections.sort(key=lambda section: section[1])
    for shown, (section, _) in enumerate(sections):
        if shown and len(lines) >= room:
            left = [is_well for _, is_well in sections[shown:]]
            return [*lines, "", f"and {len(left)} more communicators, {sum(left)} of them well{_ELSEWHERE}"]
        lines += ["", section.name, *section.lines(last)]
    return lines


class Section:
    """The collectives and messages of one communicator.

    Args:
        name: Of the communicator.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        # The last collective of each rank that made one, and all of them by number and call.
        self._progress: list[tuple[int, str]] = []
        self._calls: dict[int, dict[tuple[str, str], _Call]] = {}
        # The first collective that all records have.
        self._first = 0
        self._all_done = True
        self._messages: list[tuple[FlightEntry, list[int]]] = []

    def add(self, rank: int, entries: list[FlightEntry], last: int) -> None:
        """Add those of the next rank, and the last of its messages."""
        calls = [entry for entry in entries if entry.number != MESSAGE]
        for entry in calls:
            made = self._calls.setdefault(entry.number, {})
            made.setdefault((intern(entry.text), intern(entry.call_site)), _Call()).add(rank, entry)
        if calls:
            self._first = max(self._first, calls[0].number)
            self._progress.append((rank, intern(_progress(calls[-1]))))
        messages = [entry for entry in entries if entry.number == MESSAGE]
        self._messages += [(entry, [rank]) for entry in messages[:-last] if entry.state == CALL_RUNNING]
        self._messages += [(entry, [rank]) for entry in messages[-last:]]
        self._all_done &= all(each[-1].state == CALL_DONE for each in (calls, messages) if each)

    def is_well(self) -> bool:
        """Return whether all ranks made the same collectives, and these have ended."""
        return self._all_done and len({what for _, what in self._progress}) <= 1 and self.divergence() is None

    def lines(self, last: int) -> list[str]:
        """Return its lines, with so many collectives."""
        lines = []
        if self._calls:
            groups = groups_of(self._progress)
            lines += group_lines(groups, lambda what, ranks: (f"  {numbered_ranks(ranks)} ", what, ""))
            lines += _divergence_lines(self.divergence())
            newest = max(self._calls)
            shown = [number for number in sorted(self._calls) if number > newest - last]
            lines += [line for number in shown for line in _calls_of(number, self._calls[number])]
        return lines + _message_lines(self._messages)

    def divergence(self) -> Divergence | None:
        """Return the first collective in all records that not all ranks made alike, or None."""
        for number in range(self._first, max(self._calls, default=0) + 1):
            made = self._calls.get(number, {})
            absent = len(self._progress) - sum(found.count for found in made.values())
            if absent or len({text for text, _ in made}) > 1:
                said = dict.fromkeys((rank for rank, _ in self._progress), "has not come to it")
                said.update(_said(made))
                return Divergence(number, groups_of(said.items()))
        return None


def _progress(last: FlightEntry) -> str:
    state = f", which {_STATES[last.state]}" if last.state in _STATES else ""
    return f"came to number {last.number}{state}"


def _divergence_lines(divergence: Divergence | None) -> list[str]:
    if divergence is None:
        return []
    return [
        f"  the ranks went apart at number {divergence.number}:",
        *group_lines(
            divergence.groups,
            lambda what, ranks: (f"    {numbered_ranks(ranks)}: ", what, ""),
            elsewhere=_ELSEWHERE,
        ),
    ]


def _said(calls: Mapping[tuple[str, str], _Call]) -> dict[int, str]:
    """Return the call of each rank as text."""
    return {rank: f"{text}, at {site}" for (text, site), made in calls.items() for rank in made.ranks}


def _calls_of(number: int, calls: Mapping[tuple[str, str], _Call]) -> list[str]:
    """Return the lines of the collective of one number."""

    def line(call: tuple[str, str], ranks: list[int]) -> tuple[str, str, str]:
        return f"  {number:>6}  {calls[call].when}  {numbered_ranks(ranks)}: ", ", at ".join(call), ""

    groups = groups_of((rank, call) for call, made in calls.items() for rank in made.ranks)
    return group_lines(groups, line, most=_MOST_CALLS, elsewhere=_ELSEWHERE)


def _message_lines(shown: list[tuple[FlightEntry, list[int]]]) -> list[str]:
    """Return messages, those that have not ended first where there are many."""
    if len(shown) > _MOST_MESSAGES:
        shown = sorted(shown, key=lambda message: message[0].state == CALL_DONE)

    def line(entry: FlightEntry, ranks: list[int]) -> tuple[str, str, str]:
        made = _Call()
        made.add(ranks[0], entry)
        failed = " failed" if entry.state == CALL_FAILED else ""
        text = f"{entry.text}, at {entry.call_site}"
        return f"          {made.when}  {numbered_ranks(ranks)}{failed}: ", text, ""

    lines = group_lines(shown, line, most=_MOST_MESSAGES, room=_MOST_MESSAGES * 200, elsewhere=_ELSEWHERE)
    return lines and ["  messages:", *lines]
