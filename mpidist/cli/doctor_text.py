"""Doctor's report as text."""

from __future__ import annotations

import ipaddress
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from mpidist.cli.doctor_checks import gpus
from mpidist.cli.doctor_checks.finding import Finding
from mpidist.cli.doctor_facts.facts import CoreFacts, Interface, JobFacts, LinkSpeed, RankFacts
from mpidist.cli.tune import time_text
from mpidist.collectives.reduce.registry import size_text
from mpidist.core import __version__
from mpidist.core.text import groups_of, names_text, ranks_text

_WIDTH = 118
_LABEL = 12
# A line for each rank, and for ranks or hosts that are alike.
_MOST_LINES, _MOST_GROUPS, _MOST_HOST_LINES = 16, 8, 4
_RANKS_WIDTH = 24


def report(job: JobFacts, findings: Sequence[Finding]) -> str:
    """Return the whole report."""
    machines = len(job.machines)
    size = len(job.ranks)
    silent = f"; {_count(size - len(job.known), 'rank')} did not answer" if len(job.known) < size else ""
    title = f"mpidist {__version__} doctor: {_count(size, 'rank')}, {_count(machines, 'host')}{silent}"
    lines = [title, "", *_software(job), *_ranks(job), *_machines(job), *_together(job)]
    return "\n".join([*lines, "", *findings_text(findings)])


def findings_text(findings: Sequence[Finding]) -> list[str]:
    """Return the findings, each with the command to type."""
    if not findings:
        return ["nothing wrong found"]
    lines = []
    for finding in findings:
        lines += _wrapped(f"{finding.level.upper()} {finding.subject}: ", finding.text)
        lines.append(f"    type: {finding.command}")
    return lines


def _wrapped(label: str, text: str, indent: str = "    ") -> list[str]:
    # A command or a path that is longer than a line stays whole, so that it can be copied.
    wrap = partial(textwrap.wrap, width=_WIDTH, break_long_words=False, break_on_hyphens=False)
    return [part for line in (label + text).splitlines() for part in wrap(line, subsequent_indent=indent)]


def _line(label: str, text: str) -> list[str]:
    return _wrapped(f"{label:<{_LABEL}}", text, " " * _LABEL)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _software(job: JobFacts) -> Iterator[str]:
    first = job.first
    path = f" ({first.mpi.path})" if first.mpi.path else ""
    yield from _line("MPI", f"{first.mpi.name}{path}, {first.mpi.thread_level}")
    yield from _line("launcher", launcher_text(first))
    versions = (f"{name} {version}" for name, version in first.software.items() if name != "mpidist")
    core = f"no native core: {first.without_core}" if first.without_core else "native core"
    yield from _line("software", ", ".join([*versions, core]))


def launcher_text(facts: RankFacts) -> str:
    """Return who started the ranks, and whether MPI knows as many."""
    info, size = facts.launcher, facts.mpi.size
    if info is None:
        several = "python -m mpidist launch -n 2 -m mpidist doctor"
        return f"none; to look at several ranks type: {several}" if size == 1 else "unknown"
    says = "says not how many" if info.size is None else f"says {_count(info.size, 'rank')}"
    return f"{info.name}, which {says}; the MPI world has {size}"


# Ranks and machines ---------------------------------------------------------------------------------------------------


