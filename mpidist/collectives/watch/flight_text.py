"""The text of ``python -m mpidist flight``: progress of ranks, and where they differ."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from mpidist.collectives.watch.flight_record import DONE, FAILED, MESSAGE, RUNNING, Flight, FlightEntry
from mpidist.core.wording import group_lines, groups_of, numbered_ranks

_STATES = {RUNNING: "had not ended", FAILED: "failed"}
# A communicator more is shown where there are fewer lines so far; messages, and calls of one number, at the most.
_ENOUGH_LINES, _MOST_MESSAGES, _MOST_CALLS = 40, 40, 4
_ELSEWHERE = "; all: --json"
_ByRank = dict[int, list[FlightEntry]]


@dataclass(frozen=True)
class Divergence:
    """The first collective of a communicator that ranks did not make alike.

    Args:
        number: Of the collective.
        groups: The calls, and the ranks that made each; the odd ones first.
    """

    number: int
    groups: list[tuple[str, list[int]]]


def merged_text(flights: list[Flight], last: int) -> str:
    """Return the last collectives of every communicator, rank beside rank.

    Args:
        flights: Of the ranks.
        last: How many collectives of each communicator are shown.
    """
    ranks = flights[0].ranks
    missing = sorted(set(range(ranks)) - {flight.rank for flight in flights})
    lines = [f"flight record of {ranks} rank{'s' * (ranks != 1)}"]
    if missing:
        lines.append(f"  without {numbered_ranks(missing)}: no file to read")
    sections = [_Section(name, by_rank) for name, by_rank in _by_communicator(flights).items()]
    sections.sort(key=lambda section: section.is_well)
    for shown, section in enumerate(sections):
        if shown and len(lines) >= _ENOUGH_LINES:
            left = sections[shown:]
            lines += ["", f"and {len(left)} more communicators, {sum(each.is_well for each in left)} of them well"]
            lines[-1] += _ELSEWHERE
            break
        lines += ["", section.name, *section.lines(last)]
    return "\n".join(lines)


class _Section:
    """The collectives and messages of one communicator.

    Args:
        name: Of the communicator.
        by_rank: Its entries.
    """

    def __init__(self, name: str, by_rank: _ByRank) -> None:
        self.name = name
        self._calls = _only(by_rank, lambda entry: entry.number != MESSAGE)
        self._messages = _only(by_rank, lambda entry: entry.number == MESSAGE)
        self._progress = groups_of((rank, _progress(entries[-1])) for rank, entries in self._calls.items())
        self._divergence = first_divergence(self._calls) if self._calls else None

    @property
    def is_well(self) -> bool:
        """Whether all ranks made the same collectives, and these have ended."""
        last = [entries[-1].state for entries in (*self._calls.values(), *self._messages.values())]
        return len(self._progress) <= 1 and self._divergence is None and all(state == DONE for state in last)

    def lines(self, last: int) -> list[str]:
        """Return its lines, with so many collectives."""
        lines = []
        if self._calls:
            lines += group_lines(self._progress, lambda what, ranks: (f"  {numbered_ranks(ranks)} ", what, ""))
            lines += _divergence_lines(self._divergence)
            lines += _table(self._calls, last)
        return lines + _message_lines(self._messages, last)


def _only(by_rank: _ByRank, is_wanted: Callable[[FlightEntry], bool]) -> _ByRank:
    found = {rank: [entry for entry in entries if is_wanted(entry)] for rank, entries in by_rank.items()}
    return {rank: entries for rank, entries in found.items() if entries}


def _by_communicator(flights: list[Flight]) -> dict[str, _ByRank]:
    found: dict[str, _ByRank] = {}
    for flight in flights:
        for entry in flight.entries:
            found.setdefault(entry.communicator, {}).setdefault(flight.rank, []).append(entry)
    return found


def _progress(last: FlightEntry) -> str:
    state = f", which {_STATES[last.state]}" if last.state in _STATES else ""
    return f"came to number {last.number}{state}"


def first_divergence(by_rank: _ByRank) -> Divergence | None:
    """Return the first collective in all records that not all ranks made alike, or None."""
    numbers = {rank: {entry.number: entry for entry in entries} for rank, entries in by_rank.items()}
    first = max(min(found) for found in numbers.values())
    last = max(max(found) for found in numbers.values())
    for number in range(first, last + 1):
        entries = {rank: found.get(number) for rank, found in numbers.items()}
        if len({None if entry is None else entry.text for entry in entries.values()}) > 1:
            return Divergence(number, groups_of((rank, _call(entry)) for rank, entry in entries.items()))
    return None


def _call(entry: FlightEntry | None) -> str:
    return "has not come to it" if entry is None else f"{entry.text}, at {entry.call_site}"


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


def _table(by_rank: _ByRank, last: int) -> list[str]:
    newest = max(entries[-1].number for entries in by_rank.values())
    found: dict[int, dict[int, FlightEntry]] = {}
    for rank, entries in by_rank.items():
        for entry in entries:
            if entry.number > newest - last:
                found.setdefault(entry.number, {})[rank] = entry
    return [line for number in sorted(found) for line in _calls_of(number, found[number])]


def _calls_of(number: int, entries: dict[int, FlightEntry]) -> list[str]:
    """Return the lines of the collective of one number."""

    def line(call: str, ranks: list[int]) -> tuple[str, str, str]:
        return f"  {number:>6}  {_when([entries[rank] for rank in ranks])}  {numbered_ranks(ranks)}: ", call, ""

    groups = groups_of((rank, _call(entry)) for rank, entry in entries.items())
    return group_lines(groups, line, most=_MOST_CALLS, elsewhere=_ELSEWHERE)


def _message_lines(by_rank: _ByRank, last: int) -> list[str]:
    """Return the last messages of each rank, and those that have not ended.

    The latter come first where there are many.
    """
    shown = [
        (entry, [rank])
        for rank, entries in by_rank.items()
        for entry in [*(entry for entry in entries[:-last] if entry.state == RUNNING), *entries[-last:]]
    ]
    if len(shown) > _MOST_MESSAGES:
        shown.sort(key=lambda message: message[0].state == DONE)

    def line(entry: FlightEntry, ranks: list[int]) -> tuple[str, str, str]:
        failed = " failed" if entry.state == FAILED else ""
        return f"          {_when([entry])}  {numbered_ranks(ranks)}{failed}: ", _call(entry), ""

    lines = group_lines(shown, line, most=_MOST_MESSAGES, room=_MOST_MESSAGES * 200, elsewhere=_ELSEWHERE)
    return lines and ["  messages:", *lines]


def _when(entries: list[FlightEntry]) -> str:
    """Return when the first of some entries began, and how long all took."""
    begin, ends = min(entry.begin for entry in entries), [entry.end for entry in entries]
    took = f"{1e3 * (max(ends) - begin):.3f} ms" if all(ends) else "not ended"
    return f"{time.strftime('%H:%M:%S', time.localtime(begin))}  {took:>12}"
