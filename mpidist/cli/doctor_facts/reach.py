"""Which ranks reach which: every pair exchanges a short message, all at the same time, with one deadline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mpidist.cli.doctor_facts.facts import Reach
from mpidist.cli.doctor_facts.messages import finished, give_up
from mpidist.core.message_tags import DOCTOR_HELLO

if TYPE_CHECKING:
    from mpi4py import MPI

ALL_PAIRS_RANKS = 128
"""Up to so many ranks each exchanges a message with each: their connections grow with the square."""
_HELLO_BYTES = 64


class Heard(NamedTuple):
    """What one rank found out.

    Attributes:
        partners: With whom it exchanged messages.
        hosts: The host of each partner that it heard from.
    """

    partners: tuple[int, ...]
    hosts: dict[int, str]


def first_partners(rank: int, size: int) -> list[int]:
    """Return with whom a rank exchanges messages first: all others, in a large job its neighbours and rank 0.

    >>> first_partners(1, 4), first_partners(5, 1000)
    ([0, 2, 3], [0, 4, 6])
    """
    if size <= ALL_PAIRS_RANKS or rank == 0:
        return [other for other in range(size) if other != rank]
    return sorted({0, (rank - 1) % size, (rank + 1) % size} - {rank})


def partners_on_nodes(rank: int, machines: Sequence[Sequence[int]]) -> list[int]:
    """Return with whom a rank of a large job exchanges messages, so that every pair of machines does once.

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
    """Exchange a message with each partner, which must do the same, and return who was heard in time."""
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
    """Return what all ranks found out together; a rank whose report did not come counts as not heard by rank 0."""
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