def _ranks(job: JobFacts) -> Iterator[str]:
    """Yield a line for each rank, or of many for those that are alike."""
    owned = gpus.labels(job)
    told = {rank: (cores_text(facts.cores), ", ".join(owned[rank]) or "CPU") for rank, facts in job.known.items()}
    said = [(rank, told.get(rank, ("?", "?"))) for rank in range(len(job.ranks))]
    are_many = len(said) > _MOST_LINES
    groups = groups_of(said) if are_many else [(of_rank, [rank]) for rank, of_rank in said]
    shown = groups[: _MOST_GROUPS if are_many else _MOST_LINES]
    rows = [("ranks", "hosts", "cores", "device") if are_many else ("rank", "host", "cores", "device")]
    for of_ranks, ranks in shown:
        hosts = names_text(dict.fromkeys(job.host(rank) or "?" for rank in ranks))
        rows.append((ranks_text(ranks, _RANKS_WIDTH), hosts, *of_ranks))
    widths = [max(len(row[column]) for row in rows) + 2 for column in range(3)]
    for number, row in enumerate(rows):
        line = "".join(f"{cell:<{width}}" for cell, width in zip(row, [*widths, 0], strict=True)).rstrip()
        yield f"{'ranks' if number == 0 else '':<{_LABEL}}{line}"
    left = [rank for _, ranks in groups[len(shown) :] for rank in ranks]
    if left:
        yield f"{'':<{_LABEL}}and {_count(len(left), 'rank')} more, see --json"


def cores_text(cores: CoreFacts) -> str:
    """Return which cores a rank may run on.

    >>> cores_text(CoreFacts((0, 1, 2, 5), 8)), cores_text(CoreFacts((0, 1), 2, 0.5))
    ('0-2,5 of 8', '0-1 of 2, limited to 0.5')
    """
    limit = "" if cores.quota is None else f", limited to {cores.quota:g}"
    return f"{ranks_text(cores.allowed)} of {cores.machine}{limit}"


def _machines(job: JobFacts) -> Iterator[str]:
    """Yield the facts of hosts, one line for hosts that are alike."""
    first = [job.known[ranks[0]] for ranks in job.machines.values()]
    for label, exact, alike in (
        ("/dev/shm", _room, _room_of_many),
        ("GPUs", gpus_text, gpus_text),
        ("network", partial(_network, job), partial(_network_of_many, job)),
    ):
        # Of many hosts that differ in numbers of their own the rest is shown.
        is_short = len({exact(facts) for facts in first}) <= _MOST_HOST_LINES
        groups = groups_of(enumerate(map(exact if is_short else alike, first)))
        for number, (text, hosts) in enumerate(groups[:_MOST_HOST_LINES]):
            names = names_text(first[host].host for host in hosts)
            yield from _line("" if number else label, text if len(first) == 1 else f"{names}: {text}")
        left = [host for _, hosts in groups[_MOST_HOST_LINES:] for host in hosts]
        if left:
            yield from _line("", f"and {_count(len(left), 'host')} more, see --json")


def _room(facts: RankFacts) -> str:
    shared = facts.shared_memory
    return "none" if shared is None else f"{size_text(shared.free)} free of {size_text(shared.total)}"


def _room_of_many(facts: RankFacts) -> str:
    shared = facts.shared_memory
    if shared is None or not shared.free:
        return _room(facts)
    return f"{size_text(1 << (shared.free.bit_length() - 1))} or more free of {size_text(shared.total)}"


def _network(job: JobFacts, facts: RankFacts) -> str:
    return f"{network_text(facts.interfaces)}{_in_use(job, facts)}"


def _network_of_many(job: JobFacts, facts: RankFacts) -> str:
    return f"{network_text([without_address(each) for each in facts.interfaces])}{_in_use(job, facts)}"


def _in_use(job: JobFacts, facts: RankFacts) -> str:
    used = job.in_use.get(facts.host)
    return "" if used is None else f"; between hosts: {', '.join(used)}"


def gpus_text(facts: RankFacts) -> str:
    """Return the GPUs of a rank, and the ways to use them."""
    seen = facts.gpus
    if not seen.has_driver:
        return "none (no NVIDIA driver)" if seen.variable is None else f"none (CUDA_VISIBLE_DEVICES={seen.variable})"
    if seen.problem:
        return "cannot be used"
    names = ", ".join(f"{seen.names.count(name)} x {name}" for name in dict.fromkeys(seen.names))
    by = f", between nodes by {seen.net.name}" if seen.net.name else ""
    return f"{names}; {f'NCCL {seen.nccl}{by}' if seen.nccl else 'no NCCL'}"


