"""Checks of the hosts: cores of each rank, room for its threads, and /dev/shm."""

from __future__ import annotations

import math

from mpidist.cli.doctor_checks import commands
from mpidist.cli.doctor_checks.finding import WARNING, Finding
from mpidist.cli.doctor_facts.facts import CoreFacts, JobFacts
from mpidist.collectives.reduce.registry import size_text
from mpidist.core.text import names_text, numbered_ranks

ENOUGH_BYTES = 256 << 20
"""Room for a large bucket of gradients, its result, MPI and NCCL."""
_SUGGESTED = "8g"


def check_cores(job: JobFacts) -> list[Finding]:
    """Check ranks against cores, then how they are bound, and the threads of BLAS."""
    return _crowded(job) or _doubled(job) or _pinned(job) or _threads(job)


def _of_machine(cores: CoreFacts) -> int:
    """Return the cores of the machine, or as many as the container's limit allows."""
    return min(cores.machine, math.ceil(cores.quota)) if cores.quota else cores.machine


def _shared(job: JobFacts, ranks: list[int]) -> int:
    """Return how many cores there are for the ranks of one machine."""
    seen = [job.known[rank].cores for rank in ranks]
    if all(len(cores.allowed) == 1 for cores in seen):
        # Bound one by one: which cores the others are bound to says nothing on how many there are.
        return _of_machine(seen[0])
    return min(_of_machine(seen[0]), len({core for cores in seen for core in cores.allowed}))


def _crowded(job: JobFacts) -> list[Finding]:
    machines = [ranks for ranks in job.machines.values() if _shared(job, ranks) < len(ranks)]
    if not machines:
        return []
    cores = _shared(job, machines[0])
    hosts = names_text(job.known[ranks[0]].host for ranks in machines)
    text = (
        f"{len(machines[0])} ranks share {cores} core{'s' if cores > 1 else ''} on {hosts}: a rank that computes keeps "
        "others waiting."
    )
    fitting = sum(min(len(ranks), _shared(job, ranks)) for ranks in job.machines.values())
    command = commands.start_unbound(job, fitting, threads=1)
    return [Finding(WARNING, "cores", text, command)]


def _doubled(job: JobFacts) -> list[Finding]:
    for ranks in job.machines.values():
        by_core: dict[tuple[int, ...], list[int]] = {}
        for rank in ranks:
            by_core.setdefault(job.known[rank].cores.allowed, []).append(rank)
        for allowed, several in by_core.items():
            if len(allowed) < len(several):
                who = f"{numbered_ranks(several)} on {job.host(several[0])}"
                cores = f"{', '.join(map(str, allowed))} of {_of_machine(job.known[several[0]].cores)}"
                text = f"{who} are bound to core {cores}, which they share, while others are idle."
                return [Finding(WARNING, "binding", text, _unbound(job))]
    return []


def _pinned(job: JobFacts) -> list[Finding]:
    cores = {rank: facts.cores for rank, facts in job.known.items()}
    pinned = [rank for rank, seen in cores.items() if len(seen.allowed) == 1 and _of_machine(seen) > 1]
    if not pinned:
        return []
    text = (
        f"{numbered_ranks(pinned)} may run on one core only, of {_of_machine(cores[pinned[0]])}: the threads of BLAS "
        "and the one that moves collectives on in the background share it with the program."
    )
    return [Finding(WARNING, "binding", text, _unbound(job))]


def _unbound(job: JobFacts) -> str:
    if job.first.launcher is None:
        return f"taskset --cpu-list 0-{job.first.cores.machine - 1} python train.py"
    share = min(_of_machine(job.known[ranks[0]].cores) // len(ranks) for ranks in job.machines.values())
    return commands.start_unbound(job, len(job.ranks), threads=max(1, share))


def _threads(job: JobFacts) -> list[Finding]:
    for ranks in job.machines.values():
        cores = _shared(job, ranks)
        # A library starts a thread for each core that it may run on, unless it is told otherwise.
        threads = sum(
            len(seen.allowed) for seen in (job.known[rank].cores for rank in ranks) if not seen.thread_settings
        )
        if len(ranks) > 1 and threads > cores:
            text = (
                f"{len(ranks)} ranks on {job.host(ranks[0])} share {cores} cores, and nothing limits the threads of "
                f"BLAS: all together start {threads}."
            )
            each = max(1, cores // len(ranks))
            if all(len(facts.cores.allowed) == facts.cores.machine for facts in job.known.values()):
                command = commands.start_unbound(job, len(job.ranks), threads=each)
            else:
                command = commands.start(job, len(job.ranks), settings={"OMP_NUM_THREADS": str(each)})
            return [Finding(WARNING, "threads", text, command)]
    return []


def check_shared_memory(job: JobFacts) -> list[Finding]:
    """Check free space; Docker gives 64 MiB to all."""
    short: dict[str, int] = {}
    for ranks in job.machines.values():
        facts = job.known[ranks[0]]
        free = 0 if facts.shared_memory is None else facts.shared_memory.free
        if free < ENOUGH_BYTES:
            short[facts.host] = free
    if not short:
        return []
    text = (
        f"/dev/shm has {size_text(min(short.values()))} free on {names_text(short)}; expected: "
        f"{size_text(ENOUGH_BYTES)} or more. Ranks of one node that find no room in it reduce by messages, which is "
        "slower, and NCCL fails."
    )
    command = (
        f"mount -o remount,size={_SUGGESTED} /dev/shm   # as root; in a container: docker run --shm-size={_SUGGESTED}"
    )
    return [Finding(WARNING, "/dev/shm", text, command)]
