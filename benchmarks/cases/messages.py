"""Messages, rounds and connections of collectives on any number of ranks, by running the library's own on one process.

Each function that sends messages is a generator, which runs for all ranks on a communicator that counts. What MPI's own
collectives do is not counted: small broadcasts, small gathers, and the handshake of a single node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.measuring.in_memory import InMemory
from mpidist.collectives.mpi.exchange import all_gather_flat, exchange_parts, reduce_scatter_rows
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.reduce import algorithms  # noqa: F401  # registers the algorithms
from mpidist.collectives.reduce.cost_model import Round, recursive_doubling, recursive_halving
from mpidist.collectives.reduce.registry import wire_algorithms
from mpidist.core.options import ReduceOp

# Bytes of a whole, and of what each rank has for each other: enough not to be left to MPI.
_WHOLE, _PART = 128 << 10, 8 << 10
# One byte of memory is behind all of it: what is in a message is of no account.
_BYTE = np.zeros(1, np.uint8)
_Program = Callable[[Any, int], Steps[None]]


class Counted(NamedTuple):
    """What the rank has that has most of each."""

    messages: int
    """That it sends."""
    rounds: int
    """Messages one after the other, from the first to the last of a chain."""
    peers: int
    """Other ranks that it sends to or hears from, to each of which MPI keeps a connection."""


def _flat(nbytes: int) -> Any:
    return np.lib.stride_tricks.as_strided(_BYTE, (nbytes,), (0,))


def _way(name: str) -> _Program:
    def program(comm: Any, ranks: int) -> Steps[None]:
        wire = wire_algorithms[name].make(comm, list(range(ranks)), comm.Get_rank())
        flat = _flat(ranks)
        yield from wire.all_reduce(flat, flat, ReduceOp.SUM, 0, None)

    return program


def _part(ranks: int) -> int:
    return max(_PART, _WHOLE // ranks)


def _borders(ranks: int) -> list[int]:
    return [_part(ranks) * rank for rank in range(ranks + 1)]


def _all_gather(comm: Any, ranks: int) -> Steps[None]:
    part = _part(ranks)
    yield from all_gather_flat(comm, _flat(part), _flat(part * ranks), [part] * ranks)


def _all_to_all(comm: Any, ranks: int) -> Steps[None]:
    part = _part(ranks)
    yield from exchange_parts(comm, _flat(part * ranks), _borders(ranks), _flat(part * ranks), [part] * ranks)


def _reduce_scatter(comm: Any, ranks: int) -> Steps[None]:
    part = _part(ranks)
    yield from reduce_scatter_rows(comm, _flat(part * ranks), _flat(part), _borders(ranks), ReduceOp.SUM)


def kinds() -> dict[str, Callable[[int], Counted]]:
    """Return what counts each kind, given the number of nodes, or of ranks where the kind does not know nodes."""
    programs: dict[str, _Program] = {f"all_reduce, {name}": _way(name) for name in wire_algorithms.names}
    programs |= {"all_gather": _all_gather, "all_to_all": _all_to_all, "reduce_scatter": _reduce_scatter}
    counts = {name: _counter(program) for name, program in programs.items()}
    counts["all_reduce, leaders, small"] = lambda nodes: _of_leaders(nodes, recursive_doubling(nodes, 1))
    counts["all_reduce, leaders, larger"] = lambda nodes: _of_leaders(nodes, recursive_halving(nodes, 1 << 20))
    return counts


def _counter(program: _Program) -> Callable[[int], Counted]:
    def count(ranks: int) -> Counted:
        world = InMemory(ranks)
        world.run([program(comm, ranks) for comm in world.comms()])
        sent = [[event for event in events if event.kind == "isend"] for events in world.events]
        peers = [{event.peer for event in events if event.kind in ("isend", "irecv")} for events in world.events]
        rounds = max(event.step for events in world.events for event in events)
        return Counted(max(map(len, sent)), rounds, max(map(len, peers)))

    return count


def _of_leaders(nodes: int, rounds: Sequence[Round]) -> Counted:
    """Return what the leaders do, who are in C: their rounds are those of their cost.

    There is a peer for each doubling, and one for the nodes beyond a power of two.
    """
    peers = nodes.bit_length() - 1 + bool(nodes & (nodes - 1))
    return Counted(sum(each.times * each.messages for each in rounds), sum(each.times for each in rounds), peers)
