"""Hang reports: the answers of ranks to a query, the report about them, and deadlocks.

In a deadlock, ranks wait for one another in different communicators: one rank waits in a collective of communicator A.
Another has not reached it, and waits in communicator B for the first. A wait ends only when all ranks arrive, so waits
that were reported at different times still hold together. A process counts as waiting only if it has a single thread,
because another thread could issue the missing collective.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from mpidist.collectives.channel.channel import open_channels
from mpidist.collectives.channel.executor import ChannelStatus
from mpidist.collectives.observe.lateness import Samples
from mpidist.core.concurrency import is_name_of_own_thread
from mpidist.core.text import group_lines, groups_of, names_text, numbered_ranks
from mpidist.topology import import_mpi

ANSWER_SECONDS = 1.5
"""Time that ranks have for their answers."""
# Characters for the states of the ranks, and of a description in a deadlock. One message must hold them.
_ROOM, _LONGEST_TEXT = 1800, 200
_NO_ANSWER = (
    f"gave no answer within {ANSWER_SECONDS:g} s: its host cannot be reached, its process has ended or was "
    "stopped, or runs code that holds Python's lock"
)


class Wait(NamedTuple):
    """A collective that a rank waits in, and the line of its program."""

    channel: str
    number: int
    text: str
    where: str


class WaitState(NamedTuple):
    """The wait of a rank of the job, and its progress on each communicator."""

    rank: int
    wait: Wait
    issued: dict[str, int]


class Answer(NamedTuple):
    """The answer of a rank."""

    status: ChannelStatus
    wait_state: WaitState | None = None  # for a question about deadlocks
    where: str = ""  # current line of the program
    process: str = ""
    wants_report: bool = False
    printing_rank: int | None = None  # of the report that it has already
    samples: Samples | None = None  # for a question about stragglers


# A rank's answer, or the reason why it could not be asked.
_Found = Mapping[int, Answer | str]


def report_text(number: int, found: _Found, size: int) -> str:
    """Return the report of a collective."""
    statuses = {rank: each.status for rank, each in found.items() if isinstance(each, Answer)}
    waiting = {rank: status for rank, status in statuses.items() if status.waits and status.number == number}
    head = f"none of {size} ranks reports that it waits in collective number {number}:"
    if waiting:
        longest = max(waiting.values(), key=lambda status: status.seconds)
        head = (
            f"{numbered_ranks(sorted(waiting))} of {size} {'has' if len(waiting) == 1 else 'have'} waited "
            f"{longest.seconds:.0f} s for the other ranks in {longest.text}, collective number {number}:"
        )
    return "\n".join([head, *_lines(found, {rank: _state(found.get(rank), number) for rank in range(size)}, waiting)])


def places_text(found: _Found, ranks: Iterable[int]) -> str:
    """Return where the programs of ranks are."""
    return "\n".join(_lines(found, {rank: _place(found.get(rank)) for rank in ranks}))


class _RankState(NamedTuple):
    """The state of a rank. Ranks with equal ones share a line, to which their times and processes are added."""

    text: str
    place: str = ""
    has_time: bool = False
    has_process: bool = True


def _lines(found: _Found, states: Mapping[int, _RankState], waiting: Container[int] = ()) -> list[str]:
    """Return a line for each state, the states of waiting ranks last."""

    def line(state: _RankState, ranks: list[int]) -> tuple[str, str, str]:
        answers = [answer for answer in map(found.get, ranks) if isinstance(answer, Answer)]
        tail = state.place
        if state.has_time:
            seconds = [f"{bound([each.status.seconds for each in answers]):.0f}" for bound in (min, max)]
            tail = f", {' to '.join(dict.fromkeys(seconds))} s ago{tail}"
        if state.has_process:
            tail += f" ({names_text(each.process for each in answers)})"
        return f"  {numbered_ranks(ranks)}: ", state.text, tail

    return group_lines(groups_of(states.items(), waiting), line, room=_ROOM)


def _state(found: Answer | str | None, number: int) -> _RankState:
    """Return the state of a rank as others wait in a collective."""
    place = _place(found)
    if not isinstance(found, Answer):
        return place
    status = found.status
    if status.waits and status.number == number:
        return _RankState(f"waiting for them at {found.where}", has_process=False)
    if status.waits:
        return _RankState(f"waiting in number {status.number}, {status.text}", f", at {found.where}")
    if not status.ended and status.issued >= number:
        return _RankState(f"has started it but does not advance it: its program is at {found.where}")
    return place if status.ended else place._replace(text=f"has not reached it: {place.text}")


def _place(found: Answer | str | None) -> _RankState:
    """Return the last collective of a rank, and where its program is."""
    if not isinstance(found, Answer):
        return _RankState(found or _NO_ANSWER, has_process=False)
    status = found.status
    last = f"its last collective was number {status.number}, {status.text}"
    if not status.number:
        last = "it has issued no collective yet"
    if status.ended:
        return _RankState(f"has ended its program; {last}", "", bool(status.number))
    return _RankState(last, f"; its program is at {found.where}", bool(status.number))


# Deadlocks --------------------------------------------------------------------------------------------------------


class Deadlock(NamedTuple):
    """An error text, and communicator and number of the collectives that block each other."""

    text: str
    waits: frozenset[tuple[str, int]]


def wait_state(where: str) -> WaitState | None:
    """Return the wait of this rank. None if its program runs, or has several threads."""
    channels = list(open_channels)
    waits = [
        Wait(channel.name, number, text[:_LONGEST_TEXT], where)
        for channel in channels
        for number, text in channel.executor.waiting()
    ]
    threads = [thread for thread in threading.enumerate() if not is_name_of_own_thread(thread.name)]
    if len(waits) != 1 or len(threads) != 1:
        return None
    rank = import_mpi().COMM_WORLD.Get_rank()
    return WaitState(rank, waits[0], {channel.name: channel.executor.issued for channel in channels})


def find_deadlock(channel: str, number: int, found: Sequence[WaitState]) -> Deadlock | None:
    """Return the deadlock that involves a collective, or None. ``found`` has the waits of its communicator's ranks."""
    waiting = [each for each in found if each.wait[:2] == (channel, number)]
    held = [each for each in found if _lacks(each, (channel, number))]
    # Compare the different waits and not all pairs of ranks, because many wait in the same collective.
    elsewhere = {each.wait[:2] for each in held}
    blocked = {wait for wait in elsewhere if any(_lacks(other, wait) for other in waiting)}
    stuck = [each for each in waiting if any(_lacks(each, wait) for wait in elsewhere)]
    stuck += [each for each in held if each.wait[:2] in blocked]
    if not stuck:
        return None
    groups = groups_of(sorted((each.rank, each.wait) for each in stuck))

    def line(wait: Wait, ranks: list[int]) -> tuple[str, str, str]:
        tail = f", collective number {wait.number} of {wait.channel}\n      at {wait.where}"
        return f"  {numbered_ranks(ranks)} of the job: ", wait.text, tail

    lines = group_lines(groups, line, room=_ROOM)
    text = (
        "ranks wait for one another in different communicators. Issue the collectives in the same order on every "
        "rank:\n" + "\n".join(lines)
    )
    return Deadlock(text, frozenset((wait.channel, wait.number) for wait, _ in groups))


def _lacks(state: WaitState, collective: tuple[str, int]) -> bool:
    """Return whether a rank of its communicator has not issued a collective."""
    channel, number = collective
    return state.issued.get(channel, number) < number
