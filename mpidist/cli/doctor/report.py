"""The report of doctor as text."""

from __future__ import annotations

import ipaddress
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from mpidist.cli.doctor.burn import burn_lines
from mpidist.cli.doctor.checks import labels
from mpidist.cli.doctor.facts import CoreFacts, Finding, GpuFacts, Interface, JobFacts, LinkSpeed, RankFacts
from mpidist.cli.json_output import speed_text, table_lines, time_text
from mpidist.collectives.reduce.registry import size_text
from mpidist.core import __version__
from mpidist.core.text import groups_of, names_text, ranks_text

_WIDTH, _LABEL = 118, 12
# Of more ranks, equal ones share a line. Most groups of ranks, and of hosts.
_MOST_LINES, _MOST_GROUPS, _MOST_HOST_LINES = 16, 8, 4
_RANKS_WIDTH = 24


def report_text(job: JobFacts, findings: Sequence[Finding]) -> str:
    """Return the whole report."""
    silent = len(job.ranks) - len(job.known)
    title = f"mpidist {__version__} doctor: {_count(len(job.ranks), 'rank')}, {_count(len(job.machines), 'host')}"
    title += f"; {_count(silent, 'rank')} did not answer" if silent else ""
    lines = [
        title,
        "",
        *_software(job),
        *_ranks(job),
        *_machines(job),
        *_links(job),
        *_collectives(job),
        *burn_lines(job),
    ]
    return "\n".join([*lines, "", *findings_text(findings)])


def findings_text(findings: Sequence[Finding]) -> list[str]:
    """Return the findings, each with the command to type."""
    lines = []
    for finding in findings:
        lines += _wrapped(f"{finding.level.upper()} {finding.subject}: {finding.text}", "    ")
        lines.append(f"    type: {finding.command}")
    return lines or ["nothing wrong found"]


def _wrapped(text: str, indent: str) -> list[str]:
    # Commands and paths stay whole, so that they can be copied.
    options = {"width": _WIDTH, "break_long_words": False, "break_on_hyphens": False, "subsequent_indent": indent}
    return [part for line in text.splitlines() for part in textwrap.wrap(line, **options)]  # type: ignore[arg-type]


def _line(label: str, text: str) -> list[str]:
    return _wrapped(f"{label:<{_LABEL}}{text}", " " * _LABEL)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _software(job: JobFacts) -> Iterator[str]:
    first, info, size = job.first, job.first.launcher, job.first.mpi.size
    path = f" ({first.mpi.path})" if first.mpi.path else ""
    yield from _line("MPI", f"{first.mpi.name}{path}, {first.mpi.thread_level}")
    if info is not None:
        says = "an unknown number of ranks" if info.size is None else _count(info.size, "rank")
        launcher = f"{info.name}, which started {says}; the MPI world has {size}"
    elif size == 1:
        launcher = "none; to examine several ranks type: python -m mpidist launch -n 2 -m mpidist doctor"
    else:
        launcher = "unknown"
    yield from _line("launcher", launcher)
    versions = (f"{name} {version}" for name, version in first.software.items() if name != "mpidist")
    core = f"no native core: {first.without_core}" if first.without_core else "native core"
    yield from _line("software", ", ".join([*versions, core]))


# Ranks and machines ---------------------------------------------------------------------------------------------


def _ranks(job: JobFacts) -> Iterator[str]:
    """Yield a line for each rank. Of many ranks, equal ones share a line."""
    owned = labels(job)
    cells = {rank: (cores_text(facts.cores), ", ".join(owned[rank]) or "CPU") for rank, facts in job.known.items()}
    all_cells = [(rank, cells.get(rank, ("?", "?"))) for rank in range(len(job.ranks))]
    are_many = len(all_cells) > _MOST_LINES
    groups = groups_of(all_cells) if are_many else [(of_rank, [rank]) for rank, of_rank in all_cells]
    shown = groups[:_MOST_GROUPS] if are_many else groups
    rows = [("ranks", "hosts", "cores", "device") if are_many else ("rank", "host", "cores", "device")]
    for of_ranks, ranks in shown:
        hosts = names_text(dict.fromkeys(job.host(rank) or "?" for rank in ranks))
        rows.append((ranks_text(ranks, _RANKS_WIDTH), hosts, *of_ranks))
    for number, line in enumerate(table_lines(rows)):
        yield f"{'' if number else 'ranks':<{_LABEL}}{line}"
    left = sum(len(ranks) for _, ranks in groups[len(shown) :])
    if left:
        yield f"{'':<{_LABEL}}and {_count(left, 'rank')} more, see --json"


def cores_text(cores: CoreFacts) -> str:
    """Return the cores that a rank may run on.

    >>> cores_text(CoreFacts((0, 1, 2, 5), 8)), cores_text(CoreFacts((0, 1), 2, 0.5))
    ('0-2,5 of 8', '0-1 of 2, limited to 0.5')
    """
    limit = "" if cores.quota is None else f", limited to {cores.quota:g}"
    return f"{ranks_text(cores.allowed)} of {cores.machine}{limit}"


