"""The text of a hang report: who waits, who has not come, each state."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from mpidist.collectives.channel.executor import ChannelStatus
from mpidist.collectives.watch.deadlock import WaitState
from mpidist.core.text import group_lines, groups_of, names_text, numbered_ranks

ANSWER_SECONDS = 1.5
"""How long ranks may take to answer."""
# For the states of the ranks, in characters.
_ROOM = 1800
_NO_ANSWER = (
    f"gave no answer within {ANSWER_SECONDS:g} s: its host cannot be reached, its process has ended or was "
    "stopped, or runs code that keeps Python's lock"
)


@dataclass(frozen=True)
class RankStatus:
    """The state of one rank on one communicator, and around it.

    Args:
        status: On the communicator.
        wait_state: Its state on all its communicators, where a deadlock is looked for.
        where: Line of the program, now.
        process: Number of the process, and its host.
    """

    status: ChannelStatus
    wait_state: WaitState | None = None
    where: str = ""
    process: str = ""


def report_text(
    number: int, answers: Mapping[int, RankStatus], size: int, unasked: Mapping[int, str] = MappingProxyType({})
) -> str:
    """Return the report of a collective: who waits, who has not come, each state.

    Args:
        number: Of the collective.
        answers: By rank, of those that answered.
        size: Number of ranks.
        unasked: Why ranks could not be asked, by rank.
    """
    statuses = {rank: found.status for rank, found in answers.items()}
    waiting = {rank: found for rank, found in statuses.items() if found.waits and found.number == number}
    head = f"none of the {size} ranks says that it waits in collective number {number}:"
    if waiting:
        longest = max(waiting.values(), key=lambda found: found.seconds)
        head = (
            f"{numbered_ranks(sorted(waiting))} of {size} {'has' if len(waiting) == 1 else 'have'} waited "
            f"{longest.seconds:.0f} s for the other ranks in {longest.text}, collective number {number}:"
        )
    states = {
        rank: _Standing(unasked[rank]) if rank in unasked else _state(answers.get(rank), number) for rank in range(size)
    }
    return "\n".join([head, *_lines(states, answers, waiting)])


def places_text(answers: Mapping[int, RankStatus | None], unasked: Mapping[int, str]) -> str:
    """Return where ranks are.

    Args:
        answers: Of these ranks; None without one.
        unasked: As of :func:`report_text`.
    """
    states = {rank: _Standing(unasked[rank]) if rank in unasked else _place(found) for rank, found in answers.items()}
    return "\n".join(_lines(states, answers))


class _Standing(NamedTuple):
    """The state of a rank, as all ranks in it say it.

    Attributes:
        text: The state, up to the time since its last collective.
        place: What follows it.
        has_time, has_process: Whether each rank adds that time, and its process.
    """

    text: str
    place: str = ""
    has_time: bool = False
    has_process: bool = False


def _lines(
    states: Mapping[int, _Standing], answers: Mapping[int, RankStatus | None], waiting: Container[int] = ()
) -> list[str]:
    """Return a line for each state, those of ranks that wait last."""

    def line(state: _Standing, ranks: list[int]) -> tuple[str, str, str]:
        found = [answer for answer in map(answers.get, ranks) if answer is not None]
        tail = state.place
        if state.has_time:
            seconds = [f"{bound([each.status.seconds for each in found]):.0f}" for bound in (min, max)]
            tail = f", {' to '.join(dict.fromkeys(seconds))} s ago{tail}"
        if state.has_process:
            tail += f" ({names_text(each.process for each in found)})"
        return f"  {numbered_ranks(ranks)}: ", state.text, tail

    return group_lines(groups_of(states.items(), waiting), line, room=_ROOM)


def _state(found: RankStatus | None, number: int) -> _Standing:
    if found is None:
        return _Standing(_NO_ANSWER)
    status = found.status
    if status.waits and status.number == number:
        return _Standing(f"waiting for them at {found.where}")
    if status.waits:
        return _Standing(f"waiting in number {status.number}, {status.text}", f", at {found.where}", has_process=True)
    if not status.ended and status.issued >= number:
        text = f"has issued it, and does not move it on: its program is at {found.where}"
        return _Standing(text, has_process=True)
    place = _place(found)
    return place if status.ended else place._replace(text=f"has not come to it: {place.text}")


def _place(found: RankStatus | None) -> _Standing:
    """Return where the program of a rank is, and its last collective."""
    if found is None:
        return _Standing(_NO_ANSWER)
    status = found.status
    last = f"its last collective was number {status.number}, {status.text}"
    if not status.number:
        last = "it has made no collective yet"
    if status.ended:
        return _Standing(f"has ended its program; {last}", "", bool(status.number), has_process=True)
    return _Standing(last, f"; its program is at {found.where}", bool(status.number), has_process=True)
