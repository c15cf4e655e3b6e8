"""The flight records of all ranks beside one another: how far each has come, and where they went apart."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from mpidist.collectives.watch.flight_file import FAILED, RUNNING, Entry, Flight, read_flight
from mpidist.core.wording import ranks_text

_STATES = {RUNNING: "had not ended", FAILED: "failed"}


@dataclass(frozen=True)
class Divergence:
    """The first collective of a communicator that ranks did not make alike.

    Args:
        number: Of the collective.
        groups: What ranks did, with the ranks.
    """

    number: int
    groups: dict[str, list[int]]


def read_folder(folder: str) -> tuple[list[Flight], list[str]]:
    """Return the flights of all ranks that left a file, in rank order, and why files of others cannot be read.

    Raises:
        FileNotFoundError: There are none.
        ValueError: None can be read.
    """
    paths = sorted(Path(folder).glob("flight-rank-*.bin"))
    if not paths:
        raise FileNotFoundError(
            f"{folder} holds no flight-rank-*.bin; run the job with MPIDIST_FLIGHT_RECORD={folder} first"
        )
    flights, problems = [], []
    for path in paths:
        try:
            flights.append(read_flight(path))
        except (OSError, ValueError) as error:
            problems.append(str(error))
    if not flights:
        raise ValueError("; ".join(problems))
    return sorted(flights, key=lambda flight: flight.rank), problems


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
        lines.append(f"  without rank{'s' * (len(missing) > 1)} {ranks_text(missing)}: no file to read")
    for name, by_rank in _by_communicator(flights).items():
        lines += ["", name, *_progress(by_rank)]
        divergence = first_divergence(by_rank)
        if divergence is not None:
            lines.append(f"  the ranks went apart at number {divergence.number}:")
            lines += [f"    {_who(found)}: {what}" for what, found in divergence.groups.items()]
        lines += _table(by_rank, last)
    return "\n".join(lines)


def first_divergence(by_rank: dict[int, list[Entry]]) -> Divergence | None:
    """Return the first collective that not all ranks made alike, of those that all records reach back to."""
    numbers = {rank: {entry.number: entry for entry in entries} for rank, entries in by_rank.items()}
    first = max(min(found) for found in numbers.values())
    last = max(max(found) for found in numbers.values())
    for number in range(first, last + 1):
        groups: dict[str, list[int]] = {}
        texts = set()
        for rank, found in numbers.items():
            entry = found.get(number)
            what = "has not come to it" if entry is None else f"{entry.text}, at {entry.call_site}"
            texts.add(None if entry is None else entry.text)
            groups.setdefault(what, []).append(rank)
        if len(texts) > 1:
            return Divergence(number, groups)
    return None


def _by_communicator(flights: list[Flight]) -> dict[str, dict[int, list[Entry]]]:
    found: dict[str, dict[int, list[Entry]]] = {}
    for flight in flights:
        for entry in flight.entries:
            found.setdefault(entry.communicator, {}).setdefault(flight.rank, []).append(entry)
    return found


def _progress(by_rank: dict[int, list[Entry]]) -> list[str]:
    groups: dict[str, list[int]] = {}
    for rank, entries in by_rank.items():
        entry = entries[-1]
        state = f", which {_STATES[entry.state]}" if entry.state in _STATES else ""
        groups.setdefault(f"came to number {entry.number}{state}", []).append(rank)
    return [f"  {_who(ranks)} {what}" for what, ranks in groups.items()]


def _table(by_rank: dict[int, list[Entry]], last: int) -> list[str]:
    newest = max(entries[-1].number for entries in by_rank.values())
    lines = []
    for number in range(max(1, newest - last + 1), newest + 1):
        groups: dict[tuple[str, str], list[tuple[int, Entry]]] = {}
        for rank, entries in by_rank.items():
            for entry in entries:
                if entry.number == number:
                    groups.setdefault((entry.text, entry.call_site), []).append((rank, entry))
        for (text, site), found in groups.items():
            entries_here = [entry for _, entry in found]
            begin = min(entry.begin for entry in entries_here)
            ends = [entry.end for entry in entries_here]
            took = f"{1e3 * (max(ends) - begin):.3f} ms" if all(ends) else "not ended"
            clock = time.strftime("%H:%M:%S", time.localtime(begin))
            ranks = [rank for rank, _ in found]
            lines.append(f"  {number:>6}  {clock}  {took:>12}  {_who(ranks)}: {text}, at {site}")
    return lines


def _who(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}"
