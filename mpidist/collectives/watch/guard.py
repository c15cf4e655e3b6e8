"""Guard: one of the waiting ranks asks all others, for a report or a deadlock.

The rank that waits turns to the first rank of its communicator's first node, or where that gives no answer to the next
(see ``mpidist.collectives.channel.connections``); that one asks all that it may, once for all that wait for the same
collective. Ranks answer in their side thread, so a rank that computes for long is told from one that has stopped.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.channel.connections import Connections
from mpidist.collectives.channel.executor import DEADLOCKED, ChannelStatus
from mpidist.collectives.channel.observers import Observer
from mpidist.collectives.channel.operation import Operation
from mpidist.collectives.mpi.communicator_names import first_name
from mpidist.collectives.watch.deadlock import Deadlock, WaitState, find_deadlock, note_thread, wait_state
from mpidist.collectives.watch.side_thread import SideLine, side_thread
from mpidist.core import settings
from mpidist.core.callsite import main_thread_frame, program_line
from mpidist.core.deadline import wait_at_most
from mpidist.core.errors import MismatchError
from mpidist.core.wording import group_lines, groups_of, names_text, numbered_ranks, tell_user

# How long a rank may take to answer, and the one that is to ask all others to say that it will.
_ANSWER_SECONDS, _HEARD_SECONDS = 2.0, 1.0
# A message must be one that MPI sends without waiting for the other side.
_LONGEST_TEXT, _LONGEST_REPORT = 300, 2500
# Of that, for the states of the ranks.
_ROOM = 1800
# How long a rank waits before it has others asked, and between two questions. Every rank sees its error within 2 s.
_ASK_AFTER_SECONDS, _ASK_EVERY_SECONDS = 0.5, 1.0
# Those of this process that are there.
_guards: list[Guard] = []
_NO_ANSWER = (
    f"gave no answer within {_ANSWER_SECONDS:.0f} s: its host cannot be reached, its process has ended or was "
    "stopped, or runs code that keeps Python's lock"
)
_FAR = "is on another node, and cannot be asked from here"
_NOT_ASKED = "could not be asked from here, as the first ranks of the first two nodes gave no answer"


@dataclass(frozen=True)
class RankStatus:
    """The state of one rank on one communicator, and around it.

    Args:
        status: On the communicator.
        wait_state: Its state on all its communicators, where a deadlock is looked for.
        where: SideLine of the program, now.
        process: Number of the process, and its host.
    """

    status: ChannelStatus
    wait_state: WaitState | None = None
    where: str = ""
    process: str = ""


# The purpose of a question: a report to be printed, one for the error of a deadline, a deadlock, or the report of a
# message that does not come.
_PRINT, _REPORT, _DEADLOCK, _MESSAGE = "print", "report", "deadlock", "message"


@dataclass(frozen=True)
class _Question:
    """A question about a collective, or a message of the rank that asks."""

    number: int
    purpose: str


class _Inquiry:
    """The answers so far, on the rank that asks the others.

    Args:
        own_rank, own: The first answer.
        asked: The ranks that are asked.
        tell: Called with all answers.
    """

    def __init__(
        self, own_rank: int, own: RankStatus, asked: Collection[int], tell: Callable[[_Inquiry], None]
    ) -> None:
        self.answers = {own_rank: own}
        self.asked, self.tell = asked, tell
        self.askers: set[int] = set()
        self.report: str | None = None
        self.is_over = False


class Guard(Observer):
    """Finds out for whom ranks wait on one communicator, and whether for ever.

    A deadlock takes two communicators, so one is not looked at: the first of all ranks, the only one of most programs.
    Its waits cost no messages.

    Args:
        channel: The channel, of several ranks.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._connections = Connections(channel.rank, channel.node.ranks)
        self._rank, self._size = channel.rank, channel.size
        self._inquiries: dict[_Question, _Inquiry] = {}
        self._heard: set[tuple[_Question, int]] = set()
        self._reports: dict[_Question, str] = {}
        self._deadlocks: dict[int, str] = {}
        self._messages = count(1)
        # The collective that the program waits in, and when to ask whether it can ever go on.
        self._waits_in, self._ask_at = 0, math.inf
        self._line = SideLine(channel.comm, self._receive)
        _guards.append(self)
        # Last: messages may have come already.
        self._line.open()

    # In the thread that waits -----------------------------------------------------------------------------------

    def waits(self, operation: Operation[object]) -> Exception | None:
        """Return the error of a wait that can never end, once that is known."""
        note_thread()
        now, number = time.monotonic(), operation.number
        if number != self._waits_in:
            is_first = self._channel.name == first_name()
            self._waits_in, self._ask_at = number, math.inf if is_first else now + _ASK_AFTER_SECONDS
        if now > self._ask_at:
            self._ask_at = now + _ASK_EVERY_SECONDS
            side_thread.call(lambda: self._ask(_Question(number, _DEADLOCK)))
        text = self._deadlocks.get(number)
        return None if text is None else MismatchError(text)

    def tells(self, operation: Operation[object]) -> bool:
        """Have one rank print why the collective does not go on; returns at once."""
        question = _Question(operation.number, _PRINT)
        side_thread.call(lambda: self._ask(question))
        return True

    def explanation(self, operation: Operation[object]) -> str | None:
        """Return why the collective does not go on, if another rank tells in time."""
        question = _Question(operation.number, _REPORT)
        side_thread.call(lambda: self._ask(question))
        wait_at_most(_ANSWER_SECONDS + 2 * _HEARD_SECONDS, lambda: question in self._reports, 0.01)
        return self._reports.get(question)

    def message_tells(self, operation: Operation[object], rank: int | None) -> bool:
        """Print where the other side of a message is, or all that may be it."""
        self._ask_other_side(operation, rank, tell_user)
        return True

    def message_asks(self, operation: Operation[object], rank: int | None) -> None:
        """Find out whether the other side of a message has ended its program."""
        self._ask_other_side(operation, rank, lambda _: None)

    def _ask_other_side(
        self, operation: Operation[object], rank: int | None, print_report: Callable[[str], None]
    ) -> None:
        question, others = _Question(next(self._messages), _MESSAGE), range(self._size) if rank is None else [rank]
        asked = self._connections.known & {*others} - {self._rank}
        head = f"rank {self._rank} of {self._size} waits for {operation.text}, at {operation.call_site}:"

        def tell(inquiry: _Inquiry) -> None:
            del self._inquiries[question]
            found, near = {each: inquiry.answers.get(each) for each in others}, asked | {self._rank}
            states = {each: _place(status) if each in near else _Standing(_FAR) for each, status in found.items()}
            print_report("\n".join([head, *_lines(states, found)]))
            left = [each for each, status in found.items() if status is not None and status.status.ended]
            if left and {*left, self._rank} >= {*others}:
                operation.hopeless = f"{numbered_ranks(left)} {'have' if len(left) > 1 else 'has'} ended the program"

        def ask() -> None:
            self._begin(question, asked, tell)

        side_thread.call(ask)

    def closed(self) -> None:
        """Ask and answer no more."""
        self._line.close()
        if self in _guards:
            _guards.remove(self)

    # In the side thread -----------------------------------------------------------------------------------------

    def _receive(self, source: int, kind: str, content: tuple[Any, ...]) -> None:
        """Act on a message of another rank."""
        about, *told = content
        if kind == "stuck":
            self._send(source, "heard", about)
            self._inquire(about, source)
        elif kind == "heard":
            self._heard.add((about, source))
        elif kind == "ask":
            self._send(source, "answer", about, self._own_status(about))
        elif kind == "answer":
            inquiry = self._inquiries.get(about)
            if inquiry is not None:  # it is not kept where it found no deadlock
                inquiry.answers[source] = told[0]
                if inquiry.answers.keys() >= set(inquiry.asked):
                    self._finish(inquiry)
        elif kind == "report":
            self._reports[about] = told[0]
        elif kind == "deadlock":
            self.spread(about)

    def _send(self, rank: int, kind: str, *content: Any) -> None:
        self._line.send(rank, kind, content)

    def _ask(self, question: _Question, index: int = 0) -> None:
        """Have a rank, or the next in order that answers, ask all others."""
        rank = self._connections.order[index]
        if rank == self._rank:
            self._inquire(question, rank)
            return
        self._heard.discard((question, rank))
        self._send(rank, "stuck", question)

        def give_up() -> None:
            if (question, rank) not in self._heard:
                self._ask(question, index + 1)

        side_thread.later(_HEARD_SECONDS, give_up)

    def _inquire(self, question: _Question, asker: int) -> None:
        inquiry = self._inquiries.get(question)
        if inquiry is None:
            others = self._connections.known - {self._rank}
            inquiry = self._begin(question, others, lambda found: self._tell_all(question, found))
        inquiry.askers.add(asker)
        if inquiry.report is not None:
            self._tell(asker, question, inquiry.report)

    def _begin(self, question: _Question, asked: Collection[int], tell: Callable[[_Inquiry], None]) -> _Inquiry:
        inquiry = self._inquiries[question] = _Inquiry(self._rank, self._own_status(question), asked, tell)
        for rank in asked:
            self._send(rank, "ask", question)
        side_thread.later(_ANSWER_SECONDS, lambda: self._finish(inquiry))
        return inquiry

    def _finish(self, inquiry: _Inquiry) -> None:
        if not inquiry.is_over:
            inquiry.is_over = True
            inquiry.tell(inquiry)

    def _tell_all(self, question: _Question, inquiry: _Inquiry) -> None:
        if question.purpose == _DEADLOCK:
            # The next that asks wants to know anew.
            del self._inquiries[question]
            found = [each.wait_state for each in inquiry.answers.values() if each.wait_state is not None]
            deadlock = find_deadlock(self._channel.name, question.number, found)
            if deadlock is not None:
                text = deadlock.text[:_LONGEST_REPORT]
                self.spread(Deadlock(text, deadlock.waits))
            return
        report = inquiry.report = report_text(question.number, inquiry.answers, self._size, self._connections.known)
        if question.purpose == _PRINT:
            folder = settings.FLIGHT_RECORD.read()
            more = "" if folder is None else f"\n  what came before: python -m mpidist flight {folder}"
            tell_user(f"{report}{more}")
        for asker in inquiry.askers:
            self._tell(asker, question, report)

    def spread(self, deadlock: Deadlock) -> None:
        """Have the ranks in a deadlock give up, here and on its other communicators."""
        here = self._channel.name
        numbers = [number for name, number in deadlock.waits if name == here and number not in self._deadlocks]
        if not numbers:
            return
        for number in numbers:
            self._deadlocks[number] = deadlock.text
        self._channel.executor.refuse(DEADLOCKED)
        for rank in self._connections.known - {self._rank}:
            self._send(rank, "deadlock", deadlock)
        for guard in list(_guards):
            guard.spread(deadlock)

    def _tell(self, asker: int, question: _Question, report: str) -> None:
        if asker == self._rank:
            self._reports[question] = report
        else:
            self._send(asker, "report", question, report[:_LONGEST_REPORT])

    def _own_status(self, question: _Question) -> RankStatus:
        status = self._channel.executor.status()
        frame = main_thread_frame()
        where = "" if frame is None else program_line(frame)[-_LONGEST_TEXT:]
        return RankStatus(
            status if len(status.text) <= _LONGEST_TEXT else status._replace(text=f"{status.text[:_LONGEST_TEXT]}..."),
            wait_state(where) if question.purpose == _DEADLOCK else None,
            where,
            f"process {os.getpid()} on {socket.gethostname()}",
        )


def report_text(number: int, answers: dict[int, RankStatus], size: int, asked: Collection[int]) -> str:
    """Return the report of a collective: who waits, who has not come, each state.

    Args:
        number: Of the collective.
        answers: By rank, of those that answered.
        size: Number of ranks.
        asked: The ranks that could be asked, the one that asked among them.
    """
    statuses = {rank: found.status for rank, found in answers.items()}
    waiting = {rank: found for rank, found in statuses.items() if found.waits and found.number == number}
    text = next((found.text for found in waiting.values()), "a collective that has ended meanwhile")
    seconds = max((found.seconds for found in waiting.values()), default=0.0)
    head = (
        f"{numbered_ranks(sorted(waiting))} of {size} "
        f"{'has' if len(waiting) == 1 else 'have'} waited {seconds:.0f} s for the other ranks in {text}, "
        f"collective number {number}:"
    )
    states = {
        rank: _state(answers.get(rank), number) if rank in asked else _Standing(_NOT_ASKED) for rank in range(size)
    }
    return "\n".join([head, *_lines(states, answers, waiting)])


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
