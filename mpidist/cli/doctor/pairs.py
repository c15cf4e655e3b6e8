"""The pair test: which ranks exchange messages. It polls, with one deadline, so a lost message blocks nobody.

Messages go over MPI.COMM_WORLD itself, because duplicating it already needs every link.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mpidist.cli.doctor.facts import JobFacts, Pair, RankFacts, Reach
from mpidist.core.concurrency import wait_at_most
from mpidist.core.message_tags import DOCTOR_HELLO, DOCTOR_REPORT, DOCTOR_VERDICT
from mpidist.topology import import_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

ALL_PAIRS_RANKS = 128
"""The largest job whose ranks all exchange messages. The number of connections grows with the square."""
_HELLO_BYTES = 64
_POLL_SECONDS = 1e-4
# Ranks begin at different times, and some have waited for a message that was lost.
_WAIT_FACTOR = 2
# Requests that may never complete. They keep their buffers, because MPI may still write into them.
_requests: list[MPI.Request] = []


class PairReport(NamedTuple):
    """A rank's facts, its partners, and the hosts of the partners that it heard."""

    facts: RankFacts
    partners: list[int]
    hosts: dict[int, str]


def first_partners(rank: int, size: int) -> list[int]:
    """Return all other ranks. In a large job return the neighbours and rank 0.

    >>> first_partners(1, 4), first_partners(5, 1000)
    ([0, 2, 3], [0, 4, 6])
    """
    if size <= ALL_PAIRS_RANKS or rank == 0:
        return [other for other in range(size) if other != rank]
    return sorted({0, (rank - 1) % size, (rank + 1) % size} - {rank})


def leader_partners(rank: int, machines: Sequence[str]) -> list[int]:
    """Return the other machines' first ranks. Ranks that are not first have no partners.

    >>> [leader_partners(rank, ["a", "a", "b", "c"]) for rank in range(4)]
    [[2, 3], [], [0, 3], [0, 2]]
    """
    leaders = [machines.index(machine) for machine in dict.fromkeys(machines)]
    return [leader for leader in leaders if leader != rank] if rank in leaders else []


def exchange(comm: MPI.Intracomm, partners: Iterable[int], host: str, seconds: float) -> dict[int, str]:
    """Exchange a message with each partner, which does the same. Return the hosts of those heard in time."""
    hello = host.encode()[:_HELLO_BYTES].ljust(_HELLO_BYTES, b"\0")
    answers = {rank: bytearray(_HELLO_BYTES) for rank in partners}
    waiting = {rank: comm.Irecv(answer, rank, DOCTOR_HELLO) for rank, answer in answers.items()}
    _requests.extend([*waiting.values(), *(comm.Isend(hello, rank, DOCTOR_HELLO) for rank in answers)])
    failure = import_mpi().Exception
    hosts: dict[int, str] = {}

    def all_heard() -> bool:
        for rank, request in list(waiting.items()):
            try:
                if request.Test():
                    del waiting[rank]
                    hosts[rank] = answers[rank].rstrip(b"\0").decode(errors="replace")
            except failure:  # such as a refused connection
                del waiting[rank]
        return not waiting

    wait_at_most(seconds, all_heard, _POLL_SECONDS)
    return dict(sorted(hosts.items()))


def share(comm: MPI.Intracomm, mine: PairReport, seconds: float) -> tuple[bool, JobFacts | None]:
    """Return whether every pair exchanged a message, and on rank 0 all facts (collective)."""
    if comm.Get_rank() > 0:
        _requests.append(comm.isend(mine, 0, DOCTOR_REPORT))
        # A watchdog ends this rank if rank 0 does not answer.
        return comm.recv(source=0, tag=DOCTOR_VERDICT), None
    size = comm.Get_size()
    reports = {0: mine}
    expected = size - len(set(mine.partners) - set(mine.hosts))

    def all_arrived() -> bool:
        # Matched probes, because the sizes of reports differ.
        while message := comm.improbe(tag=DOCTOR_REPORT):
            report: PairReport = message.recv()
            reports[report.facts.mpi.rank] = report
        return len(reports) >= expected

    wait_at_most(_WAIT_FACTOR * seconds, all_arrived, _POLL_SECONDS)
    facts = tuple(reports[rank].facts if rank in reports else None for rank in range(size))
    reach = merged(size, seconds, reports)
    _requests.extend(comm.isend(not reach.failed, rank, DOCTOR_VERDICT) for rank in range(1, size))
    return not reach.failed, JobFacts(facts, reach)


def merged(size: int, seconds: float, reports: Mapping[int, PairReport]) -> Reach:
    """Merge the reports. A rank whose report is missing counts as not heard by rank 0."""
    hosts = {0: reports[0].facts.host}
    pairs: set[Pair] = set()
    failed = {(0, rank) for rank in range(1, size) if rank not in reports}
    for rank, report in reports.items():
        hosts.update(report.hosts)
        for partner in report.partners:
            pair = (min(rank, partner), max(rank, partner))
            pairs.add(pair)
            if partner not in report.hosts:
                failed.add(pair)
    silent = tuple(rank for rank in range(size) if rank not in reports)
    return Reach(seconds, len(pairs | failed), tuple(sorted(failed)), dict(sorted(hosts.items())), size, silent)
