"""StepAgreement: the ranks agree, in their side threads, on a step after which all act.

No message travels with the steps. A rank that wants an act tells the first rank, which has all ranks hold at
the end of their present step and tell how many steps they have done. The target is the step after the largest of
these: no rank has come to its end, and none passes an end of a step while it does not know the target.
"""

from __future__ import annotations

import threading

from mpidist.collectives.mpi.mailbox import drain
from mpidist.collectives.mpi.waiting import Comm
from mpidist.collectives.watch.side_thread import SideLine, side_thread
from mpidist.core.concurrency import Deadline
from mpidist.core.errors import CollectiveTimeoutError
from mpidist.topology.start import duplicate


class _Round:
    """One act after a step that all agree on."""

    def __init__(self) -> None:
        self.target: int | None = None
        self.is_over = False


class StepAgreement:
    """Counts the steps of this rank, and finds common ones (collective over ``comm``).

    Args:
        comm: All ranks that take the steps; None for a lone one. It is duplicated.

    Raises:
        RuntimeError: MPI was started without threads.
    """

    def __init__(self, comm: Comm | None) -> None:
        self.steps = 0
        """How many steps this rank has done."""
        self._rounds: dict[str, _Round] = {}
        self._changed = threading.Condition()
        self._counts: dict[str, dict[int, int]] = {}
        self._comm: Comm | None = None
        self._rank, self._size = 0, 1
        if comm is not None and comm.Get_size() > 1:
            if not side_thread.is_allowed():
                raise RuntimeError(
                    "MPI was started without MPI_THREAD_MULTIPLE, which ranks need to agree on a step; expected "
                    "`import mpidist` before MPI is started, or mpi4py.rc.thread_level = 'multiple'"
                )
            self._comm = duplicate(comm, "preparing to agree on steps")
            self._rank, self._size = comm.Get_rank(), comm.Get_size()
            self._line = SideLine(self._comm, self._receive)
            self._line.open()

    def ask_for(self, act: str) -> None:
        """Have an act done after a step that all ranks agree on.

        From any thread of any rank, once or more often.
        """
        if self._comm is None:
            with self._changed:
                self._rounds.setdefault(act, _Round()).target = self.steps + 1
        else:
            side_thread.call(lambda: self._send(0, "want", act))

    def step_done(self) -> list[str]:
        """Count a step, and return the acts that are due on all ranks after it.

        Returns soon but while ranks agree.

        Raises:
            CollectiveTimeoutError: Other ranks did not answer within ``MPIDIST_TIMEOUT``.
        """
        with self._changed:
            self.steps += 1
            if not self._rounds:
                return []
            deadline = Deadline(
                None, lambda waited: CollectiveTimeoutError("agreeing on a step", self.steps, waited, self._rank)
            )
            while any(each.target is None for each in self._rounds.values()):
                self._changed.wait(deadline.next_seconds)
                deadline.check()
            due = [act for act, each in self._rounds.items() if each.target == self.steps and not each.is_over]
            for act in due:
                self._rounds[act].is_over = True
            return due

    def close(self) -> None:
        """Free its communicator (collective).

        Raises:
            CollectiveTimeoutError: Other ranks did not close theirs within ``MPIDIST_TIMEOUT``.
        """
        if self._comm is not None:
            self._line.close()
            drain(self._comm, [self._line.mailbox.count], "closing an agreement on steps")
            self._comm.Free()
            self._comm = None

    # In the side thread -----------------------------------------------------------------------------------------

    def _receive(self, source: int, kind: str, content: tuple[str, int]) -> None:
        act, number = content
        if kind == "want" and act not in self._counts:
            # A round begins, on the first rank.
            self._counts[act] = {}
            for rank in range(self._size):
                self._send(rank, "hold", act)
        elif kind == "hold":
            with self._changed:
                self._rounds.setdefault(act, _Round())
                steps = self.steps
            self._send(0, "count", act, steps)
        elif kind == "count":
            counts = self._counts[act]
            counts[source] = number
            if len(counts) == self._size:
                for rank in range(self._size):
                    self._send(rank, "target", act, max(counts.values()) + 1)
        elif kind == "target":
            with self._changed:
                self._rounds[act].target = number
                self._changed.notify_all()

    def _send(self, rank: int, kind: str, act: str, number: int = 0) -> None:
        if rank == self._rank:
            self._receive(rank, kind, (act, number))
        else:
            self._line.send(rank, kind, (act, number))
