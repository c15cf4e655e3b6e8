"""``python -m mpidist flight``: the last collectives of all ranks, and where they diverged."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterable
from sys import intern

from mpidist.cli.json_output import add_json_argument, json_text
from mpidist.collectives.observe.record import Entry, Flight, Kind, State, read_flights
from mpidist.core.text import group_lines, groups_of, names_text, numbered_ranks

HELP = "show the last collectives of all ranks (MPIDIST_FLIGHT_RECORD), and where they diverged"
_ENDINGS = {State.RUNNING: ", which had not ended", State.DONE: "", State.FAILED: ", which failed"}
# Limits: lines before another communicator, messages of a communicator, and calls of one number.
_ENOUGH_LINES, _MOST_MESSAGES, _MOST_CALLS = 40, 40, 4
_ELSEWHERE = "; all: --json"
_JSON_FIELDS = ("serial", "number", "begin", "end", "state", "communicator", "text", "call_site")
_Call = tuple[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", metavar="DIR", help="folder with flight-rank-0000.bin and the other files")
    parser.add_argument("--last", type=int, default=10, metavar="N", help="collectives shown of each communicator")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the records."""
    problems: list[str] = []
    flights = read_flights(arguments.folder, problems)
    if arguments.json:
        print(json_text({"flights": [_facts(flight) for flight in flights], "left_out": problems}))
    else:
        print(merged_text(flights, arguments.last))
    if problems:
        print(f"python -m mpidist flight: left out: {names_text(problems)}", file=sys.stderr)
    return 0


def _facts(flight: Flight) -> dict[str, object]:
    entries = [{name: getattr(entry, name) for name in _JSON_FIELDS} for entry in flight.entries]
    return {**vars(flight.head), "entries": entries}


def merged_text(flights: Iterable[Flight], last: int) -> str:
    """Return the last collectives of every communicator on all ranks.

    Args:
        flights: The records of the ranks in their order. They are read one at a time.
        last: How many collectives of each communicator are shown.
    """
    ranks, missing, found = 0, set[int](), dict[str, _Section]()
    for flight in flights:
        if not ranks:
            ranks = flight.head.ranks
            missing.update(range(ranks))
        missing.discard(flight.head.rank)
        by_name: dict[str, list[Entry]] = {}
        for entry in flight.entries:
            by_name.setdefault(entry.communicator, []).append(entry)
        for name, entries in by_name.items():
            found.setdefault(name, _Section(name)).add(flight.head.rank, entries, last)
    lines = [f"flight record of {ranks} rank{'s' * (ranks != 1)}"]
    if missing:
        lines.append(f"  without {numbered_ranks(sorted(missing))}: no file to read")
    sections = sorted(((section, section.is_well()) for section in found.values()), key=lambda each: each[1])
    for shown, (section, _) in enumerate(sections):
        if shown and len(lines) >= _ENOUGH_LINES:
            left = [is_well for _, is_well in sections[shown:]]
            return "\n".join([*lines, "", f"and {len(left)} more communicators, {sum(left)} of them well{_ELSEWHERE}"])
        lines += ["", section.name, *section.lines(last)]
    return "\n".join(lines)


class _Made:
    """The ranks that made one call, and when."""

    __slots__ = ("begin", "end", "has_ended", "ranks")

    def __init__(self) -> None:
        self.ranks: list[int] = []
        self.begin, self.end, self.has_ended = math.inf, 0.0, True

    def add(self, rank: int, entry: Entry) -> None:
        self.ranks.append(rank)
        self.begin, self.end = min(self.begin, entry.begin), max(self.end, entry.end)
        self.has_ended = self.has_ended and bool(entry.end)

    def when(self) -> str:
        """Return when the first rank began, and how long all took."""
        took = f"{1e3 * (self.end - self.begin):.3f} ms" if self.has_ended else "not ended"
        return f"{time.strftime('%H:%M:%S', time.localtime(self.begin))}  {took:>12}"


