"""The ranks of a rail in one process: their messages lie in memory, and what each does is written down.

A way between nodes is a generator that yields while it waits, so that one loop can run those of many ranks. Their
messages can be compared with the cost that the way gives for itself, or replayed elsewhere.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpidist.collectives.mpi.mpi_types import NUMPY_OPS
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.reduce.cost_model import Round


class Event(NamedTuple):
    """One thing that a rank did."""

    kind: str
    """``isend``, ``irecv``, ``wait`` (for the oldest of its requests still to be waited for) or ``reduce``."""
    peer: int
    """The other rank; its own for ``reduce``."""
    tag: int
    nbytes: int
    step: int
    """The number of messages, one after the other, up to this one; 0 where it is not yet known."""


class InMemory:
    """Ranks whose messages lie in memory.

    A message is copied when both sides have asked for it, and a send is over no sooner: an algorithm that counts on
    buffers, or writes to what it still sends, goes wrong.

    Args:
        size: How many ranks there are.

    Attributes:
        events: Of each rank, what it did.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.events: list[list[Event]] = [[] for _ in range(size)]
        self._steps = [0] * size
        self._sent: dict[tuple[int, int, int], deque[_Request]] = defaultdict(deque)
        self._awaited: dict[tuple[int, int, int], deque[_Request]] = defaultdict(deque)
        self._current = 0
        self._moved = 0

    def comms(self) -> list[_Comm]:
        """Return the communicator of each rank."""
        return [_Comm(self, rank) for rank in range(self.size)]

    def run(self, steps: Sequence[Steps[Any]]) -> None:
        """Take the steps of all ranks to their end.

        Raises:
            RuntimeError: None of them gets any further, or a message is left over.
        """
        left = dict(enumerate(steps))
        with self._counted_reductions():
            while left:
                before = self._moved, len(left)
                for self._current, rank_steps in list(left.items()):
                    if next(rank_steps, left) is left:
                        del left[self._current]
                if before == (self._moved, len(left)):
                    raise RuntimeError(f"ranks {sorted(left)} of {self.size} wait for messages that nobody sends")
        over = [key for queues in (self._sent, self._awaited) for key, queue in queues.items() if queue]
        if over:
            raise RuntimeError(f"messages (source, target, tag) {over[:4]} have nobody on the other side")

    def rounds(self, itemsize: int) -> list[tuple[int, int, int]]:
        """Return of each step, messages, elements, and elements combined, of the ranks that have most of each."""
        counted: dict[int, dict[tuple[str, int], list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
        for rank, events in enumerate(self.events):
            for event in events:
                found = counted[event.step][event.kind, rank]
                found[0] += 1
                found[1] += event.nbytes // itemsize
        return [self._most(by) for _, by in sorted(counted.items())]

    def _most(self, by: dict[tuple[str, int], list[int]]) -> tuple[int, int, int]:
        messages = [counts for (kind, _), counts in by.items() if kind in ("isend", "irecv")]
        reduced = [elements for (kind, _), (_, elements) in by.items() if kind == "reduce"]
        return max(number for number, _ in messages), max(elements for _, elements in messages), max(reduced, default=0)

    @contextmanager
    def _counted_reductions(self) -> Iterator[None]:
        before = dict(NUMPY_OPS)
        NUMPY_OPS.update({op: partial(self._reduce, ufunc) for op, ufunc in before.items()})  # type: ignore[misc]
        try:
            yield
        finally:
            NUMPY_OPS.update(before)

    def _reduce(self, ufunc: Callable[..., Any], first: Any, second: Any, out: Any = None) -> Any:
        rank = self._current
        self.events[rank].append(Event("reduce", rank, 0, second.nbytes, self._steps[rank]))
        return ufunc(first, second, out=out)

    def _post(self, request: _Request) -> None:
        """Put one side of a message beside the other if that is there already."""
        self._moved += 1
        mine, theirs = (self._sent, self._awaited) if request.kind == "isend" else (self._awaited, self._sent)
        if not theirs[request.key]:
            mine[request.key].append(request)
            return
        other = theirs[request.key].popleft()
        sent, received = (request, other) if request.kind == "isend" else (other, request)
        if sent.memory.size != received.memory.size:
            raise RuntimeError(f"{sent.memory.size} bytes are sent to where {received.memory.size} are expected")
        received.memory[:] = sent.memory
        received.step = sent.step
        sent.is_matched = received.is_matched = True

    def _has_done(self, request: _Request) -> None:
        rank, at = request.rank, request.number
        self._steps[rank] = max(self._steps[rank], request.step)
        posted = self.events[rank][at]._replace(step=request.step)
        self.events[rank][at] = posted
        self.events[rank].append(posted._replace(kind="wait"))
        self._moved += 1


class _Request:
    """One side of a message."""

    def __init__(self, world: InMemory, rank: int, event: Event, memory: Any) -> None:
        self._world, self.rank, self.kind, self.step, self.memory = world, rank, event.kind, event.step, memory
        ends = (rank, event.peer) if event.kind == "isend" else (event.peer, rank)
        self.key = (*ends, event.tag)
        self.is_matched = self._is_over = False
        self.number = len(world.events[rank])
        world.events[rank].append(event)

    def Test(self) -> bool:  # noqa: N802  # as mpi4py has it
        """Return whether it is over."""
        if self.is_matched and not self._is_over:
            self._is_over = True
            self._world._has_done(self)
        return self._is_over


class _Comm:
    """The communicator of one rank, with the methods that ways between nodes call."""

    def __init__(self, world: InMemory, rank: int) -> None:
        self._world, self._rank = world, rank

    def Get_rank(self) -> int:  # noqa: N802
        return self._rank

    def Get_size(self) -> int:  # noqa: N802
        return self._world.size

    def Isend(self, message: Any, dest: int, tag: int) -> _Request:  # noqa: N802
        return self._post("isend", message, dest, tag)

    def Irecv(self, message: Any, source: int, tag: int) -> _Request:  # noqa: N802
        return self._post("irecv", message, source, tag)

    def _post(self, kind: str, message: Any, peer: int, tag: int) -> _Request:
        memory = np.asarray(message[0])
        step = self._world._steps[self._rank] + 1 if kind == "isend" else 0
        request = _Request(self._world, self._rank, Event(kind, peer, tag, memory.size, step), memory)
        self._world._post(request)
        return request


def flattened(rounds: Sequence[Round]) -> list[tuple[int, int, int]]:
    """Return rounds as ``InMemory.rounds`` counts them."""
    return [(each.messages, each.elements, each.reduced) for each in rounds for _ in range(each.times)]
