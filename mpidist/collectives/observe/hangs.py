"""Hang reports and deadlocks: on a long wait, one rank queries all others.

A waiting rank sends its question to the first two ranks of its node, which pass it on to the two askers: the first
ranks of the first two nodes. The first asker queries the leader of each node, or the second rank if the leader does not
answer, and these query their nodes. Ranks do not elect an asker. Each rank has a turn, and asks unless it has seen the
query of a rank before it. Ranks answer in the service thread, which tells a busy rank from a stopped one.
"""

from __future__ import annotations

import math
import os
import pickle
import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.channel.connections import Connections
from mpidist.collectives.channel.executor import DEADLOCKED
from mpidist.collectives.channel.observers import Observer
from mpidist.collectives.channel.operation import Operation
from mpidist.collectives.mpi.communicator_names import first_name
from mpidist.collectives.observe.hang_report import (
    ANSWER_SECONDS,
    Answer,
    Deadlock,
    find_deadlock,
    places_text,
    report_text,
    wait_state,
)
from mpidist.collectives.observe.lateness import LateRanks, find_straggler, moving_share, sampler
from mpidist.collectives.observe.link_probe import MOST_NODES, LinkProbe, LinkTime
from mpidist.collectives.rpc import Endpoint, Handlers, Reply, ServiceThread, service
from mpidist.core import message_tags, settings
from mpidist.core.concurrency import wait_at_most
from mpidist.core.errors import MismatchError
from mpidist.core.text import cut_text, main_thread_frame, numbered_ranks, program_line, tell_user

# Purposes of a question: print a report, return it for the error of a deadline, find a deadlock, or find the other
# side of a message. A last one: find the ranks that the others wait for all the time.
PRINT, REPORT, DEADLOCK, MESSAGE, STRAGGLER = "print", "report", "deadlock", "message", "straggler"
# When the first asker, the second, the next rank and all others ask, unless they have seen the query of one before.
# The last two expect the report of an asker first, because they reach only their own nodes.
_TURN_SECONDS = (0.0, 0.5, ANSWER_SECONDS, ANSWER_SECONDS + 0.5)
# After so long the second rank of a silent node is queried, and a leader stops waiting for slow ranks of its node.
_NEXT_SECONDS = 0.5
# A report arrives within this time, or not at all.
LONGEST_SECONDS = _TURN_SECONDS[-1] + ANSWER_SECONDS + 0.5
# When a rank that waits asks for deadlocks, first and again.
_ASK_AFTER_SECONDS, _ASK_EVERY_SECONDS = 0.5, 1.0
# MPI must send each message without waiting for its receiver.
_LONGEST_TEXT, _LONGEST_MESSAGE = 300, 2500
_UNASKED = "could not be asked, because the ranks that pass questions on gave no answer"
Answers = dict[int, Answer]
# The open ones of this process.
_observers: list[HangObserver] = []


class Question(NamedTuple):
    """A question about a collective, or about the other side of a message."""

    purpose: str
    number: int = 0
    other: int | None = None  # None for any rank

    def is_for(self, rank: int) -> bool:
        """Return whether a rank must answer."""
        return self.other is None or rank == self.other


class Report(NamedTuple):
    """The answer to a question."""

    text: str = ""
    hopeless: str = ""  # reason why a message can never arrive, if so
    printing_rank: int = 0
    straggler: LateRanks | None = None
    moving: float = 0.0  # share of the time in which data move in collectives


Hear = Callable[[Report], object]


class _Gathering:
    """Passes answers on, together when all have arrived or time is up. Late ones follow one by one."""

    def __init__(self, missing: set[int], pass_on: Callable[[Answers], object]) -> None:
        self.found: Answers = {}
        self.is_over = False
        self._missing, self._pass_on = missing, pass_on

    def add(self, packed: bytes) -> None:
        self.found.update(pickle.loads(zlib.decompress(packed)))
        if self.is_over or self._missing <= self.found.keys():
            self.end()

    def end(self) -> None:
        self.is_over = True
        found, self.found = self.found, {}
        if found:
            self._pass_on(found)