def network_text(interfaces: Sequence[Interface]) -> str:
    """Return the network interfaces of a host. Those without an address only where there is no other."""
    named = [interface for interface in interfaces if interface.network or interface.is_infiniband]
    return ", ".join(map(interface_text, named or interfaces)) or "none but this machine's own"


def without_address(interface: Interface) -> Interface:
    """Return the interface with its network in place of the host's own address."""
    if not interface.network:
        return interface
    return replace(interface, network=str(ipaddress.ip_interface(interface.network).network))


def interface_text(interface: Interface) -> str:
    """Return a network interface.

    >>> interface_text(Interface("eth0", "10.0.0.1/24", 10000))
    'eth0 10.0.0.1/24 (10 Gbit/s)'
    """
    speed = interface.mbit_per_second
    fast = "" if speed is None else f" ({speed / 1000:g} Gbit/s)"
    return " ".join(filter(None, (interface.name, interface.network))) + fast


# Together -------------------------------------------------------------------------------------------------------------


def _together(job: JobFacts) -> Iterator[str]:
    if job.reach is not None:
        broken = set(job.reach.failed)
        ring = job.reach.ring
        works = f"ring: {len(set(ring) - broken)} of {len(ring)} hops"
        pairs = f"pairs: {job.reach.tested - len(broken)} of {job.reach.tested}"
        yield from _line("reach", f"{works}; {pairs}")
    inside = [link for link in job.links if not link.between_nodes]
    between = [link for link in job.links if link.between_nodes]
    for number, (label, links) in enumerate((("in a node", inside), ("between nodes", between))):
        if links:
            yield from _line("speed" if number == 0 or not inside else "", f"{label}: {links_text(links)}")
    if job.collectives is not None:
        yield from _collectives(job)


def links_text(links: Sequence[LinkSpeed]) -> str:
    """Return the speed of links, the range of several."""
    latencies = sorted(link.latency_seconds for link in links)
    speeds = sorted(link.bytes_per_second for link in links)
    if len(links) == 1:
        one, other = links[0].ranks
        return f"{time_text(latencies[0])}, {speed_text(speeds[0])} (ranks {one} and {other})"
    slowest = min(links, key=lambda link: link.bytes_per_second)
    latency = f"{time_text(latencies[0])} to {time_text(latencies[-1])}"
    speed = f"{speed_text(speeds[0])} to {speed_text(speeds[-1])}"
    return f"{latency}, {speed}, slowest: {' - '.join(slowest.hosts)} (ranks {slowest.ranks[0]} and {slowest.ranks[1]})"


def speed_text(bytes_per_second: float) -> str:
    """Return a bandwidth.

    >>> speed_text(1.25e8), speed_text(1.234e10)
    ('125 MB/s', '12.3 GB/s')
    """
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.3g} GB/s"
    return f"{bytes_per_second / 1e6:.3g} MB/s"


def _collectives(job: JobFacts) -> Iterator[str]:
    facts = job.collectives
    assert facts is not None
    if len(job.ranks) == 1:
        yield from _line("all-reduce", "one rank has nothing to reduce with")
        return
    counts = [facts.node_of_rank.count(node) for node in range(max(facts.node_of_rank) + 1)]
    each = str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    may = "may" if facts.reads_neighbours else "may not"
    nodes = f"{_count(len(counts), 'node')} x {each}; ranks of a node {may} read each other's memory"
    yield from _line("nodes", nodes)
    yield from _line("all-reduce", f"{facts.table} ({facts.table_origin})")
    if facts.gpu_table:
        takes = "takes" if facts.mpi_takes_gpu_memory else "does not take"
        yield from _line("", f"on GPUs: {facts.gpu_table}; MPI {takes} pointers to GPU memory")