class _Section:
    """The collectives and messages of one communicator. Calls that many ranks made are kept once."""

    def __init__(self, name: str) -> None:
        self.name = name
        # How far each rank got, and all collectives by number and call.
        self._progress: list[tuple[int, str]] = []
        self._calls: dict[int, dict[_Call, _Made]] = {}
        # The first collective in all records.
        self._first = 0
        self._all_done = True
        self._messages: list[tuple[Entry, list[int]]] = []

    def add(self, rank: int, entries: list[Entry], last: int) -> None:
        """Add the collectives of the next rank, its running messages and its last ones."""
        calls = [entry for entry in entries if entry.kind == Kind.COLLECTIVE]
        messages = [entry for entry in entries if entry.kind == Kind.MESSAGE]
        for entry in calls:
            made = self._calls.setdefault(entry.number, {})
            made.setdefault((intern(entry.text), intern(entry.call_site)), _Made()).add(rank, entry)
        if calls:
            self._first = max(self._first, calls[0].number)
            ending = _ENDINGS[State(calls[-1].state)]
            self._progress.append((rank, intern(f"reached number {calls[-1].number}{ending}")))
        shown = [entry for entry in messages[:-last] if entry.state == State.RUNNING] + messages[-last:]
        self._messages += [(entry, [rank]) for entry in shown]
        self._all_done &= all(each[-1].state == State.DONE for each in (calls, messages) if each)

    def is_well(self) -> bool:
        """Return whether all ranks made the same collectives, and these have ended."""
        return self._all_done and len({text for _, text in self._progress}) <= 1 and not self._divergence()

    def lines(self, last: int) -> list[str]:
        """Return the lines of the section, with the ``last`` collectives."""
        lines = group_lines(groups_of(self._progress), lambda text, ranks: (f"  {numbered_ranks(ranks)} ", text, ""))
        lines += self._divergence()
        for number in sorted(self._calls):
            if number > max(self._calls) - last:
                lines += _call_lines(number, self._calls[number])
        return lines + _message_lines(self._messages)

    def _divergence(self) -> list[str]:
        """Return the lines of the first collective that not all ranks made alike, if any."""
        for number in range(self._first, max(self._calls, default=0) + 1):
            made = self._calls.get(number, {})
            said = dict.fromkeys((rank for rank, _ in self._progress), "did not reach it")
            absent = len(said) - sum(len(each.ranks) for each in made.values())
            if absent or len({text for text, _ in made}) > 1:
                said.update((rank, ", at ".join(call)) for call, each in made.items() for rank in each.ranks)
                lines = group_lines(
                    groups_of(said.items()),
                    lambda text, ranks: (f"    {numbered_ranks(ranks)}: ", text, ""),
                    elsewhere=_ELSEWHERE,
                )
                return [f"  the ranks diverged at number {number}:", *lines]
        return []


def _call_lines(number: int, calls: dict[_Call, _Made]) -> list[str]:
    def line(call: _Call, ranks: list[int]) -> tuple[str, str, str]:
        return f"  {number:>6}  {calls[call].when()}  {numbered_ranks(ranks)}: ", ", at ".join(call), ""

    groups = groups_of((rank, call) for call, made in calls.items() for rank in made.ranks)
    return group_lines(groups, line, most=_MOST_CALLS, elsewhere=_ELSEWHERE)


def _message_lines(shown: list[tuple[Entry, list[int]]]) -> list[str]:
    """Return the lines of messages. Of many messages, unfinished ones come first."""
    if len(shown) > _MOST_MESSAGES:
        shown = sorted(shown, key=lambda message: message[0].state == State.DONE)

    def line(entry: Entry, ranks: list[int]) -> tuple[str, str, str]:
        made = _Made()
        made.add(ranks[0], entry)
        failed = " failed" if entry.state == State.FAILED else ""
        text = f"{entry.text}, at {entry.call_site}"
        return f"          {made.when()}  {numbered_ranks(ranks)}{failed}: ", text, ""

    lines = group_lines(shown, line, most=_MOST_MESSAGES, room=_MOST_MESSAGES * 200, elsewhere=_ELSEWHERE)
    return lines and ["  messages:", *lines]
