"""Roll call: locate ranks that do not create the first communicator or strategy.

mpidist has no communicator of its own by then, so a thread of each rank answers queries on MPI_COMM_WORLD. It runs from
the start of MPI until all ranks have created their first communicator. A rank sends queries only after its deadline,
because a receive of the program could match a query.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpidist.core.concurrency import POLL_SECONDS, DaemonThread, wait_at_most
from mpidist.core.message_tags import ROLL_CALL, ROLL_CALL_ANSWER
from mpidist.core.text import group_lines, groups_of, main_thread_frame, numbered_ranks, program_line
from mpidist.topology.exit import says_rank_is_lost

if TYPE_CHECKING:
    from mpi4py import MPI

_ANSWER_SECONDS, _POLL_SECONDS = 1.5, 0.01
_NO_ANSWER = (
    "gave no answer: its program has ended, it has not imported mpidist, its process is stopped, or it runs code that "
    "keeps Python's lock"
)
# Each rank queries all others, so large jobs skip the roll call.
_MOST_RANKS, _ROOM = 256, 1800
# Not empty once this rank creates its first communicator.
_arrived: list[bool] = []


class _Answering(DaemonThread["MPI.Intracomm"]):
    """The thread that answers queries on MPI_COMM_WORLD."""

    def __init__(self) -> None:
        super().__init__("roll-call")
        self._answers: list[MPI.Request] = []

    def look(self) -> float:
        """Answer pending queries. Return the seconds until the next poll."""
        with self.lock:
            for world in list(self.watched):
                try:
                    self._answer(world)
                except sys.modules["mpi4py.MPI"].Exception as error:
                    if not says_rank_is_lost(error):
                        raise
                    # The program gets its own error, and may continue on the other ranks.
                    self.forget(world)
        return POLL_SECONDS

    def _answer(self, world: MPI.Intracomm) -> None:
        for rank, _ in _messages(world, ROLL_CALL):
            answer = [_own_state().encode(), sys.modules["mpi4py.MPI"].BYTE]
            self._answers.append(world.Isend(answer, rank, ROLL_CALL_ANSWER))


_answering = _Answering()


def _own_state() -> str:
    frame = main_thread_frame()
    place = "its program has ended" if frame is None else f"it is at {program_line(frame)}"
    return f"{'waits for the others' if _arrived else 'has not made a strategy or communicator'}; {place}"


def start_answering() -> None:
    """Start the thread if MPI runs with several ranks and MPI_THREAD_MULTIPLE."""
    mpi = sys.modules["mpi4py.MPI"]
    if not mpi.Is_initialized() or mpi.Is_finalized() or mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        return
    if mpi.COMM_WORLD.Get_size() > 1:
        atexit.register(stop_answering)
        # For a program that calls MPI_Finalize, which first deletes the attributes of MPI_COMM_SELF.
        mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=lambda *_: stop_answering()), None)
        _answering.watch(mpi.COMM_WORLD)


def stop_answering() -> None:
    """Stop the thread."""
    _answering.stop()


def arrive() -> None:
    """Note that this rank creates its first communicator."""
    _arrived.append(True)


def absent_ranks(world: MPI.Intracomm) -> str | None:
    """Return lines with the places of all other ranks, for the error of a deadline."""
    size, own = world.Get_size(), world.Get_rank()
    if not _answering.watched or size > _MOST_RANKS:
        return None
    others = [rank for rank in range(size) if rank != own]
    queries = [world.Isend([b"", sys.modules["mpi4py.MPI"].BYTE], rank, ROLL_CALL) for rank in others]
    found: dict[int, str] = {}

    def is_complete() -> bool:
        found.update(_messages(world, ROLL_CALL_ANSWER))
        return len(found) == len(queries)

    wait_at_most(_ANSWER_SECONDS, is_complete, _POLL_SECONDS)
    groups = groups_of((rank, found.get(rank, _NO_ANSWER)) for rank in others)
    return "\n".join(group_lines(groups, lambda text, ranks: (f"  {numbered_ranks(ranks)} ", text, ""), room=_ROOM))


def _messages(world: MPI.Intracomm, tag: int) -> Iterator[tuple[int, str]]:
    """Receive all pending messages with a tag. Yield rank and text of each."""
    mpi = sys.modules["mpi4py.MPI"]
    status = mpi.Status()
    # A matched probe, so that no receive of the program can match the message.
    while message := world.Improbe(mpi.ANY_SOURCE, tag, status):
        text = bytearray(status.Get_count(mpi.BYTE))
        message.Recv([text, mpi.BYTE])
        yield status.Get_source(), text.decode(errors="replace")
