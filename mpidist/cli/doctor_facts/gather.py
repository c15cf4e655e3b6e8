"""The course of doctor on the ranks of a job.

Each rank examines itself, all exchange messages, and rank 0 gets the facts.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from mpidist.cli.doctor_facts import machine, timed_messages
from mpidist.cli.doctor_facts.facts import CollectiveFacts, JobFacts, LinkSpeed, RankFacts
from mpidist.cli.doctor_facts.watchdog import Ending, Watchdog
from mpidist.collectives.gpu.probes import rdma_everywhere, takes_device_memory
from mpidist.collectives.mpi.waiting import drive
from mpidist.collectives.node.node import Node
from mpidist.collectives.reduce.choice import place_of
from mpidist.collectives.reduce.registry import SHIPPED, Table, resolved, table_text
from mpidist.collectives.reduce.tuning_file import Setup, read, setup_of
from mpidist.core.concurrency import Deadline
from mpidist.core.settings import RANKS_PER_NODE, TUNING_FILE
from mpidist.topology import import_mpi

if TYPE_CHECKING:
    from mpi4py import MPI


_GO_ON, _STOP = b"+", b"-"
# Stages with calls of MPI that block, such as making shared windows, and with the import of CuPy.
_STAGE_SECONDS = 60.0
_LOOK = "gdb -batch -ex 'thread apply all bt' -p {}   # on its host, while it hangs"
# Ranks come to a stage one after the other, and some have waited for a message that never came.
_WAIT_FACTOR = 2


def collective_facts(comm: MPI.Intracomm, has_gpus: bool) -> CollectiveFacts:
    """Return the facts of collectives over ``comm`` (collective). Those of the tuning file are right on rank 0 only.

    Args:
        comm: All ranks.
        has_gpus: Whether any rank has GPUs; the same on every rank.
    """
    # Node does not keep the communicator: it splits it once.
    node = Node(comm)
    try:
        place = place_of(node)
        table, origin, error = _table(setup_of(node))
        takes = drive(takes_device_memory(comm), Deadline) if has_gpus else None
        if has_gpus:
            row = resolved(table.several_nodes_gpu, drive(rdma_everywhere(comm), Deadline))
            table = table._replace(several_nodes_gpu=row)
        return CollectiveFacts(
            node_of_rank=node.topology.node_of_rank,
            reads_neighbours=node.reads_neighbours,
            place=place,
            table=table_text(table, place),
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


class UnreachableError(RuntimeError):
    """Ranks do not reach one another; on rank 0 with all that is known."""

    def __init__(self, job: JobFacts | None) -> None:
        super().__init__("ranks of the job do not reach one another")
        self.job = job


class _Place(NamedTuple):
    """The facts of a rank that all others need; rank 0 alone keeps the rest."""

    host: str
    machine: str
    layout: str | None
    is_wrong: bool


def _place(facts: RankFacts) -> _Place:
    layout = facts.settings.get(RANKS_PER_NODE.name)
    return _Place(facts.host, facts.machine, layout, bool(facts.wrong_settings))


def gather(me: RankFacts, seconds: float, watch: Watchdog) -> JobFacts | None:
    """Return the facts of the job on rank 0, None on the others (collective).

    Args:
        me: The facts of this rank but for its GPUs.
        seconds: How long a message is waited for.
        watch: Of this process.

    Raises:
        UnreachableError: Some ranks did not hear from one another; MPI_Finalize would hang.
        NoAnswerError: A rank did not answer that had answered before.
    """
    comm: MPI.Intracomm = import_mpi().COMM_WORLD
    if comm.Get_size() == 1:
        me = replace(me, gpus=machine.gpus())
        is_usable = not me.wrong_settings
        return JobFacts((me,), collectives=collective_facts(comm, bool(me.gpus.visible)) if is_usable else None)
    course = _Course(comm, me, seconds, watch)
    job = course.examine(*course.meet())
    watch.idle()
    return job


class _Course:
    """The stages of this rank, of which the watchdog is told.

    Args:
        comm: All ranks.
        me: The facts of this rank.
        seconds: How long a message is waited for.
        watch: Of this process.
    """

    def __init__(self, comm: MPI.Intracomm, me: RankFacts, seconds: float, watch: Watchdog) -> None:
        self._comm, self._me, self._seconds, self._watch = comm, me, seconds, watch
        self._who = f"rank {comm.Get_rank()} of {comm.Get_size()} on {me.host}"
        self._look = _LOOK.format(os.getpid())

    def _begin_first_messages(self) -> None:
        """Begin the stage of first messages, for which MPI makes connections."""
        does, limit = f"{self._who} exchanges first messages with other ranks", _STAGE_SECONDS + self._seconds
        self._watch.stage(
            limit,
            Ending(f"{does} for {limit:g} s and MPI blocks in that", self._look),
            Ending(
                f"{self._who} was ended while it exchanged first messages with other ranks. Where MPI names a peer on "
                "stderr, that host refuses its connections: let firewalls pass all TCP ports between these hosts, or "
                "name the network between them",
                "export OMPI_MCA_btl_tcp_if_include=10.0.0.0/24   # with their network",
            ),
        )

    def _begin(self, doing: str) -> None:
        """Begin another stage."""
        text = (
            f"{self._who} is {doing} for {_STAGE_SECONDS:g} s and does not come back, although every message arrived "
            "before: a rank has died since, or the MPI library is broken on these hosts"
        )
        self._watch.stage(_STAGE_SECONDS, Ending(text, self._look))

    # First meeting --------------------------------------------------------------------------------------------

    def meet(self) -> tuple[list[_Place], JobFacts | None]:
        """Return the place of each rank, and on rank 0 the facts of all."""
        rank, size = self._comm.Get_rank(), self._comm.Get_size()
        places, job = self._meet(timed_messages.first_partners(rank, size))
        if size > timed_messages.ALL_PAIRS_RANKS:
            machines: dict[str, list[int]] = {}
            for other, place in enumerate(places):
                machines.setdefault(place.machine, []).append(other)
            _, second = self._meet(timed_messages.partners_on_nodes(rank, list(machines.values())))
            if job is not None and second is not None and job.reach is not None and second.reach is not None:
                job = replace(job, reach=replace(job.reach, tested=job.reach.tested + second.reach.tested))
        return places, job

    def _meet(self, partners: list[int]) -> tuple[list[_Place], JobFacts | None]:
        """Exchange messages with partners, and have rank 0 tell all ranks where all are.

        Raises:
            UnreachableError: Somebody was not heard.
        """
        comm, job = self._comm, None
        self._begin_first_messages()
        heard = timed_messages.exchange(comm, partners, self._me.host, self._seconds)
        # Others are waited for with a deadline of its own.
        self._watch.idle()
        if comm.Get_rank() == 0:
            job = self._collect(heard)
        else:
            timed_messages.send_report(comm, pickle.dumps((self._me, heard)), _WAIT_FACTOR * self._seconds)
            # Rank 0 waits once for messages, and twice for reports; where it does not answer it ends the job.
            if timed_messages.receive_verdict(comm, (1 + 3 * _WAIT_FACTOR) * self._seconds) == _STOP:
                raise UnreachableError(None)
        self._begin("telling one another what they know")
        places: list[_Place] = comm.bcast(None if job is None else [_place(facts) for facts in job.known.values()])
        return places, job

    def _collect(self, heard: timed_messages.Heard) -> JobFacts:
        """Return all reports on rank 0, and tell the others whether to go on."""
        comm, size = self._comm, self._comm.Get_size()
        # A rank of a large job that is not a partner may still report.
        silent = set(heard.partners) - set(heard.hosts)
        content = timed_messages.receive_reports(comm, set(range(1, size)) - silent, _WAIT_FACTOR * self._seconds)
        reports = {rank: pickle.loads(report) for rank, report in content.items()} | {0: (self._me, heard)}
        all_heard = {rank: report[1] for rank, report in reports.items()}
        found = timed_messages.merged(size, self._seconds, all_heard, self._me.host)
        job = JobFacts(tuple(reports[rank][0] if rank in reports else None for rank in range(size)), reach=found)
        timed_messages.send_verdict(comm, _STOP if found.failed else _GO_ON)
        if found.failed:
            raise UnreachableError(job)
        return job

    # Together -------------------------------------------------------------------------------------------------

    def examine(self, places: list[_Place], job: JobFacts | None) -> JobFacts | None:
        """Gather the facts that need messages, now that every one arrives."""
        comm = self._comm
        self._begin("looking at its GPUs")
        mine = machine.gpus()
        everyones, has_gpus = comm.gather(mine), comm.allreduce(bool(mine.visible), import_mpi().LOR)
        if job is not None and everyones is not None:
            pairs = zip(job.known.values(), everyones, strict=True)
            job = replace(job, ranks=tuple(replace(facts, gpus=seen) for facts, seen in pairs))
        if any(place.is_wrong for place in places) or len({place.layout for place in places}) > 1:
            # What follows reads the settings, and this one decides who takes part in what.
            return job
        self._begin("setting up what the ranks of a node share")
        collectives = collective_facts(comm, has_gpus)
        self._begin("measuring")
        hosts = [place.host for place in places]
        speeds, used = self._speeds(hosts, collectives)
        self._begin("gathering the results")
        all_speeds, all_used = comm.gather(speeds), comm.gather(used)
        if job is None or all_speeds is None or all_used is None:
            return None
        return replace(
            job,
            links=tuple(link for some in all_speeds for link in some),
            in_use={host: names for host, names in zip(hosts, all_used, strict=True) if names},
            collectives=collectives,
        )

    def _speeds(self, hosts: list[str], collectives: CollectiveFacts) -> tuple[list[LinkSpeed], tuple[str, ...]]:
        """Return this rank's link speeds, and the interfaces that measuring between nodes used.

        A link belongs to the first rank of its pair.
        """
        comm = self._comm
        nodes: list[list[int]] = [[] for _ in range(max(collectives.node_of_rank) + 1)]
        for rank, node in enumerate(collectives.node_of_rank):
            nodes[node].append(rank)
        speeds = [timed_messages.measured(comm, timed_messages.pairs_inside(nodes), hosts, False, self._seconds)]
        before = machine.traffic()
        for pairs in timed_messages.rounds_between(nodes):
            self._begin(f"measuring between nodes, {len(pairs)} pairs of hosts")
            speeds.append(timed_messages.measured(comm, pairs, hosts, True, self._seconds))
        took_part = comm.Get_rank() in {ranks[0] for ranks in nodes} and len(nodes) > 1
        used = timed_messages.in_use(before, machine.traffic(), timed_messages.LEAST_BYTES) if took_part else ()
        return [link for link in speeds if link is not None], used
