"""Recordings: what the ranks of one rail send in a reduction between nodes, by running the library's own generators.

All ranks run in this process, on a communicator that notes their messages. What is in them is of no account.

A rank looks at all slices that it has under way, and goes on with those that it can go on with. A trace has one order
for each of its ranks, so each *lane*, a slice under way and those that follow it, is a rank of the trace; lanes of a
node share its cores.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from benchmarks.predicting.trace import Action, Compute, Receive, Schedule, Send, Wait
from mpidist.arrays.dtypes import Array
from mpidist.collectives.mpi.mpi_types import NUMPY_OPS
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.node import LANES_BETWEEN_NODES
from mpidist.collectives.reduce import algorithms  # noqa: F401  # which register themselves
from mpidist.collectives.reduce.cost_model import Network
from mpidist.collectives.reduce.registry import Wire, wire_algorithms
from mpidist.core.enums import ReduceOp


class Slices(NamedTuple):
    """The slices of a message on one rail."""

    number: int
    """How many there are."""
    nbytes: int
    """Of each."""

    @property
    def lanes(self) -> int:
        """How many are under way at a time."""
        return min(self.number, LANES_BETWEEN_NODES)


def slices_of(nbytes: int, rails: int, slice_bytes: int) -> Slices:
    """Return the slices of a message, alike in size as far as may be.

    >>> slices_of(1 << 20, 2, 1 << 17)
    Slices(number=4, nbytes=131072)
    """
    share = -(-nbytes // rails)
    number = max(1, -(-share // slice_bytes))
    return Slices(number, -(-share // number))


class _Request:
    """A message of one lane that is under way; what of mpi4py's requests is used between nodes."""

    def __init__(self, actions: list[Action], then: list[Action], is_send: bool) -> None:
        self._actions, self._then, self.is_send = actions, then, is_send
        self.is_through = False

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        if self.is_through:
            self._actions += self._then
        return self.is_through


class _Messages:
    """The messages under way among all lanes of a rail, and what each lane has done.

    A message is through once the one has begun to send it and the other is ready for it: what waits in the recording
    waits in a replay.

    Args:
        nodes: The ranks of the rail.
        lanes: Of each.
        overhead: Seconds of a processor for each message, half where it is sent, half where it is received.
    """

    def __init__(self, nodes: int, lanes: int, overhead: float) -> None:
        self.lanes, self.overhead = lanes, overhead
        self.done: Schedule = [[] for _ in range(nodes * lanes)]
        self._open: dict[tuple[int, int, int], deque[_Request]] = defaultdict(deque)

    def add(self, source: int, to: int, tag: int, request: _Request) -> _Request:
        """Bring the two ends of a message together; the second to come finds the first."""
        waiting = self._open[source, to, tag]
        if waiting and waiting[0].is_send != request.is_send:
            request.is_through = waiting.popleft().is_through = True
        else:
            waiting.append(request)
        return request


class _Comm:
    """One lane's communicator; what of mpi4py's is used between nodes."""

    def __init__(self, messages: _Messages, node: int, lane: int) -> None:
        self._messages, self._lane = messages, lane
        self._me = self._number(node)
        self.actions = messages.done[self._me]
        self._half = Compute(messages.overhead / 2)

    def _number(self, node: int) -> int:
        return node * self._messages.lanes + self._lane

    def Irecv(self, message: Any, source: int, tag: int) -> _Request:  # noqa: N802
        other = self._number(source)
        self.actions.append(Receive(other, tag, message[1]))
        request = _Request(self.actions, [Wait(other, self._me, tag), self._half], is_send=False)
        return self._messages.add(other, self._me, tag, request)

    def Isend(self, message: Any, to: int, tag: int) -> _Request:  # noqa: N802
        other = self._number(to)
        self.actions += [self._half, Send(other, tag, message[1])]
        request = _Request(self.actions, [Wait(self._me, other, tag)], is_send=True)
        return self._messages.add(self._me, other, tag, request)


def rail_schedule(name: str, nodes: int, rails: int, slices: Slices, network: Network) -> Schedule:
    """Return what the lanes of one rail do in an all-reduce in two levels, after the handshake, node by node.

    Args:
        name: Of the way between nodes.
        nodes: Their number, which is that of the rail's ranks.
        rails: Ranks of a node, whose contributions each combines and whose slices each copies.
        slices: Of the message.
        network: How long a processor works on what.
    """
    messages = _Messages(nodes, slices.lanes, network.overhead)
    positions = list(range(nodes))
    current: list[Action] = []

    def combined(*_: Array, out: Array) -> None:
        current.append(Compute(out.nbytes * network.reduce))

    moving = []
    for node in positions:
        for lane in range(slices.lanes):
            comm = _Comm(messages, node, lane)
            wire = wire_algorithms[name].make(comm, positions, node)
            moving.append((comm.actions, _lane(wire, comm.actions, lane, rails, slices, network)))
    with _sums(combined):
        while moving:
            left = []
            for current, steps in moving:
                if next(steps, steps) is not steps:
                    left.append((current, steps))
            moving = left
    return messages.done


def _lane(wire: Wire, actions: list[Action], lane: int, rails: int, slices: Slices, network: Network) -> Steps[None]:
    """Take the slices of one lane over the wire, one after the other."""
    for chunk in range(lane, slices.number, slices.lanes):
        if rails > 1:
            actions.append(Compute(slices.nbytes * rails * network.reduce))
        # One byte of memory is behind all of it.
        flat = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (slices.nbytes,), (0,))
        yield from wire.all_reduce(flat, flat, ReduceOp.SUM, chunk, None)
        actions.append(Compute(slices.nbytes * rails * network.copy))


@contextmanager
def _sums(combine: Callable[..., None]) -> Iterator[None]:
    """Have sums formed by another function, which is told their sizes."""
    ours = NUMPY_OPS[ReduceOp.SUM]
    # The library's algorithms look it up here.
    NUMPY_OPS[ReduceOp.SUM] = combine  # type: ignore[assignment]
    try:
        yield
    finally:
        NUMPY_OPS[ReduceOp.SUM] = ours


def on_all_rails(schedule: Schedule, lanes: int, rails: int) -> Schedule:
    """Return the schedule of all rails, which all do the same, given that of one.

    Args:
        schedule: Of the lanes of one rail, node by node.
        lanes: Of each node there.
        rails: Of each node.
    """

    def number(lane: int, rail: int) -> int:
        node, lane = divmod(lane, lanes)
        return (node * rails + rail) * lanes + lane

    def moved(action: Action, rail: int) -> Action:
        if isinstance(action, Send):
            return action._replace(to=number(action.to, rail))
        if isinstance(action, Receive):
            return action._replace(source=number(action.source, rail))
        if isinstance(action, Wait):
            return action._replace(source=number(action.source, rail), to=number(action.to, rail))
        return action

    nodes = [schedule[first : first + lanes] for first in range(0, len(schedule), lanes)]
    return [[moved(action, rail) for action in actions] for node in nodes for rail in range(rails) for actions in node]
