"""Guard: one of the waiting ranks asks all others, for a report or a deadlock.

The rank that waits turns to the first rank of its node, that one to the first of the communicator's first node, or
where these give no answer to the next (see ``mpidist.collectives.channel.connections``). The last of them asks all
others, once for all that wait for the same collective. Ranks answer in their side thread, so a rank that computes for
long is told from one that has stopped.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.channel.connections import Connections
from mpidist.collectives.channel.executor import DEADLOCKED
from mpidist.collectives.channel.observers import Observer
from mpidist.collectives.channel.operation import Operation
from mpidist.collectives.mpi.communicator_names import first_name
from mpidist.collectives.watch.deadlock import Deadlock, find_deadlock, wait_state
from mpidist.collectives.watch.hang_text import ANSWER_SECONDS, RankStatus, places_text, report_text
from mpidist.collectives.watch.inquiry import DEADLOCK, MESSAGE, PRINT, REPORT, Answers, Inquiries, Question
from mpidist.collectives.watch.side_thread import SideLine, side_thread
from mpidist.core import settings
from mpidist.core.concurrency import wait_at_most
from mpidist.core.errors import MismatchError
from mpidist.core.text import main_thread_frame, numbered_ranks, program_line, tell_user

# How long a rank that is to have others asked may take to say that it will: a hub, and one of this node. Where one of
# this node is only late, two of them pass the question on, and it is asked once.
_HUB_SECONDS, _MATE_SECONDS = 1.0, 0.6
# After which no report comes any more.
_LONGEST_SECONDS = ANSWER_SECONDS + 2 * _HUB_SECONDS + _MATE_SECONDS
# A message must be one that MPI sends without waiting for the other side.
_LONGEST_TEXT, _LONGEST_REPORT = 300, 2500
# How long a rank waits before it has others asked, and between two questions. Every rank sees its error within 2 s.
_ASK_AFTER_SECONDS, _ASK_EVERY_SECONDS = 0.5, 1.0
# Those of this process that are there.
_guards: list[Guard] = []


class _Report(NamedTuple):
    """The answer to those that had others asked.

    Attributes:
        text: The report.
        hopeless: Of a message that can never come, why.
        printing_rank: First of the ranks that wait for the same collective.
    """

    text: str
    hopeless: str = ""
    printing_rank: int = 0


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
        self._inquiries = Inquiries(channel.rank, self._connections, self._send, self._own_status)
        # Questions that another rank is to ask, those that this one has asked, and who is to hear the report.
        self._passed_on: set[Question] = set()
        self._asked: set[Question] = set()
        self._askers: dict[Question, set[int]] = {}
        self._heard: set[tuple[Question, int]] = set()
        self._reports: dict[Question, _Report] = {}
        # Called with the report.
        self._waiting: dict[Question, list[Callable[[_Report], None]]] = {}
        self._deadlocks: dict[int, str] = {}
        # The collective that the program waits in, and when to ask whether it can ever go on.
        self._waits_in, self._ask_at = 0, math.inf
        self._is_closed = False
        self._line = SideLine(channel.comm, self._receive)
        channel.message_counts.append(self._line.mailbox.count)
        _guards.append(self)
        # Last: messages may have come already.
        self._line.open()

    # In the thread that waits -----------------------------------------------------------------------------------

    def waits(self, operation: Operation[object]) -> Exception | None:
        """Return the error of a wait that can never end, once that is known."""
        now, number = time.monotonic(), operation.number
        if number != self._waits_in:
            is_first = self._channel.name == first_name()
            self._waits_in, self._ask_at = number, math.inf if is_first else now + _ASK_AFTER_SECONDS
        if now > self._ask_at:
            self._ask_at = now + _ASK_EVERY_SECONDS
            self._have_asked(Question(DEADLOCK, number))
        text = self._deadlocks.get(number)
        return None if text is None else MismatchError(text)

    def tells(self, operation: Operation[object]) -> bool:
        """Have one rank print why the collective does not go on; returns at once."""
        self._have_asked(Question(PRINT, operation.number))
        return True

    def explanation(self, operation: Operation[object]) -> tuple[str, int] | None:
        """Return the report, if it comes in time, and the rank that prints it."""
        question = Question(REPORT, operation.number)
        self._have_asked(question)
        wait_at_most(_LONGEST_SECONDS, lambda: question in self._reports, 0.01)
        report = self._reports.get(question)
        return None if report is None else (report.text, report.printing_rank)

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
        # All that wait for the same rank, or for any, ask the same, and are told together.
        question = Question(MESSAGE, other=rank)
        head = f"rank {self._rank} of {self._size} waits for {operation.text}, at {operation.call_site}:"

        def tell(report: _Report) -> None:
            print_report(f"{head}\n{report.text}")
            operation.hopeless = report.hopeless or operation.hopeless

        def give_up() -> None:
            if tell in self._waiting.get(question, ()):
                self._waiting[question].remove(tell)

        def ask() -> None:
            self._waiting.setdefault(question, []).append(tell)
            side_thread.later(_LONGEST_SECONDS, give_up)

        side_thread.call(ask)
        self._have_asked(question)

    def _have_asked(self, question: Question) -> None:
        is_near = question.other is not None and question.other in self._connections.own
        order = [self._rank] if is_near else self._connections.order
        side_thread.call(lambda: self._pass_on(question, order))

    def closed(self) -> None:
        """Ask and answer no more."""
        self._is_closed = True
        self._line.close()
        if self in _guards:
            _guards.remove(self)

    # In the side thread -----------------------------------------------------------------------------------------

    def _receive(self, source: int, kind: str, content: tuple[Any, ...]) -> None:
        """Act on a message of another rank."""
        about, *told = content
        if kind == "stuck":
            self._send(source, "heard", about)
            self._take(about, source)
        elif kind == "heard":
            if about in self._passed_on:
                self._heard.add((about, source))
        elif kind == "ask":
            self._inquiries.answer(source, about, *told)
        elif kind == "ask_node":
            self._inquiries.answer_for_node(source, about, *told)
        elif kind == "answer":
            self._inquiries.answered(about, *told)
        elif kind == "report":
            self._tell(about, *told)
        elif kind == "deadlock":
            self.spread(about)

    def _send(self, rank: int, kind: str, *content: object) -> None:
        self._line.send(rank, kind, content)

    def _take(self, question: Question, source: int) -> None:
        """Have a question of another rank asked.

        One from this rank's node it hands on to those above.
        """

        def forget() -> None:
            askers = self._askers.get(question, set())
            askers.discard(source)
            if not askers:
                self._askers.pop(question, None)

        if question.purpose in (REPORT, MESSAGE):
            self._askers.setdefault(question, set()).add(source)
            side_thread.later(_LONGEST_SECONDS, forget)
        if question in self._reports:
            self._tell(question, self._reports[question])
        else:
            self._pass_on(question, self._connections.above if source in self._connections.own else [self._rank])

    def _pass_on(self, question: Question, order: Sequence[int]) -> None:
        """Have the first rank in an order that answers ask all others."""
        if self._is_closed:
            return
        if order[0] == self._rank:
            self._ask(question)
        elif question not in self._passed_on:
            rank, others = order[0], order[1:]
            self._passed_on.add(question)
            self._send(rank, "stuck", question)

            def look() -> None:
                if question in self._passed_on:
                    self._passed_on.remove(question)
                    if (question, rank) not in self._heard:
                        self._pass_on(question, others)
                self._heard.discard((question, rank))

            side_thread.later(_HUB_SECONDS if rank in self._connections.hubs else _MATE_SECONDS, look)

    def _ask(self, question: Question) -> None:
        """Ask all others, once for all that wait."""
        if question not in self._asked:
            self._asked.add(question)
            ranks = [rank for rank in range(self._size) if question.is_for(rank)]
            self._inquiries.ask(question, ranks, lambda answers: self._conclude(question, answers))

    def _conclude(self, question: Question, answers: Answers) -> None:
        if self._is_closed:
            return
        unasked = self._inquiries.unasked(answers)
        if question.purpose in (DEADLOCK, MESSAGE):
            # The next that asks wants to know anew.
            self._asked.remove(question)
        if question.purpose == DEADLOCK:
            found = [each.wait_state for each in answers.values() if each.wait_state is not None]
            deadlock = find_deadlock(self._channel.name, question.number, found)
            if deadlock is not None:
                self.spread(Deadlock(deadlock.text[:_LONGEST_REPORT], deadlock.waits))
        elif question.purpose == MESSAGE:
            self._tell(question, self._message_report(question, answers, unasked))
        else:
            report = report_text(question.number, answers, self._size, unasked)
            if question.purpose == REPORT:
                statuses = {rank: each.status for rank, each in answers.items()}
                waits = [rank for rank, each in statuses.items() if each.waits and each.number == question.number]
                self._tell(question, _Report(report, printing_rank=min(waits, default=0)))
                return
            folder = settings.FLIGHT_RECORD.read()
            more = "" if folder is None else f"\n  what came before: python -m mpidist flight {folder}"
            tell_user(f"{report}{more}")

    def _message_report(self, question: Question, answers: Answers, unasked: dict[int, str]) -> _Report:
        found = {rank: answers.get(rank) for rank in range(self._size) if question.is_for(rank)}
        left = [rank for rank, status in found.items() if status is not None and status.status.ended]
        # Who waits for a message of any rank is the only one that is left.
        is_hopeless = left and len(left) >= len(found) - (question.other is None)
        hopeless = f"{numbered_ranks(left)} {'have' if len(left) > 1 else 'has'} ended the program"
        return _Report(places_text(found, unasked), hopeless if is_hopeless else "")

    def _tell(self, question: Question, report: _Report) -> None:
        """Tell a report to those who wait; one that others will ask for is kept."""
        if question.purpose == REPORT:
            self._reports[question] = report
        # Who waits for another message may ask again.
        self._passed_on.discard(question)
        for tell in self._waiting.pop(question, ()):
            tell(report)
        for asker in self._askers.pop(question, ()):
            self._send(asker, "report", question, report._replace(text=report.text[:_LONGEST_REPORT]))

    def spread(self, deadlock: Deadlock) -> None:
        """Have the ranks in a deadlock give up, here and on its other communicators."""
        here = self._channel.name
        numbers = [number for name, number in deadlock.waits if name == here and number not in self._deadlocks]
        if not numbers:
            return
        for number in numbers:
            self._deadlocks[number] = deadlock.text
        self._channel.executor.refuse(DEADLOCKED)
        for rank in self._connections.known():
            self._send(rank, "deadlock", deadlock)
        for guard in list(_guards):
            guard.spread(deadlock)

    def _own_status(self, question: Question) -> RankStatus:
        status = self._channel.executor.status()
        frame = main_thread_frame()
        where = "" if frame is None else program_line(frame)[-_LONGEST_TEXT:]
        return RankStatus(
            status if len(status.text) <= _LONGEST_TEXT else status._replace(text=f"{status.text[:_LONGEST_TEXT]}..."),
            wait_state(where) if question.purpose == DEADLOCK else None,
            where,
            f"process {os.getpid()} on {socket.gethostname()}",
        )
