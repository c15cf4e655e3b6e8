"""Deadlocks: ranks that wait for one another in different communicators.

One rank waits in a collective of communicator A. Another has not reached it, and waits in communicator B for the first.
A wait ends only when all ranks arrive, so waits that were reported at different times still hold together. A process
counts as waiting only if it has a single thread, because another thread could issue the missing collective.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from mpidist.collectives.channel.channel import open_channels
from mpidist.core.concurrency import is_name_of_own_thread
from mpidist.core.text import group_lines, groups_of, numbered_ranks
from mpidist.topology import import_mpi

# Characters of a description, and of the lines about the ranks: one message must hold them.
_LONGEST_TEXT, _ROOM = 200, 1800


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
    lines = group_lines(
        groups,
        lambda wait, ranks: (
            f"  {numbered_ranks(ranks)} of the job: ",
            wait.text,
            f", collective number {wait.number} of {wait.channel}\n      at {wait.where}",
        ),
        room=_ROOM,
    )
    text = (
        "ranks wait for one another in different communicators. Issue the collectives in the same order on every "
        "rank:\n" + "\n".join(lines)
    )
    return Deadlock(text, frozenset((wait.channel, wait.number) for wait, _ in groups))


def _lacks(state: WaitState, collective: tuple[str, int]) -> bool:
    """Return whether a rank of its communicator has not issued a collective."""
    channel, number = collective
    return state.issued.get(channel, number) < number
