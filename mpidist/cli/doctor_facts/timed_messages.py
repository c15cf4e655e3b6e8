"""Point-to-point messages with deadlines, and the speed of links: nothing blocks for ever.

They are polled, and go over MPI.COMM_WORLD itself. Duplicating it takes every link to work, and doctor is the only one
that uses it. Which ranks reach which is found by one short message of every pair, all at the same time, with one
deadline. Speed is measured for a moment each: pairs inside nodes come first, then pairs of neighbouring nodes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from mpidist.cli.doctor_facts.facts import LinkSpeed, Reach
from mpidist.core.message_tags import DOCTOR_CONTENT, DOCTOR_HELLO, DOCTOR_LENGTH, DOCTOR_PING, DOCTOR_VERDICT
from mpidist.topology import import_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

_NAP_SECONDS = 1e-4
_LOOKS_BEFORE_NAP = 1000
_LENGTH_BYTES = 8
# Requests that were given up: MPI may still write into their buffers, which they hold.
_given_up: list[MPI.Request] = []
ALL_PAIRS_RANKS = 128
"""The most ranks of which each exchanges a message with each. Their connections grow with the square."""
_HELLO_BYTES = 64
_SMALL_BYTES = 8
_LARGE_BYTES = 4 << 20
_FIRST_PINGS, _PINGS = 20, 200
# About how long large messages are sent for, and how many at most.
_SECONDS, _MOST_MESSAGES = 0.1, 64
# A measurement is of several messages.
_MEETING_FACTOR = 5
Pair = tuple[int, int]
LEAST_BYTES = _LARGE_BYTES
"""The least that an interface has moved if messages of a measurement took it."""


class NoAnswerError(RuntimeError):
    """A rank did not answer in time; the text says which."""


def finished(requests: Mapping[int, MPI.Request], seconds: float) -> set[int]:
    """Wait for all requests or a deadline, and return the keys of complete ones.

    One that MPI reports an error for, such as a connection that was refused, counts as never complete.
    """
    failure = import_mpi().Exception
    waiting = dict(requests)
    done: set[int] = set()
    deadline = time.monotonic() + seconds
    looks = 0
    while waiting:
        for key, request in list(waiting.items()):
            try:
                if request.Test():
                    done.add(key)
                    del waiting[key]
            except failure:
                del waiting[key]
        looks += 1
        if looks > _LOOKS_BEFORE_NAP:
            time.sleep(_NAP_SECONDS)
            if time.monotonic() > deadline:
                break
        else:
            os.sched_yield()
    give_up(waiting.values())
    return done


def give_up(requests: Iterable[MPI.Request]) -> None:
    """Wait for these no more."""
    _given_up.extend(requests)


def wait_for(request: MPI.Request, peer: int, seconds: float, doing: str) -> None:
    """Wait until a request is complete.

    Raises:
        NoAnswerError: It is not in time.
    """
    if not finished({peer: request}, seconds):
        rank = import_mpi().COMM_WORLD.Get_rank()
        raise NoAnswerError(f"rank {rank} got no answer from rank {peer} within {seconds:g} s while {doing}")


def meet(comm: MPI.Intracomm, seconds: float, doing: str) -> None:
    """Wait until all ranks have come here (collective; MPI_Ibarrier).

    Raises:
        NoAnswerError: They have not in time.
    """
    if not finished({0: comm.Ibarrier()}, seconds):
        raise NoAnswerError(f"rank {comm.Get_rank()} waited {seconds:g} s for all others, {doing}")


def send_report(comm: MPI.Intracomm, content: bytes, seconds: float) -> bool:
    """Send this rank's report to rank 0; whether it went out in time."""
    length = len(content).to_bytes(_LENGTH_BYTES, "little")
    requests = {0: comm.Isend(length, 0, DOCTOR_LENGTH), 1: comm.Isend(content, 0, DOCTOR_CONTENT)}
    return len(finished(requests, seconds)) == len(requests)


