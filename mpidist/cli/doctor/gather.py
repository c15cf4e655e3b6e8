"""The course of doctor: ranks exchange messages, and rank 0 gathers all facts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from mpidist.cli.doctor import machine
from mpidist.cli.doctor.facts import ERROR, BurnFacts, CollectiveFacts, Finding, JobFacts, LinkSpeed, Pair, RankFacts
from mpidist.cli.doctor.pairs import ALL_PAIRS_RANKS, PairReport, exchange, first_partners, leader_partners, share
from mpidist.collectives.gpu.probes import rdma_everywhere, takes_device_memory
from mpidist.collectives.mpi.waiting import drive
from mpidist.collectives.node.node import Node
from mpidist.collectives.reduce.choice import place_of
from mpidist.collectives.reduce.registry import SHIPPED, Table, resolved, table_text
from mpidist.collectives.reduce.tuning_file import Setup, read, setup_of
from mpidist.core.concurrency import Deadline
from mpidist.core.message_tags import DOCTOR_PING
from mpidist.core.settings import RANKS_PER_NODE, TUNING_FILE
from mpidist.topology import import_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

Begin = Callable[[Finding, Finding | None, float], None]
"""Begins a stage. The findings are for a late stage, and for an end of the process. The seconds extend the limit."""
Burn = Callable[["MPI.Intracomm"], BurnFacts]

HOST_BY_HOST = "python -m mpidist doctor   # on one process of each host, then under the launcher on two at a time"
_SMALL_BYTES, _LARGE_BYTES = 8, 4 << 20
_FIRST_PINGS, _PINGS = 20, 200
# About how long large messages are sent for, and how many at most.
_SECONDS, _MOST_MESSAGES = 0.1, 64


class UnreachableError(RuntimeError):
    """Ranks do not reach one another, so MPI_Finalize would hang. ``job`` has the facts on rank 0."""

    def __init__(self, job: JobFacts | None) -> None:
        super().__init__("Ranks of the job do not reach one another.")
        self.job = job


def gather_job(
    me: RankFacts, seconds: float, begin: Begin, burn: Burn | None = None, burn_seconds: float = 0.0
) -> JobFacts | None:
    """Return the facts of the job on rank 0, None on the others (collective).

    Args:
        me: The facts of this rank without its GPUs.
        seconds: Time limit of a message of the pair test.
        begin: Begins a stage.
        burn: Load to run on all ranks, for ``burn_seconds``.

    Raises:
        UnreachableError: A pair of ranks exchanged no message.
    """
    comm: MPI.Intracomm = import_mpi().COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    who = f"rank {rank} of {size} on {me.host}"
    stacks = f"gdb -batch -ex 'thread apply all bt' -p $(pgrep -nf 'mpidist doctor')   # on {me.host}, while it hangs"

    def stage(
        doing: str,
        cause: str = "Either a rank has died, or the MPI library is broken on these hosts.",
        command: str = stacks,
        more: float = 0.0,
    ) -> None:
        begin(Finding(ERROR, "MPI", f"{who} has not finished {doing}. {cause}", command), None, more)

    def reach(partners: list[int]) -> JobFacts | None:
        if size == 1:
            return JobFacts((me,))
        begin(
            Finding(ERROR, "MPI", f"{who} exchanges first messages with other ranks, and MPI blocks.", stacks),
            Finding(
                ERROR,
                "MPI",
                f"{who} was ended while it exchanged first messages with other ranks. If MPI names a peer on stderr, "
                "that host refuses connections. Let firewalls pass all TCP ports between these hosts, or name the "
                "network between them.",
                "export OMPI_MCA_btl_tcp_if_include=10.0.0.0/24   # with their network",
            ),
            0.0,
        )
        report = PairReport(me, partners, exchange(comm, partners, me.host, seconds))
        stage("waiting for the reports of first messages", "The network to rank 0 has failed.", HOST_BY_HOST)
        all_reached, job = share(comm, report, seconds)
        if not all_reached:
            raise UnreachableError(job)
        return job

    job = reach(first_partners(rank, size))
    stage("exchanging host names")
    layout = me.settings.get(RANKS_PER_NODE.name)
    places = comm.allgather((me.host, me.machine, layout, bool(me.wrong_settings)))
    hosts = [host for host, *_ in places]
    if size > ALL_PAIRS_RANKS:
        more = reach(leader_partners(rank, [name for _, name, *_ in places]))
        if job is not None and job.reach is not None and more is not None and more.reach is not None:
            job = replace(job, reach=replace(job.reach, tested=job.reach.tested + more.reach.tested))
    stage("examining its GPUs", "The driver, or the import of CuPy, blocks.")
    gpus = machine.gpus()
    all_gpus = comm.gather(gpus)
    has_gpus = comm.allreduce(bool(gpus.visible), import_mpi().LOR)
    if job is not None and all_gpus is not None:
        ranks = tuple(replace(facts, gpus=seen) for facts, seen in zip(job.known.values(), all_gpus, strict=True))
        job = replace(job, ranks=ranks)
    if any(is_wrong for *_, is_wrong in places) or len({layout for *_, layout, _ in places}) > 1:
        # The rest reads the settings, and this one decides which ranks take part in it.
        return job
    stage("setting up the shared memory of its node")
    collectives = collective_facts(comm, has_gpus)
    links, in_use = _links(comm, hosts, collectives.node_of_rank, stage)
    stage("running the loads of --burn", more=burn_seconds)
    burned = BurnFacts() if burn is None else burn(comm)
    stage("collecting the results")
    results = comm.gather((links, in_use, burned))
    if job is None or results is None:
        return None
    return replace(
        job,
        links=tuple(link for some, *_ in results for link in some),
        in_use={host: names for host, (_, names, _) in zip(hosts, results, strict=True) if names},
        collectives=collectives,
        burn=() if burn is None else tuple(figures for *_, figures in results),
    )


def collective_facts(comm: MPI.Intracomm, has_gpus: bool) -> CollectiveFacts:
    """Return the choices of collectives over ``comm`` (collective). Those of the tuning file are right on rank 0 only.

    ``has_gpus`` says whether any rank has GPUs.
    """
    # Node does not keep the communicator: it splits it once.
    node = Node(comm)
    try:
        table, origin, error = _table(setup_of(node))
        takes = drive(takes_device_memory(comm), Deadline) if has_gpus else None
        if has_gpus:
            row = resolved(table.several_nodes_gpu, drive(rdma_everywhere(comm), Deadline))
            table = table._replace(several_nodes_gpu=row)
        return CollectiveFacts(
            node_of_rank=node.topology.node_of_rank,
            reads_neighbours=node.reads_neighbours,
            place=place_of(node),
            table=table_text(table, place_of(node)),
            table_origin=origin,
            table_error=error,
            gpu_table=table_text(table, place_of(node, "gpu")) if has_gpus else "",
            mpi_takes_gpu_memory=takes,
        )
    finally:
        node.close()


def _table(setup: Setup) -> tuple[Table, str, str]:
    """Return the table in force, its origin, and the file's error."""
    path = TUNING_FILE.read()
    if path is None:
        return SHIPPED, "the shipped table", ""
    try:
        tables = read(path)
    except ValueError as error:
        return SHIPPED, f"{path} cannot be used", str(error)
    if setup in tables:
        return tables[setup], f"from {path}", ""
    return SHIPPED, "the shipped table", f"{path} has no table for {', '.join(setup)}"


