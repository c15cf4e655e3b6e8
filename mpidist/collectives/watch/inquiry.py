"""Questions of one rank to the others, which go through the nodes.

The rank that asks opens no connection to each of the others: it asks the first rank of every node, and where that gives
no answer soon the second, which asks its node and sends on all answers.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from mpidist.collectives.channel.connections import Connections
from mpidist.collectives.watch.hang_text import ANSWER_SECONDS, RankStatus
from mpidist.collectives.watch.side_thread import side_thread

# After so long without a word of the first rank of a node the second is asked, and so long one of these waits for the
# others of its node before it sends on what it has: those that are late come after it, one by one.
_SECOND_AFTER_SECONDS, _NODE_SECONDS = 0.6, 0.6
# A message must be one that MPI sends without waiting for the other side.
_LONGEST_ANSWER = 2500
# The purpose of a question: a report to be printed, one for the error of a deadline, a deadlock, or the report of a
# message that does not come.
PRINT, REPORT, DEADLOCK, MESSAGE = "print", "report", "deadlock", "message"
_UNHEARD = "could not be asked, as the first two ranks of its node gave no answer"
_FAR = (
    "could not be asked from here, as the first ranks of the first two nodes, or the first two of this one, gave no "
    "answer"
)

Answers = dict[int, RankStatus]


@dataclass(frozen=True)
class Question:
    """A question about a collective, or a message of a rank.

    Args:
        purpose: One of those above.
        number: Of the collective.
        other: Of a message, the other side of it, or None for any.
    """

    purpose: str
    number: int = 0
    other: int | None = None

    def is_for(self, rank: int) -> bool:
        """Return whether a rank is to answer."""
        return self.other is None or rank == self.other


class _Inquiry:
    """The answers so far, on a rank that asks others.

    Args:
        answers: The first.
        missing: The ranks that are to answer.
        tell: Called with all answers when they are there, or the time is over; then with each that is late.
    """

    def __init__(self, answers: Answers, missing: set[int], tell: Callable[[Answers], None]) -> None:
        self.answers, self._missing, self._tell = answers, missing, tell
        self._is_told = False

    def add(self, found: Answers) -> None:
        """Take note of answers."""
        self._missing.difference_update(found)
        if self._is_told:
            self._tell(found)
            return
        self.answers.update(found)
        self.tell_if(not self._missing)

    def tell_if(self, is_over: bool) -> None:
        """Tell the answers, once."""
        if is_over and not self._is_told:
            self._is_told = True
            self._tell(self.answers)


class Inquiries:
    """The questions that this rank asks, and that it answers; used in the side thread.

    Args:
        rank: This rank.
        connections: Whom it may talk to.
        send: Sends a message: rank, kind, content.
        status: Returns the state of this rank, for a question.
    """

    def __init__(
        self, rank: int, connections: Connections, send: Callable[..., None], status: Callable[[Question], RankStatus]
    ) -> None:
        self._rank, self._connections, self._send, self._status = rank, connections, send, status
        self._open: dict[int, _Inquiry] = {}
        self._numbers = count()

    def ask(self, question: Question, ranks: Collection[int], tell: Callable[[Answers], None]) -> None:
        """Query ranks. Call ``tell`` once all answers arrived, or after `ANSWER_SECONDS`.

        Args:
            question: The query.
            ranks: Ranks to query. This rank may not reach some of them.
            tell: Callback for the answers. They include the answers of this rank and of ranks that forwarded the query.
        """
        missing = {*ranks} - {self._rank}
        if not self._connections.is_hub:
            missing.intersection_update(self._connections.own)
        nodes = [node for node in self._connections.others() if not missing.isdisjoint(node)]

        def end(answers: Answers) -> None:
            del self._open[number]
            tell(answers)

        def ask_nodes(place: int) -> None:
            for node in nodes:
                if len(node) > place and inquiry.answers.keys().isdisjoint(node):
                    self._send(node[place], "ask_node", question, number)

        number, inquiry = self._begin(question, {self._rank: self._status(question)}, missing, end)
        ask_nodes(0)
        side_thread.later(_SECOND_AFTER_SECONDS, lambda: ask_nodes(1))
        side_thread.later(ANSWER_SECONDS, lambda: inquiry.tell_if(True))
        inquiry.tell_if(not missing)

    def _begin(
        self, question: Question, answers: Answers, missing: set[int], tell: Callable[[Answers], None]
    ) -> tuple[int, _Inquiry]:
        """Ask those of this node, and return the inquiry and its number."""
        number = next(self._numbers)
        inquiry = self._open[number] = _Inquiry(answers, missing, tell)
        for rank in missing.intersection(self._connections.own):
            self._send(rank, "ask", question, number)
        return number, inquiry

    def answer(self, rank: int, question: Question, number: int) -> None:
        """Answer a rank."""
        self._send_answers(rank, number, {self._rank: self._status(question)})

    def answer_for_node(self, rank: int, question: Question, number: int) -> None:
        """Answer a rank of another node at once, then for the others of this one."""
        self.answer(rank, question, number)
        mates = {mate for mate in self._connections.own if question.is_for(mate)} - {self._rank}
        own, inquiry = self._begin(question, {}, mates, lambda found: self._send_answers(rank, number, found))

        def end() -> None:
            del self._open[own]

        side_thread.later(_NODE_SECONDS, lambda: inquiry.tell_if(True))
        side_thread.later(ANSWER_SECONDS, end)

    def _send_answers(self, rank: int, number: int, answers: Answers) -> None:
        for part in packed_answers([*answers.items()]) if answers else ():
            self._send(rank, "answer", number, part)

    def answered(self, number: int, packed: bytes) -> None:
        """Take note of answers, unless the inquiry is over."""
        inquiry = self._open.get(number)
        if inquiry is not None:
            inquiry.add(dict(pickle.loads(zlib.decompress(packed))))

    def unasked(self, answers: Answers) -> dict[int, str]:
        """Return why ranks could not be asked, by rank.

        Args:
            answers: To a question to all.
        """
        others = self._connections.others()
        if not self._connections.is_hub:
            known = self._connections.known()
            return {rank: _FAR for node in others for rank in node if rank not in known}
        return {rank: _UNHEARD for node in others if answers.keys().isdisjoint(node) for rank in node[2:]}


def packed_answers(answers: Sequence[tuple[int, RankStatus]]) -> Iterator[bytes]:
    """Yield the answers as messages; the ranks of a node mostly say the same."""
    packed = zlib.compress(pickle.dumps(answers))
    if len(packed) <= _LONGEST_ANSWER or len(answers) == 1:
        yield packed
        return
    half = len(answers) // 2
    yield from packed_answers(answers[:half])
    yield from packed_answers(answers[half:])