def receive_reports(comm: MPI.Intracomm, ranks: Iterable[int], seconds: float) -> dict[int, bytes]:
    """Return the reports of ``ranks`` that came to rank 0 in time."""
    lengths = {rank: bytearray(_LENGTH_BYTES) for rank in ranks}
    announced = finished({rank: comm.Irecv(length, rank, DOCTOR_LENGTH) for rank, length in lengths.items()}, seconds)
    contents = {rank: bytearray(int.from_bytes(lengths[rank], "little")) for rank in announced}
    came = finished({rank: comm.Irecv(content, rank, DOCTOR_CONTENT) for rank, content in contents.items()}, seconds)
    return {rank: bytes(contents[rank]) for rank in came}


def send_verdict(comm: MPI.Intracomm, verdict: bytes) -> None:
    """Send a verdict of one byte from rank 0 to all others, without waiting."""
    give_up([comm.Isend(verdict, rank, DOCTOR_VERDICT) for rank in range(1, comm.Get_size())])


def receive_verdict(comm: MPI.Intracomm, seconds: float) -> bytes:
    """Return the verdict of rank 0.

    Raises:
        NoAnswerError: It did not come in time.
    """
    verdict = bytearray(1)
    wait_for(comm.Irecv(verdict, 0, DOCTOR_VERDICT), 0, seconds, "waiting for what it has to say")
    return bytes(verdict)


class Heard(NamedTuple):
    """The messages that one rank exchanged.

    Attributes:
        partners: With whom it exchanged messages.
        hosts: The host of each partner that it heard from.
    """

    partners: tuple[int, ...]
    hosts: dict[int, str]


def first_partners(rank: int, size: int) -> list[int]:
    """Return the ranks with which a rank exchanges its first messages.

    These are all others; in a large job its neighbours and rank 0.

    >>> first_partners(1, 4), first_partners(5, 1000)
    ([0, 2, 3], [0, 4, 6])
    """
    if size <= ALL_PAIRS_RANKS or rank == 0:
        return [other for other in range(size) if other != rank]
    return sorted({0, (rank - 1) % size, (rank + 1) % size} - {rank})


def partners_on_nodes(rank: int, machines: Sequence[Sequence[int]]) -> list[int]:
    """Return a rank's partners in a large job: every pair of machines meets once.

    Each machine deals the other machines to its ranks in turn.

    >>> [partners_on_nodes(rank, [[0, 1], [2, 3], [4, 5]]) for rank in range(6)]
    [[4], [2], [1, 5], [], [0], [2]]
    """
    mine = next(number for number, ranks in enumerate(machines) if rank in ranks)

    def speaker(here: int, there: int) -> int:
        return machines[here][there % len(machines[here])]

    others = (number for number in range(len(machines)) if number != mine)
    return [speaker(there, mine) for there in others if speaker(mine, there) == rank]


def exchange(comm: MPI.Intracomm, partners: Iterable[int], host: str, seconds: float) -> Heard:
    """Exchange a message with each partner, and return those heard in time. The partner must do the same."""
    chosen = tuple(partners)
    hello = host.encode()[:_HELLO_BYTES].ljust(_HELLO_BYTES, b"\0")
    answers = {rank: bytearray(_HELLO_BYTES) for rank in chosen}
    requests = {rank: comm.Irecv(answer, rank, DOCTOR_HELLO) for rank, answer in answers.items()}
    sent = {rank: comm.Isend(hello, rank, DOCTOR_HELLO) for rank in chosen}
    heard = finished(requests, seconds)
    # A send to somebody who did not answer may never be complete.
    give_up(sent.values())
    return Heard(chosen, {rank: answers[rank].rstrip(b"\0").decode(errors="replace") for rank in sorted(heard)})


def merged(size: int, seconds: float, reports: Mapping[int, Heard], own_host: str) -> Reach:
    """Return the results of all ranks together. A rank whose report did not come counts as not heard by rank 0."""
    hosts = {0: own_host}
    pairs: set[tuple[int, int]] = set()
    failed = {(0, rank) for rank in range(1, size) if rank not in reports}
    for rank, heard in reports.items():
        hosts.update(heard.hosts)
        for partner in heard.partners:
            pair = (min(rank, partner), max(rank, partner))
            pairs.add(pair)
            if partner not in heard.hosts:
                failed.add(pair)
    silent = tuple(rank for rank in range(size) if rank not in reports)
    return Reach(seconds, len(pairs | failed), tuple(sorted(failed)), dict(sorted(hosts.items())), size, silent)


