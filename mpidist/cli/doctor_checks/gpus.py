"""Checks of the GPUs: usable, one for each rank, near its cores; NCCL's network."""

from __future__ import annotations

import re

from mpidist.cli.doctor_checks import commands
from mpidist.cli.doctor_checks.finding import ERROR, WARNING, Finding
from mpidist.cli.doctor_facts.facts import GpuFacts, JobFacts
from mpidist.core.text import groups_of, names_text, numbered_ranks, ranks_text
from mpidist.topology.topology import devices_of_each

_NAMES_GPUS = re.compile(r"\d|GPU-|MIG-")
# How the names of slices end.
_SLICE = re.compile(r" MIG (\S+)$")
_MOST_PROBLEMS = 4


def check_gpus(job: JobFacts) -> list[Finding]:
    """Check driver, CuPy, NCCL, the GPUs and cores of each rank, and NCCL's network."""
    of_ranks = _differing(job) or _several(job)
    return [*_unusable(job), *_without_driver(job), *of_ranks, *_shared(job), *_far(job), *_slow_net(job)]


def devices(job: JobFacts) -> dict[int, tuple[str, ...]]:
    """Return the bus ids of the GPUs that each rank is to use, by rank."""
    dealt = _numbers(job)
    return {rank: tuple(job.known[rank].gpus.visible[number] for number in dealt[rank]) for rank in dealt}


def labels(job: JobFacts) -> dict[int, list[str]]:
    """Return the labels of the GPUs that each rank uses; slices (MIG) are marked."""
    return {
        rank: [_label(job.known[rank].gpus, number) for number in numbers] for rank, numbers in _numbers(job).items()
    }


def _label(seen: GpuFacts, number: int) -> str:
    part = _SLICE.search(seen.names[number])
    return f"{f'MIG {part[1]} of ' if part else ''}GPU {seen.visible[number]}"


def _numbers(job: JobFacts) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for ranks in job.machines.values():
        found.update(zip(ranks, devices_of_each([job.known[rank].gpus.visible for rank in ranks]), strict=True))
    return found


def _unusable(job: JobFacts) -> list[Finding]:
    problems = {rank: facts.gpus.problem or facts.gpus.nccl_problem for rank, facts in job.known.items()}
    findings = []
    for problem, ranks in groups_of((rank, problem) for rank, problem in problems.items() if problem)[:_MOST_PROBLEMS]:
        hosts = names_text(dict.fromkeys(job.known[rank].host for rank in ranks))
        who = numbered_ranks(ranks).capitalize()
        findings.append(Finding(WARNING, "GPU", f"{who} on {hosts}: {problem}", _install(problem)))
    return findings


def _install(problem: str) -> str:
    """Return the command in the text of a problem."""
    named = re.search(r"pip install (?:-e )?('[^']+'|[\w.-]+)", problem)
    return f"python -m {named[0]}" if named else "nvidia-smi && python -c 'import cupy; cupy.show_config()'"


def _without_driver(job: JobFacts) -> list[Finding]:
    for rank, facts in job.known.items():
        variable = facts.gpus.variable or ""
        if not facts.gpus.has_driver and _NAMES_GPUS.match(variable):
            text = f"Rank {rank} has CUDA_VISIBLE_DEVICES={variable}, and {facts.host} shows no NVIDIA driver."
            return [Finding(WARNING, "GPU", text, f"nvidia-smi   # on {facts.host}")]
    return []


def _differing(job: JobFacts) -> list[Finding]:
    """Ranks with GPUs and ranks without cannot reduce arrays on GPUs together."""
    with_gpus = [rank for rank, facts in job.known.items() if facts.gpus.visible]
    without = [rank for rank, facts in job.known.items() if not facts.gpus.visible]
    if not with_gpus or not without:
        return []
    text = (
        f"{numbered_ranks(with_gpus)} see{'s' if len(with_gpus) == 1 else ''} GPUs and {numbered_ranks(without)} "
        f"(on {job.host(without[0])}) none."
    )
    most = max(len(facts.gpus.visible) for facts in job.known.values())
    unset = f"unset CUDA_VISIBLE_DEVICES; {commands.start(job, len(job.ranks))}"
    return [Finding(ERROR, "GPU", text, commands.with_all_gpus(job, most) or unset)]


def _shared(job: JobFacts) -> list[Finding]:
    owned = devices(job)
    for ranks in job.machines.values():
        users: dict[str, list[int]] = {}
        for rank in ranks:
            for device in owned[rank]:
                users.setdefault(device, []).append(rank)
        for device, several in users.items():
            if len(several) > 1:
                have = "have slices (MIG) of" if _SLICE.search(job.known[several[0]].gpus.names[0]) else "share"
                who = f"{numbered_ranks(several)} on {job.host(several[0])}"
                effect = "NCCL refuses that, so their arrays go by way of host memory, which is slow."
                text = f"{who} {have} GPU {device}: {effect}"
                return [Finding(WARNING, "GPU", text, commands.start(job, _one_each(job)))]
    return []


def _several(job: JobFacts) -> list[Finding]:
    """Find a rank that has several GPUs, in a job of several machines.

    One GPU carries everything that it sends to others.
    """
    for rank, mine in devices(job).items():
        if len(mine) > 1 and len(job.machines) > 1:
            text = (
                f"Rank {rank} on {job.host(rank)} has {len(mine)} GPUs: between nodes the first of them carries what "
                "all have, by one network card. A rank for each GPU has each carry its part."
            )
            return [Finding(WARNING, "GPU", text, commands.start(job, _one_each(job)))]
    return []


def _far(job: JobFacts) -> list[Finding]:
    """Find a rank whose cores are all next to other GPUs than its own."""
    for rank, numbers in _numbers(job).items():
        facts = job.known[rank]
        for number in numbers:
            near = facts.gpus.cores[number]
            if near and not set(near) & set(facts.cores.allowed):
                own, next_to = ranks_text(facts.cores.allowed), ranks_text(near)
                text = (
                    f"Rank {rank} on {facts.host} runs on cores {own}, and its "
                    f"{_label(facts.gpus, number)} is next to cores {next_to}: what it copies to the GPU and "
                    "sends from there crosses between sockets."
                )
                return [Finding(WARNING, "GPU", text, commands.near_gpus(job))]
    return []


def _slow_net(job: JobFacts) -> list[Finding]:
    for facts in job.known.values() if len(job.machines) > 1 else ():
        net = facts.gpus.net
        if net.lacks:
            text = f"NCCL takes {net.name} between nodes, without a word: on {facts.host} {net.lacks}."
            return [Finding(WARNING, "NCCL", text, net.command)]
    return []


def _one_each(job: JobFacts) -> int:
    """Return the number of ranks with which each has a GPU of its own."""
    return sum(
        len({device for rank in ranks for device in job.known[rank].gpus.visible}) for ranks in job.machines.values()
    )
