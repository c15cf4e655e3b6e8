"""The answers of ranks to a hang query, and the text of the report."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

from mpidist.collectives.channel.executor import ChannelStatus
from mpidist.collectives.observe.deadlock import WaitState
from mpidist.core.text import group_lines, groups_of, names_text, numbered_ranks

ANSWER_SECONDS = 1.5
"""Time that ranks have for their answers."""
# Characters for the states of the ranks.
_ROOM = 1800
_NO_ANSWER = (
    f"gave no answer within {ANSWER_SECONDS:g} s: its host cannot be reached, its process has ended or was "
    "stopped, or runs code that holds Python's lock"
)


class Answer(NamedTuple):
    """The answer of a rank: its status on the communicator, and around it.

    Attributes:
        wait_state: Its wait, for a question about deadlocks.
        where: Current line of its program.
        process: Process number and host.
        is_reported: Whether it has the report already.
    """

    status: ChannelStatus
    wait_state: WaitState | None = None
    where: str = ""
    process: str = ""
    is_reported: bool = False


def report_text(number: int, found: Mapping[int, Answer | str], size: int) -> str:
    """Return the report of a collective. ``found`` has the answers, or the reasons why ranks could not be asked."""
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


def places_text(found: Mapping[int, Answer | str], ranks: Iterable[int]) -> str:
    """Return where the programs of ranks are."""
    return "\n".join(_lines(found, {rank: _place(found.get(rank)) for rank in ranks}))


class _RankState(NamedTuple):
    """The state of a rank. Ranks with equal ones share a line, to which their times and processes are added."""

    text: str
    place: str = ""
    has_time: bool = False
    has_process: bool = True


def _lines(
    found: Mapping[int, Answer | str], states: Mapping[int, _RankState], waiting: Container[int] = ()
) -> list[str]:
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
    if not isinstance(found, Answer):
        return _RankState(found or _NO_ANSWER, has_process=False)
    status = found.status
    if status.waits and status.number == number:
        return _RankState(f"waiting for them at {found.where}", has_process=False)
    if status.waits:
        return _RankState(f"waiting in number {status.number}, {status.text}", f", at {found.where}")
    if not status.ended and status.issued >= number:
        return _RankState(f"has started it but does not advance it: its program is at {found.where}")
    place = _place(found)
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