def pairs_inside(nodes: Sequence[Sequence[int]]) -> list[Pair]:
    """Return the first two ranks of every node that has as many.

    >>> pairs_inside([[0, 2], [1], [3, 4, 5]])
    [(0, 2), (3, 4)]
    """
    return [(ranks[0], ranks[1]) for ranks in nodes if len(ranks) > 1]


def rounds_between(nodes: Sequence[Sequence[int]]) -> list[list[Pair]]:
    """Return the first ranks of neighbouring nodes, in rounds of disjoint pairs.

    >>> rounds_between([[0], [1], [2]]), rounds_between([[0, 1], [2, 3]])
    ([[(0, 1)], [(1, 2)], [(0, 2)]], [[(0, 2)]])
    """
    firsts = [ranks[0] for ranks in nodes]
    hops = list(pairwise(firsts))
    closing = [(firsts[0], firsts[-1])] if len(firsts) > 2 else []
    return [round_ for round_ in (hops[0::2], hops[1::2], closing) if round_]


def measured(
    comm: MPI.Intracomm, pairs: Sequence[Pair], hosts: Sequence[str], between_nodes: bool, seconds: float
) -> LinkSpeed | None:
    """Measure all ``pairs`` at the same time (collective). The first rank of a pair gets the link.

    Args:
        comm: All ranks.
        pairs: Each rank at most once.
        hosts: By rank.
        between_nodes: Whether they are on different nodes.
        seconds: How long a message is waited for.

    Raises:
        NoAnswerError: A message did not come in time.
    """
    rank = comm.Get_rank()
    mine = next((pair for pair in pairs if rank in pair), None)
    link = None
    if mine is not None:
        peer = mine[1] if rank == mine[0] else mine[0]
        doing = f"measuring between {hosts[rank]} and {hosts[peer]}"
        latency, speed = _Measurement(comm, peer, rank == mine[0], seconds, doing).run()
        if rank == mine[0]:
            link = LinkSpeed(mine, (hosts[mine[0]], hosts[mine[1]]), between_nodes, latency, speed)
    meet(comm, _MEETING_FACTOR * seconds, "which measure")
    return link


class _Measurement:
    """One side of a pair."""

    def __init__(self, comm: MPI.Intracomm, peer: int, begins: bool, seconds: float, doing: str) -> None:
        self._comm, self._peer, self._begins = comm, peer, begins
        self._seconds, self._doing = seconds, doing
        self._small, self._large = bytearray(_SMALL_BYTES), bytearray(_LARGE_BYTES)

    def run(self) -> tuple[float, float]:
        """Return a small message's seconds and large ones' bytes per second, both one way."""
        self._ping_pong(_FIRST_PINGS)
        latency = self._ping_pong(_PINGS)
        self._stream(1)
        count = self._agreed(max(1, min(_MOST_MESSAGES, int(_SECONDS / self._stream(1)))))
        return latency, _LARGE_BYTES * count / self._stream(count)

    def _ping_pong(self, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            self._pass(self._small, self._begins)
            self._pass(self._small, not self._begins)
        return (time.perf_counter() - start) / count / 2

    def _stream(self, count: int) -> float:
        """Send so many large messages, and return the time until the other side confirms."""
        start = time.perf_counter()
        for _ in range(count):
            self._pass(self._large, self._begins)
        self._agreed(0)
        return time.perf_counter() - start

    def _agreed(self, number: int) -> int:
        """Return the number of the side that begins, after an answer of the other side."""
        told = bytearray(number.to_bytes(_SMALL_BYTES, "little"))
        self._pass(told, self._begins)
        self._pass(self._small, not self._begins)
        return int.from_bytes(told, "little")

    def _pass(self, content: bytearray, sends: bool) -> None:
        """Send a message, or receive it."""
        start = self._comm.Isend if sends else self._comm.Irecv
        wait_for(start(content, self._peer, DOCTOR_PING), self._peer, self._seconds, self._doing)


def in_use(before: dict[str, int], after: dict[str, int], least: int) -> tuple[str, ...]:
    """Return the interfaces that moved at least ``least`` bytes in between.

    >>> in_use({"eth0": 10, "ib0": 0}, {"eth0": 15, "ib0": 100}, 50)
    ('ib0',)
    """
    return tuple(name for name in sorted(after) if after[name] - before.get(name, 0) >= least)
