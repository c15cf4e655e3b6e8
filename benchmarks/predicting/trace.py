"""Traces for SimGrid: what each rank does, a line each, as ``smpireplaymain`` reads them (time-independent traces).

A line is ``RANK init``, ``RANK isend TO TAG BYTES``, ``RANK irecv FROM TAG BYTES``, ``RANK waitall``,
``RANK compute NANOSECONDS`` (on hosts of one operation per nanosecond and core), ``RANK sleep SECONDS``,
or ``RANK finalize``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple


class Send(NamedTuple):
    """A message that a rank begins to send."""

    to: int
    tag: int
    nbytes: int


class Receive(NamedTuple):
    """A message that a rank is ready for."""

    source: int
    tag: int
    nbytes: int


class WaitAll(NamedTuple):
    """A rank waits until all messages that it sent or receives are through."""


class Compute(NamedTuple):
    """A rank works, on one of the cores of its node."""

    seconds: float


class Sleep(NamedTuple):
    """A rank does nothing."""

    seconds: float


Action = Send | Receive | WaitAll | Compute | Sleep
Schedule = list[list[Action]]
"""What each rank does, by rank."""


def lines_of(schedule: Schedule) -> Iterator[str]:
    """Yield the lines of a trace.

    >>> list(lines_of([[Send(1, 0, 8), WaitAll()], []]))
    ['0 init', '0 isend 1 0 8', '0 waitall', '0 finalize', '1 init', '1 finalize']
    """
    for rank, actions in enumerate(schedule):
        yield f"{rank} init"
        for action in actions:
            yield f"{rank} {_text(action)}"
        yield f"{rank} finalize"


def _text(action: Action) -> str:
    # A size of 0 says that it is unknown, and the receiver waits at once until it is known.
    if isinstance(action, Send):
        return f"isend {action.to} {action.tag} {action.nbytes or 1}"
    if isinstance(action, Receive):
        return f"irecv {action.source} {action.tag} {action.nbytes or 1}"
    if isinstance(action, WaitAll):
        return "waitall"
    if isinstance(action, Sleep):
        return f"sleep {action.seconds:.9g}"
    return f"compute {1e9 * action.seconds:.9g}"


def schedule_of(lines: Iterable[str]) -> Schedule:
    """Return the schedule of a trace.

    Raises:
        ValueError: A line is none that :func:`lines_of` writes.
    """
    found: dict[int, list[Action]] = {}
    for line in lines:
        rank, name, *rest = line.split()
        actions = found.setdefault(int(rank), [])
        if name in _READERS:
            actions.append(_READERS[name](rest))
        elif name not in ("init", "finalize"):
            raise ValueError(f"{line!r} is no line of a trace; expected {', '.join(_READERS)}, init or finalize")
    return [found[rank] for rank in range(len(found))]


_READERS: dict[str, Callable[[list[str]], Action]] = {
    "isend": lambda rest: Send(*map(int, rest)),
    "irecv": lambda rest: Receive(*map(int, rest)),
    "waitall": lambda _: WaitAll(),
    "sleep": lambda rest: Sleep(float(rest[0])),
    "compute": lambda rest: Compute(float(rest[0]) / 1e9),
}


def unmatched(schedule: Schedule) -> list[str]:
    """Return the messages that are sent and not received, or the other way round, as text."""
    sent, received = Counter[tuple[int, int, int, int]](), Counter[tuple[int, int, int, int]]()
    for rank, actions in enumerate(schedule):
        for action in actions:
            if isinstance(action, Send):
                sent[rank, action.to, action.tag, action.nbytes] += 1
            elif isinstance(action, Receive):
                received[action.source, rank, action.tag, action.nbytes] += 1
    return [
        f"{'sent' if key in sent else 'received'} only: {key[3]} bytes from {key[0]} to {key[1]}, tag {key[2]}"
        for key in ((sent - received) + (received - sent))
    ]


def bytes_sent(schedule: Schedule, nodes: int) -> list[int]:
    """Return the bytes that leave each node; ranks are in blocks, as many on each."""
    totals, per_node = [0] * nodes, len(schedule) // nodes
    for rank, actions in enumerate(schedule):
        node = rank // per_node
        totals[node] += sum(each.nbytes for each in actions if isinstance(each, Send) and each.to // per_node != node)
    return totals
