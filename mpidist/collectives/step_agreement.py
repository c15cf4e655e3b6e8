"""StepAgreement: the ranks agree, in their service threads, on a step after which all act.

Steps send no messages. A rank that wants an act notifies rank 0, which holds every rank at the end of its current step
and collects the number of steps that each has done. The target is the step after the largest number.
"""

from __future__ import annotations

import threading

from mpidist.collectives.mpi.exchange import drain
from mpidist.collectives.mpi.waiting import Comm
from mpidist.collectives.rpc import Endpoint, Handlers, Reply, service
from mpidist.core import message_tags
from mpidist.core.concurrency import Deadline
from mpidist.core.errors import CollectiveTimeoutError
from mpidist.topology.start import duplicate


class StepAgreement:
    """Count the steps of this rank, and agree on common ones (collective over ``comm``).

    Args:
        comm: Communicator of all ranks that step together, or None for a single rank. It is duplicated.

    Raises:
        RuntimeError: MPI was started without threads.
    """

    def __init__(self, comm: Comm | None) -> None:
        self.steps = 0
        """Number of steps that this rank has done."""
        # The agreed step of each act, or None while the ranks agree on it.
        self._targets: dict[str, int | None] = {}
        self._changed = threading.Condition()
        # On rank 0, the steps that the ranks have done.
        self._counts: dict[str, list[int]] = {}
        self._comm: Comm | None = None
        self._rank = self._size = 0
        if comm is not None and comm.Get_size() > 1:
            if not service.is_allowed():
                raise RuntimeError("agreeing on steps needs MPI_THREAD_MULTIPLE. Import mpidist before mpi4py.MPI")
            self._comm = duplicate(comm, "preparing to agree on steps")
            self._rank, self._size = comm.Get_rank(), comm.Get_size()
            handlers: Handlers = {"want": self._want, "hold": self._hold, "count": self._count, "target": self._set}
            self._endpoint = Endpoint(self._comm, message_tags.SERVICE, handlers)
            self._endpoint.open()

    def ask_for(self, act: str) -> None:
        """Request an act after a step that all ranks agree on. Any thread of any rank may call this, repeatedly."""
        if self._comm is None:
            with self._changed:
                self._targets.setdefault(act, self.steps + 1)
        else:
            service.call(lambda: self._endpoint.notify(0, "want", act))

    def step_done(self) -> list[str]:
        """Count a step, and return the acts that are due on all ranks after it. Waits only while the ranks agree.

        Raises:
            CollectiveTimeoutError: Other ranks did not answer within ``MPIDIST_TIMEOUT``.
        """
        with self._changed:
            self.steps += 1
            if not self._targets:
                return []
            deadline = Deadline(
                None, lambda waited: CollectiveTimeoutError("agreeing on a step", self.steps, waited, self._rank)
            )
            while None in self._targets.values():
                self._changed.wait(deadline.next_seconds)
                deadline.check()
            return [act for act, target in self._targets.items() if target == self.steps]

    def close(self) -> None:
        """Free the communicator (collective)."""
        if self._comm is not None:
            self._endpoint.close()
            drain(self._comm, [self._endpoint.mailbox.count], "closing an agreement on steps")
            self._comm.Free()
            self._comm = None

    def _want(self, _: Reply, act: str) -> None:
        if act not in self._counts:
            self._counts[act] = []
            for rank in range(self._size):
                self._endpoint.notify(rank, "hold", act)

    def _hold(self, _: Reply, act: str) -> None:
        with self._changed:
            self._targets.setdefault(act, None)
            self._endpoint.notify(0, "count", act, self.steps)

    def _count(self, _: Reply, act: str, steps: int) -> None:
        counts = self._counts[act]
        counts.append(steps)
        if len(counts) == self._size:
            for rank in range(self._size):
                self._endpoint.notify(rank, "target", act, max(counts) + 1)

    def _set(self, _: Reply, act: str, step: int) -> None:
        with self._changed:
            self._targets[act] = step
            self._changed.notify_all()