# The speed of links ---------------------------------------------------------------------------------------------


def pairs_inside(nodes: Sequence[Sequence[int]]) -> list[Pair]:
    """Return the first two ranks of every node.

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


def _links(
    comm: MPI.Intracomm, hosts: Sequence[str], node_of_rank: Sequence[int], stage: Callable[[str, str, str], None]
) -> tuple[list[LinkSpeed], tuple[str, ...]]:
    """Return the links that begin at this rank, and the interfaces in use between nodes."""
    nodes: list[list[int]] = [[] for _ in range(max(node_of_rank) + 1)]
    for rank, node in enumerate(node_of_rank):
        nodes[node].append(rank)
    own, links, before = comm.Get_rank(), list[LinkSpeed](), dict[str, int]()
    for number, pairs in enumerate([pairs_inside(nodes), *rounds_between(nodes)]):
        if number == 1:
            before = machine.traffic()
        pair = next((pair for pair in pairs if own in pair), None)
        other = None if pair is None else sum(pair) - own
        doing = "measuring" if other is None else f"measuring messages with rank {other} on {hosts[other]}"
        stage(doing, "A rank, a host or the network has failed.", HOST_BY_HOST)
        if pair is not None and other is not None:
            figures = measure(comm, other, own == pair[0])
            if own == pair[0]:
                links.append(LinkSpeed(pair, (hosts[own], hosts[other]), number > 0, *figures))
        comm.Barrier()
    moved = machine.traffic() if len(nodes) > 1 and own in {ranks[0] for ranks in nodes} else {}
    return links, tuple(name for name in sorted(moved) if moved[name] - before.get(name, 0) >= _LARGE_BYTES)


def measure(comm: MPI.Intracomm, peer: int, begins: bool) -> tuple[float, float]:
    """Return a small message's seconds and large messages' bytes per second, both one way."""
    small, large = bytearray(_SMALL_BYTES), bytearray(_LARGE_BYTES)

    def pass_on(content: bytearray, sends: bool) -> None:
        (comm.Send if sends else comm.Recv)(content, peer, DOCTOR_PING)

    def ping_pong(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            pass_on(small, begins)
            pass_on(small, not begins)
        return (time.perf_counter() - start) / count / 2

    def stream(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            pass_on(large, begins)
        pass_on(small, not begins)  # the receiver has all
        return time.perf_counter() - start

    ping_pong(_FIRST_PINGS)
    latency = ping_pong(_PINGS)
    stream(1)
    count = max(1, min(_MOST_MESSAGES, int(_SECONDS / stream(1))))
    agreed = bytearray(count.to_bytes(_SMALL_BYTES, "little"))
    pass_on(agreed, begins)
    count = int.from_bytes(agreed, "little")
    return latency, _LARGE_BYTES * count / stream(count)