def _machines(job: JobFacts) -> Iterator[str]:
    """Yield the facts of hosts. Equal hosts share a line. Of many different hosts, their own figures are left out."""
    first = [job.known[ranks[0]] for ranks in job.machines.values()]
    for label, text_of in (
        ("/dev/shm", _room),
        ("GPUs", lambda facts, _: _gpus(facts.gpus)),
        ("network", partial(_network, job)),
    ):
        texts = [text_of(facts, True) for facts in first]
        if len(set(texts)) > _MOST_HOST_LINES:
            texts = [text_of(facts, False) for facts in first]
        groups = groups_of(enumerate(texts))
        for number, (text, hosts) in enumerate(groups[:_MOST_HOST_LINES]):
            names = names_text(first[host].host for host in hosts)
            yield from _line("" if number else label, text if len(first) == 1 else f"{names}: {text}")
        left = sum(len(hosts) for _, hosts in groups[_MOST_HOST_LINES:])
        if left:
            yield from _line("", f"and {_count(left, 'host')} more, see --json")


def _room(facts: RankFacts, is_exact: bool) -> str:
    shared = facts.shared_memory
    if shared is None:
        return "missing"
    if is_exact or not shared.free:
        return f"{size_text(shared.free)} free of {size_text(shared.total)}"
    return f"{size_text(1 << (shared.free.bit_length() - 1))} or more free of {size_text(shared.total)}"


def _gpus(seen: GpuFacts) -> str:
    if not seen.has_driver:
        return "none (no NVIDIA driver)" if seen.variable is None else f"none (CUDA_VISIBLE_DEVICES={seen.variable})"
    if seen.problem:
        return "cannot be used"
    names = ", ".join(f"{seen.names.count(name)} x {name}" for name in dict.fromkeys(seen.names))
    network = f", between nodes by {seen.net.name}" if seen.net.name else ""
    return f"{names}; {f'NCCL {seen.nccl}{network}' if seen.nccl else 'no NCCL'}"


def _network(job: JobFacts, facts: RankFacts, is_exact: bool) -> str:
    used = job.in_use.get(facts.host)
    interfaces = facts.interfaces if is_exact else [_without_address(each) for each in facts.interfaces]
    return network_text(interfaces) + ("" if used is None else f"; between hosts: {', '.join(used)}")


def network_text(interfaces: Sequence[Interface]) -> str:
    """Return the interfaces of a host. Those without an address are left out, unless no interface has one.

    >>> network_text([Interface("eth0", "10.0.0.1/24", 10000), Interface("eth1")])
    'eth0 10.0.0.1/24 (10 Gbit/s)'
    """
    named = [interface for interface in interfaces if interface.network or interface.is_infiniband]
    texts = []
    for interface in named or interfaces:
        speed = interface.mbit_per_second
        fast = "" if speed is None else f" ({speed / 1000:g} Gbit/s)"
        texts.append(" ".join(filter(None, (interface.name, interface.network))) + fast)
    return ", ".join(texts) or "no interface but loopback"


def _without_address(interface: Interface) -> Interface:
    if not interface.network:
        return interface
    return replace(interface, network=str(ipaddress.ip_interface(interface.network).network))


# Messages and collectives ---------------------------------------------------------------------------------------


def _links(job: JobFacts) -> Iterator[str]:
    if job.reach is not None:
        broken, ring, tested = set(job.reach.failed), job.reach.ring, job.reach.tested
        works = f"ring: {len(set(ring) - broken)} of {len(ring)} hops"
        yield from _line("reach", f"{works}; pairs: {tested - len(broken)} of {tested}")
    label = "speed"
    for place, between in (("in a node", False), ("between nodes", True)):
        links = [link for link in job.links if link.between_nodes is between]
        if links:
            yield from _line(label, f"{place}: {links_text(links)}")
            label = ""


def links_text(links: Sequence[LinkSpeed]) -> str:
    """Return the speed of a link, or the range of several."""
    latencies = sorted(link.latency_seconds for link in links)
    speeds = sorted(link.bytes_per_second for link in links)
    slowest = min(links, key=lambda link: link.bytes_per_second)
    one, other = slowest.ranks
    if len(links) == 1:
        return f"{time_text(latencies[0])}, {speed_text(speeds[0])} (ranks {one} and {other})"
    latency = f"{time_text(latencies[0])} to {time_text(latencies[-1])}"
    speed = f"{speed_text(speeds[0])} to {speed_text(speeds[-1])}"
    return f"{latency}, {speed}, slowest: {' - '.join(slowest.hosts)} (ranks {one} and {other})"


def _collectives(job: JobFacts) -> Iterator[str]:
    facts = job.collectives
    if facts is None:
        return
    if len(job.ranks) == 1:
        yield from _line("all-reduce", "one rank has nothing to reduce with")
        return
    counts = [facts.node_of_rank.count(node) for node in range(max(facts.node_of_rank) + 1)]
    each = str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    may = "may" if facts.reads_neighbours else "may not"
    yield from _line("nodes", f"{_count(len(counts), 'node')} x {each}; ranks of a node {may} read each other's memory")
    yield from _line("all-reduce", f"{facts.table} ({facts.table_origin})")
    if facts.gpu_table:
        takes = "accepts" if facts.mpi_takes_gpu_memory else "does not accept"
        yield from _line("", f"on GPUs: {facts.gpu_table}; MPI {takes} pointers to GPU memory")
