"""Deadlocks: ranks that wait for one another in different communicators for ever.

One rank waits in a collective of one communicator, and another, which has not come to it, waits in one of another
communicator for the first. Waits only end when all ranks come, so facts found of ranks at different moments are
true of them together. A process counts as waiting only if its one thread waits: any other thread of the program may be
about to issue the collective that another rank waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpidist.collectives.channel.channel import open_channels
from mpidist.core.concurrency import is_name_of_own_thread
from mpidist.core.text import group_lines, groups_of, numbered_ranks
from mpidist.topology import import_mpi

_LONGEST_TEXT = 200
# Of what is said of the ranks, in characters: it goes to each of them in one message.
_ROOM = 1800


class Wait(NamedTuple):
    """The collective that a rank waits in, and the line of its program.

    Args:
        channel: Name of the communicator.
        number: Of the collective there.
        text: Description of the collective.
        where: Line of the program.
    """

    channel: str
    number: int
    text: str
    where: str


@dataclass(frozen=True)
class WaitState:
    """The wait of a rank, and its progress on all its communicators.

    Args:
        rank: In the job.
        wait: The collective that its program waits in. None if the program runs, or has several threads.
        issued: How many collectives it has issued on each communicator, by name.
    """

    rank: int
    wait: Wait | None
    issued: dict[str, int]


def wait_state(where: str) -> WaitState:
    """Return the state of this rank; called in the side thread.

    Args:
        where: Line of its program.
    """
    channels = list(open_channels)
    waits = [
        Wait(channel.name, number, text[:_LONGEST_TEXT], where)
        for channel in channels
        for number, text in channel.executor.waiting()
    ]
    threads = [thread for thread in threading.enumerate() if not is_name_of_own_thread(thread.name)]
    wait = waits[0] if len(waits) == 1 and len(threads) == 1 else None
    return WaitState(import_mpi().COMM_WORLD.Get_rank(), wait, {each.name: each.executor.issued for each in channels})


@dataclass(frozen=True)
class Deadlock:
    """Ranks that can never go on.

    Args:
        text: For the error that they all get.
        waits: Communicator and number of the collectives that they wait in.
    """

    text: str
    waits: frozenset[tuple[str, int]]


def find_deadlock(channel: str, number: int, found: Sequence[WaitState]) -> Deadlock | None:
    """Return the deadlock that keeps ranks of a communicator waiting, or None.

    Args:
        channel: The communicator.
        number: Of the collective there that some of its ranks wait in.
        found: States of those of its ranks that have answered.
    """
    waiting = [each for each in found if each.wait is not None and each.wait[:2] == (channel, number)]
    held = [each for each in found if each.wait is not None and each.issued.get(channel, number) < number]
    # Many wait in the same collective, so what differs is looked at, not each pair of ranks.
    elsewhere = {each.wait[:2] for each in held if each.wait is not None}
    blocked = {wait for wait in elsewhere if any(_lacks(other, wait) for other in waiting)}
    stuck = [each for each in waiting if any(_lacks(each, wait) for wait in elsewhere)]
    stuck += [each for each in held if each.wait is not None and each.wait[:2] in blocked]
    if not stuck:
        return None
    groups = groups_of(sorted((each.rank, each.wait) for each in stuck if each.wait is not None))
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
        "ranks wait for one another in different communicators, and none can go on; expected the same collectives in "
        "the same order on every rank:\n" + "\n".join(lines)
    )
    return Deadlock(text, frozenset((wait.channel, wait.number) for wait, _ in groups))


def _lacks(state: WaitState, collective: tuple[str, int]) -> bool:
    """Return whether a rank of its communicator has not issued a collective."""
    channel, number = collective
    return state.issued.get(channel, number) < number