class HangObserver(Observer):
    """Reports hangs and deadlocks of one communicator.

    A deadlock needs two communicators, so the first one of all ranks is not checked. Most programs use only that one,
    and their waits send no messages.
    """

    def __init__(self, channel: Channel, service: ServiceThread = service) -> None:
        self._channel, self._service = channel, service
        self._rank, self._size = channel.rank, channel.size
        self.hosts: dict[int, str] = {}
        """Hosts of the ranks that this rank has asked about stragglers."""
        self._connections = Connections(channel.rank, channel.node.ranks)
        # Functions that want the report of an open question, and questions asked by a rank before this one.
        self._hearers: dict[Question, list[Hear]] = {}
        self._asked_before: set[Question] = set()
        # A collective is reported once, even when other ranks ask later.
        self._reports: dict[Question, Report] = {}
        self._deadlocks: dict[int, str] = {}
        # The collective that the program waits in, and when to ask for a deadlock.
        self._waits_in, self._ask_at = 0, math.inf
        self._probe = LinkProbe(channel.rank, service)
        handlers: Handlers = {
            "inquire": lambda reply, question: self._inquire(question, reply),
            "query node": self._query_node,
            "query": self._query,
            "deadlock": lambda _, deadlock: self.spread(deadlock),
            **self._probe.handlers,
        }
        self._endpoint = Endpoint(channel.comm, message_tags.SERVICE, handlers, service)
        self._probe.endpoint = self._endpoint
        channel.message_counts.append(self._endpoint.mailbox.count)
        _observers.append(self)
        # Last, because messages may be waiting.
        self._endpoint.open()

    # In the thread that waits -----------------------------------------------------------------------------------

    def waits(self, operation: Operation[object]) -> Exception | None:
        """Return the error of a deadlock, once it is known."""
        now, number = time.monotonic(), operation.number
        if number != self._waits_in:
            is_first = self._channel.name == first_name()
            self._waits_in, self._ask_at = number, math.inf if is_first else now + _ASK_AFTER_SECONDS
        if now > self._ask_at:
            self._ask_at = now + _ASK_EVERY_SECONDS
            self.inquire(Question(DEADLOCK, number), lambda _: None)
        return MismatchError(self._deadlocks[number]) if number in self._deadlocks else None

    def tells(self, operation: Operation[object]) -> bool:
        """Have one rank print which ranks keep the collective waiting. Returns at once."""
        self.inquire(Question(PRINT, operation.number), lambda _: None)
        return True

    def explanation(self, operation: Operation[object]) -> tuple[str, int] | None:
        """Return the report and the rank that prints it, if a report arrives in time."""
        reports: list[Report] = []
        self.inquire(Question(REPORT, operation.number), reports.append)
        wait_at_most(LONGEST_SECONDS, lambda: bool(reports), 0.01)
        return (reports[0].text, reports[0].printing_rank) if reports else None

    def message_tells(self, operation: Operation[object], rank: int | None) -> bool:
        """Print where the other side of a message is. For any rank, print where all are."""
        head = f"rank {self._rank} of {self._size} waits for {operation.text}, at {operation.call_site}:"
        self._find_other_side(operation, rank, lambda text: tell_user(f"{head}\n{text}"))
        return True

    def message_asks(self, operation: Operation[object], rank: int | None) -> None:
        """Find out whether the other side of a message has ended its program."""
        self._find_other_side(operation, rank, lambda _: None)

    def _find_other_side(self, operation: Operation[object], rank: int | None, show: Callable[[str], None]) -> None:
        def hear(report: Report) -> None:
            show(report.text)
            operation.hopeless = report.hopeless or operation.hopeless

        self.inquire(Question(MESSAGE, other=rank), hear)

    def inquire(self, question: Question, hear: Hear) -> None:
        """Have a question asked. The service thread calls ``hear`` with the report if one arrives in time."""
        self._service.call(lambda: self._inquire(question, hear))

    def probe_links(self, hear: Callable[[list[LinkTime]], object]) -> bool:
        """Measure the links of rank 0 to other nodes, and pass their times to ``hear``. Return whether it will."""
        leaders = [node[0] for node in self._connections.others]
        will_probe = 0 < len(leaders) < MOST_NODES
        if will_probe:
            self._service.call(lambda: self._probe.start(leaders, hear))
        return will_probe

    def closed(self) -> None:
        """Stop asking and answering."""
        self._endpoint.close()
        if self in _observers:
            _observers.remove(self)

    # In the service thread --------------------------------------------------------------------------------------

    def _inquire(self, question: Question, hear: Hear) -> None:
        """Pass a question on, and ask it when it is this rank's turn."""
        if question in self._reports:
            hear(self._reports[question])
            return
        if question in self._hearers:
            self._hearers[question].append(hear)
            return
        hearers = self._hearers[question] = [hear]
        turn = 0 if question.other in self._connections.own else len(self._connections.before)
        for rank in self._connections.above if turn else ():
            self._endpoint.request(
                rank, "inquire", question, seconds=LONGEST_SECONDS, hear=partial(self._end, question)
            )
        self._service.later(_TURN_SECONDS[min(turn, 3)], lambda: self._ask(question, hearers))
        self._service.later(LONGEST_SECONDS, lambda: self._is_open(question, hearers) and self._hearers.pop(question))

    def _is_open(self, question: Question, hearers: list[Hear]) -> bool:
        return self._endpoint.is_open and self._hearers.get(question) is hearers

    def _end(self, question: Question, report: Report) -> None:
        """Pass a report to all that wait for it. The first report counts."""
        hearers = self._hearers.pop(question, [])
        if question.purpose in (PRINT, REPORT):
            report = self._reports.setdefault(question, report)
        if question.purpose == PRINT and hearers and report.printing_rank == self._rank:
            folder = settings.FLIGHT_RECORD.read()
            more = "" if folder is None else f"\n  what came before: python -m mpidist flight {folder}"
            tell_user(f"{report.text}{more}")
        for hear in hearers:
            hear(report)

    def _ask(self, question: Question, hearers: list[Hear]) -> None:
        """Query this rank's node and, as an asker, all others."""
        if question in self._asked_before or not self._is_open(question, hearers):
            return
        others = self._connections.others if self._rank in self._connections.askers else []
        # This rank queries its own node as if it were the leader.
        nodes = [[self._rank], *(node for node in others if any(map(question.is_for, node)))]

        def conclude(found: Answers) -> None:
            # Otherwise another rank has reported.
            if self._is_open(question, hearers):
                self._end(question, self._report(question, found))

        def query(place: int) -> None:
            for node in nodes:
                if len(node) > place and gathering.found.keys().isdisjoint(node):
                    self._request(node[place], "query node", question, self._rank, gathering)

        asked = [rank for node in (self._connections.own, *nodes) for rank in node]
        gathering = _Gathering({*filter(question.is_for, asked)}, conclude)
        query(0)
        self._service.later(_NEXT_SECONDS, lambda: None if gathering.is_over else query(1))
        self._service.later(ANSWER_SECONDS, gathering.end)

    def _request(self, rank: int, name: str, question: Question, asker: int, gathering: _Gathering) -> None:
        self._endpoint.request(rank, name, question, asker, seconds=ANSWER_SECONDS, hear=gathering.add)

    def _query_node(self, reply: Reply, question: Question, asker: int) -> None:
        """Answer at once, then for the other ranks of the node."""
        self._query(reply, question, asker)
        mates = {*filter(question.is_for, self._connections.own)} - {self._rank}
        gathering = _Gathering(mates, lambda found: send_answers(reply, [*found.items()]))
        for rank in mates:
            self._request(rank, "query", question, asker, gathering)
        self._service.later(_NEXT_SECONDS, gathering.end)

    def _query(self, reply: Reply, question: Question, asker: int) -> None:
        """Answer, and leave the question to an asker before this rank."""
        if asker in self._connections.before:
            self._asked_before.add(question)
            self._service.later(_TURN_SECONDS[-1], lambda: self._asked_before.discard(question))
        status, frame = self._channel.executor.status(), main_thread_frame()
        where = "" if frame is None else program_line(frame)[-_LONGEST_TEXT:]
        answer = Answer(
            status._replace(text=cut_text(status.text, _LONGEST_TEXT)),
            wait_state(where) if question.purpose == DEADLOCK else None,
            where,
            f"process {os.getpid()} on {os.uname().nodename}",
            question in self._hearers,
            self._reports[question].printing_rank if question in self._reports else None,
            sampler().samples() if question.purpose == STRAGGLER else None,
        )
        send_answers(reply, [(self._rank, answer)])

    def _report(self, question: Question, answers: Answers) -> Report:
        """Return the answer to a question."""
        if question.purpose == DEADLOCK:
            waits = [each.wait_state for each in answers.values() if each.wait_state is not None]
            deadlock = find_deadlock(self._channel.name, question.number, waits)
            if deadlock is not None:
                self.spread(deadlock._replace(text=deadlock.text[:_LONGEST_MESSAGE]))
            return Report()
        if question.purpose == STRAGGLER:
            samples = {rank: each.samples for rank, each in answers.items() if each.samples is not None}
            self.hosts = {rank: each.host for rank, each in samples.items()}
            return Report(straggler=find_straggler(samples), moving=moving_share(samples))
        silent = [node for node in self._connections.others if answers.keys().isdisjoint(node)]
        unasked = {rank for node in silent for rank in node} - self._connections.known
        found: dict[int, Answer | str] = dict.fromkeys(unasked, _UNASKED)
        found.update(answers)
        if question.purpose == MESSAGE:
            ranks = [*filter(question.is_for, range(self._size))]
            left = [rank for rank in ranks if rank in answers and answers[rank].status.ended]
            # A rank that waits for a message from any rank is the only one left.
            is_hopeless = left and len(left) >= len(ranks) - (question.other is None)
            hopeless = f"{numbered_ranks(left)} {'have' if len(left) > 1 else 'has'} ended the program"
            return Report(places_text(found, ranks)[:_LONGEST_MESSAGE], hopeless if is_hopeless else "")
        # A rank that was stopped finds that others have a report already.
        known = [each.printing_rank for each in answers.values() if each.printing_rank is not None]
        asking = {rank: each.status for rank, each in answers.items() if each.wants_report}
        waiting = [rank for rank, each in asking.items() if each.waits and each.number == question.number]
        text = report_text(question.number, found, self._size)[:_LONGEST_MESSAGE]
        return Report(text, printing_rank=min(known or waiting or asking, default=self._rank))

    def spread(self, deadlock: Deadlock) -> None:
        """Fail the collectives of a deadlock on all ranks, here and on its other communicators."""
        here = self._channel.name
        numbers = [number for name, number in deadlock.waits if name == here and number not in self._deadlocks]
        if not numbers:
            return
        self._deadlocks.update(dict.fromkeys(numbers, deadlock.text))
        executor = self._channel.executor
        if not executor.waiting():  # otherwise the wait raises the error
            executor.fail(DEADLOCKED)
        for rank in self._connections.known:
            self._endpoint.notify(rank, "deadlock", deadlock)
        for observer in list(_observers):
            observer.spread(deadlock)


def send_answers(reply: Callable[[bytes], None], answers: list[tuple[int, Answer]]) -> None:
    """Send answers in as few messages as fit. The ranks of a node mostly have equal ones, which compress well."""
    packed = zlib.compress(pickle.dumps(answers))
    if len(packed) <= _LONGEST_MESSAGE or len(answers) == 1:
        reply(packed)
        return
    half = len(answers) // 2
    send_answers(reply, answers[:half])
    send_answers(reply, answers[half:])
