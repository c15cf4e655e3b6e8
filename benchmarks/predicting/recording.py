"""Recordings: what the ranks of one rail do in a reduction between nodes, by running the library's own generators.

A rank looks at all slices that it has under way, and goes on with those that it can go on with. A trace has one order
for each of its ranks, so each *lane*, a slice under way and those that follow it, is a rank of the trace; lanes of a
node share its cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from benchmarks.measuring.in_memory import Event, InMemory
from benchmarks.predicting.trace import Action, Compute, Receive, Schedule, Send, Sleep, WaitAll
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.node import LANES_BETWEEN_NODES
from mpidist.collectives.reduce import algorithms  # noqa: F401  # registers the algorithms
from mpidist.collectives.reduce.cost_model import Network
from mpidist.collectives.reduce.registry import Wire, wire_algorithms
from mpidist.core.options import ReduceOp


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


def rail_schedule(name: str, nodes: int, rails: int, slices: Slices, network: Network) -> Schedule:
    """Return what the lanes of one rail do in an all-reduce in two levels, after the handshake, node by node.

    Args:
        name: Of the way between nodes.
        nodes: Their number, which is that of the rail's ranks.
        rails: Ranks of a node, whose contributions each combines and whose slices each copies.
        slices: Of the message.
        network: How long a processor works on what.
    """
    lanes = slices.lanes
    world = InMemory(nodes * lanes)
    steps = []
    for number, comm in enumerate(world.comms()):
        node, lane = divmod(number, lanes)
        wire = wire_algorithms[name].make(comm, [other * lanes + lane for other in range(nodes)], node)
        steps.append(_lane(wire, world.events[number], number, lane, rails, slices))
    world.run(steps)
    return [list(_actions(events, network)) for events in world.events]


def _lane(wire: Wire, events: list[Event], number: int, lane: int, rails: int, slices: Slices) -> Steps[None]:
    """Take the slices of one lane over the wire, one after the other.

    A rank combines them in their order: the first slice of a lane comes after those of the lanes before.
    """
    if rails > 1 and lane:
        events.append(Event("others", number, 0, lane * slices.nbytes * rails, 0))
    for chunk in range(lane, slices.number, slices.lanes):
        if rails > 1:
            events.append(Event("reduce", number, 0, slices.nbytes * rails, 0))
        # One byte of memory is behind all of it: what is in a message is of no account.
        flat = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (slices.nbytes,), (0,))
        yield from wire.all_reduce(flat, flat, ReduceOp.SUM, chunk, None)
        events.append(Event("copy", number, 0, slices.nbytes * rails, 0))


def _actions(events: list[Event], network: Network) -> Iterator[Action]:
    """Yield the actions of a lane: it waits for all messages of an exchange together.

    A message takes half of its overhead where it is sent, half where it is received.
    """
    received = 0
    waits = False
    for event in events:
        if waits and event.kind != "wait":
            yield WaitAll()
            yield Compute(received * network.overhead / 2)
            received, waits = 0, False
        if event.kind == "isend":
            yield Compute(network.overhead / 2)
            yield Send(event.peer, event.tag, event.nbytes)
        elif event.kind == "irecv":
            received += 1
            yield Receive(event.peer, event.tag, event.nbytes)
        elif event.kind == "wait":
            waits = True
        elif event.kind == "others":
            yield Sleep(event.nbytes * network.reduce)
        else:
            yield Compute(event.nbytes * (network.reduce if event.kind == "reduce" else network.copy))


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
        return action

    nodes = [schedule[first : first + lanes] for first in range(0, len(schedule), lanes)]
    return [[moved(action, rail) for action in actions] for node in nodes for rail in range(rails) for actions in node]
