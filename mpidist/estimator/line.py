"""Line: the news between the ranks of train_and_evaluate, beside the communicators of the training.

A rank that trains tells the evaluator that it is through, the evaluator tells all that it is, and who fails or leaves
the program tells all. Messages are small and rare; whoever waits for one looks again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NoReturn

from mpidist.collectives.mpi.mailbox import Mailbox
from mpidist.core import message_tags
from mpidist.core.callsite import user_call_site
from mpidist.core.deadline import Deadline, wait_at_most, wait_until
from mpidist.core.errors import PeerError, RankLostError
from mpidist.estimator.cast import Cast
from mpidist.topology.limited_calls import duplicate

if TYPE_CHECKING:
    from mpi4py import MPI

_NAPS_SECONDS = 0.001, 0.05
# How long a rank that fails keeps its error back so that the others hear of it.
_SEND_SECONDS = 0.5
# Lines that were given up with messages on their way, whose buffers MPI may still read.
_given_up: list[Line] = []


class News(Enum):
    """The news of a rank."""

    TRAINED = auto()
    """It has trained; with the newest checkpoint that it sees, if it is the chief."""
    EVALUATED = auto()
    """The last evaluation is done."""
    LEFT = auto()
    """Its program ends by sys.exit(); with the code."""
    FAILED = auto()
    """It has failed; with the error as text."""


class Line:
    """A connection between all ranks (collective).

    Args:
        comm: All of them; it is duplicated.
        cast: Who they are.

    Attributes:
        trained: Content of the news TRAINED, by rank.
        left: With which code each rank has left, by rank.
        evaluated: Whether the evaluator is through.
    """

    def __init__(self, comm: MPI.Intracomm, cast: Cast) -> None:
        self._cast = cast
        self._comm = duplicate(comm, "train_and_evaluate()")
        self._mailbox = Mailbox(self._comm, message_tags.ROLES, self._raise_loss)
        self.trained: dict[int, Any] = {}
        self.left: dict[int, Any] = {}
        self.evaluated = False
        # Whether the others know already, or find out by themselves, that this is over.
        self._is_known_to_fail = False

    def tell(self, news: News, content: Any, *ranks: int) -> None:
        """Send a message to ``ranks``, to all others where none is given; does not wait."""
        for rank in ranks or range(self._comm.Get_size()):
            if rank != self._cast.rank:
                self._mailbox.send(rank, (news, content))

    def wait(
        self, is_over: Callable[[], bool], waiting_for: str, meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        """Hear the news of others until ``is_over``, with a report but no deadline.

        Args:
            is_over: Asked again and again.
            waiting_for: For the report, after ``MPIDIST_WARN_AFTER`` seconds; empty for none.
            meanwhile: Called again and again.

        Raises:
            PeerError: One of them has failed.
            RankLostError: The process of one is gone, and MPI has said so.
            Exception: What ``meanwhile`` raises.
        """
        me, site = self._cast.name(self._cast.rank), user_call_site()

        def is_heard() -> bool:
            for rank, (news, content) in self._mailbox.received():
                self._take(rank, news, content)
            return is_over()

        deadline = Deadline(
            (lambda waited: f"{me} has waited {waited:.0f} s for {waiting_for}, at {site}") if waiting_for else None,
            meanwhile=meanwhile,
        )
        wait_until(is_heard, deadline, *_NAPS_SECONDS)

    def close(self) -> None:
        """Free it, when all ranks have told and heard all they have to (collective)."""
        wait_until(self._mailbox.all_sent, Deadline(), *_NAPS_SECONDS)
        self._comm.Free()

    def give_up(self, news: News, content: Any) -> None:
        """Tell all others why this rank leaves, if they do not know, and return soon."""
        _given_up.append(self)
        # Those that are left hear of a lost rank by themselves, and the error that led here is the one to raise.
        with suppress(RankLostError):
            if not self._is_known_to_fail:
                self.tell(news, content)
            wait_at_most(_SEND_SECONDS, self._mailbox.all_sent, _NAPS_SECONDS[0])

    def _take(self, rank: int, news: News, content: Any) -> None:
        if news is News.TRAINED:
            self.trained[rank] = content
        elif news is News.LEFT:
            self.left[rank] = content
        elif news is News.EVALUATED:
            self.evaluated = True
        else:
            self._is_known_to_fail = True
            raise PeerError(f"{self._cast.name(rank)} has failed in train_and_evaluate(): {content}")

    def _raise_loss(self, error: Exception) -> NoReturn:
        self._is_known_to_fail = True
        me = self._cast.name(self._cast.rank)
        raise RankLostError(f"a rank was lost while {me} waited in train_and_evaluate(): {error}") from error
