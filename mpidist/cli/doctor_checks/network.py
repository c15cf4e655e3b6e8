"""Checks of the network: ranks that do not reach one another, and slow links."""

from __future__ import annotations

import ipaddress
from itertools import groupby
from statistics import median

from mpidist.cli.doctor_checks import commands
from mpidist.cli.doctor_checks.finding import ERROR, WARNING, Finding
from mpidist.cli.doctor_facts.facts import Interface, JobFacts, Reach
from mpidist.core.text import names_text, numbered_ranks
from mpidist.topology.launchers import BATCH_SYSTEMS

_MOST_FINDINGS = 8
Pair = tuple[int, int]
_LEAST_LINKS = 3
_MUCH_SLOWER = 0.5


def check_reach(job: JobFacts) -> list[Finding]:
    """Check that every pair exchanged a message. Pairs of the same two hosts are one finding."""
    reach = job.reach
    if reach is None or not reach.failed:
        return []
    lonely = [rank for rank in reach.silent if rank not in reach.hosts]
    findings = [_of_lonely(job, reach, lonely)] if lonely else []
    pairs = [pair for pair in reach.failed if not set(pair) & set(lonely)]

    def hosts(pair: Pair) -> tuple[str, str]:
        return str(job.host(pair[0])), str(job.host(pair[1]))

    for _, group in groupby(sorted(pairs, key=lambda pair: (hosts(pair), pair)), hosts):
        findings.append(_of_hosts(job, reach, list(group)))
    rest = len(findings) - _MOST_FINDINGS
    if rest <= 0:
        return findings
    text = f"{rest} more pairs of hosts exchanged no message."
    command = "ssh HOST python -m mpidist doctor   # host by host; --json lists all pairs"
    return [*findings[:_MOST_FINDINGS], Finding(ERROR, "reach", text, command)]


def _of_lonely(job: JobFacts, reach: Reach, lonely: list[int]) -> Finding:
    rank = lonely[0]
    text = (
        f"No rank heard from {numbered_ranks(lonely)}{_on(job, rank)} within {reach.seconds:g} s; rank 0 is on "
        f"{job.first.host}."
    )
    return Finding(ERROR, "reach", text, _reaching(job, 0, rank))


def _of_hosts(job: JobFacts, reach: Reach, pairs: list[Pair]) -> Finding:
    (one, other), more = pairs[0], len(pairs) - 1
    also = f" and {more} more pair{'s' if more > 1 else ''} of these hosts" if more else ""
    text = (
        f"Rank {one}{_on(job, one)} and rank {other}{_on(job, other)}{also} exchanged no message within "
        f"{reach.seconds:g} s."
    )
    return Finding(ERROR, "reach", text, _reaching(job, one, other))


def _on(job: JobFacts, rank: int) -> str:
    host = job.host(rank)
    return "" if host is None else f" on {host}"


def _reaching(job: JobFacts, one: int, other: int) -> str:
    first, second = job.ranks[one], job.ranks[other]
    here, there = job.host(one), job.host(other)
    if here is None or there is None:
        return f"{commands.show_hosts(job, len(job.ranks))}   # tells the host of rank {other}; then ping it"
    if first is None or second is None:
        return _ping(there, here)
    networks = common_networks(first.interfaces, second.interfaces)
    if not networks:
        return f"{_ping(there, here)}; they show no IP network in common"
    network, address = networks[0]
    if sum(bool(interface.network) for interface in (*first.interfaces, *second.interfaces)) == 2:
        return _ping(address, here)
    name = next(interface.name for interface in first.interfaces if _is_in(interface, network))
    return (
        f"{_choice(first.mpi.vendor, network, name)}   # the network they share; does it carry? {_ping(address, here)}"
    )


def _ping(target: str, host: str) -> str:
    return f"ping -c 3 {target}   # on {host}; where it answers, let firewalls pass all TCP ports between the hosts"


def common_networks(first: tuple[Interface, ...], second: tuple[Interface, ...]) -> list[tuple[str, str]]:
    """Return the IP networks that two hosts share, each with the second one's address.

    Networks in which both have the same address are not shared: every host has one of its own, such as docker0.
    """
    found = []
    for here in first:
        for there in second:
            if here.network and there.network and here.network != there.network:
                network = ipaddress.ip_interface(here.network).network
                if network == ipaddress.ip_interface(there.network).network:
                    found.append((str(network), there.network.partition("/")[0]))
    return found


def _is_in(interface: Interface, network: str) -> bool:
    return bool(interface.network) and str(ipaddress.ip_interface(interface.network).network) == network


def _choice(vendor: str, network: str, name: str) -> str:
    if vendor == "Open MPI":
        return f"export OMPI_MCA_btl_tcp_if_include={network} PRTE_MCA_prte_if_include={network}"
    if vendor == "Intel MPI":
        return f"export FI_TCP_IFACE={name} I_MPI_HYDRA_IFACE={name}"
    return f"export UCX_NET_DEVICES={name} FI_TCP_IFACE={name} HYDRA_IFACE={name}"


def check_network(job: JobFacts) -> list[Finding]:
    """Check that InfiniBand is used where it is active."""
    for host, names in job.in_use.items():
        facts = next(facts for facts in job.known.values() if facts.host == host)
        fast = [interface.name for interface in facts.interfaces if interface.is_infiniband]
        if fast and not set(fast) & set(names):
            text = (
                f"Messages between nodes take {names_text(names)} although InfiniBand ({names_text(fast)}) is active "
                f"on {host}: {facts.mpi.name} does not use it."
            )
            return [Finding(WARNING, "network", text, _taking_infiniband(facts.mpi.vendor, fast[0]))]
    return []


def _taking_infiniband(vendor: str, device: str) -> str:
    if vendor == "Open MPI":
        return f"export OMPI_MCA_pml=ucx UCX_NET_DEVICES={device}:1   # or load the cluster's own MPI: module avail mpi"
    if vendor == "Intel MPI":
        return "export I_MPI_FABRICS=shm:ofi FI_PROVIDER=mlx"
    return f"export UCX_NET_DEVICES={device}:1   # or load the cluster's own MPI: module avail mpi"


def check_links(job: JobFacts) -> list[Finding]:
    """Check bandwidth between nodes against the median. Every collective goes at the pace of the slowest."""
    between = [link for link in job.links if link.between_nodes]
    if len(between) < _LEAST_LINKS:
        return []
    usual = median(link.bytes_per_second for link in between)
    slowest = min(between, key=lambda link: link.bytes_per_second)
    if slowest.bytes_per_second >= _MUCH_SLOWER * usual:
        return []
    one, other = slowest.hosts
    text = (
        f"The link between {one} and {other} carries {slowest.bytes_per_second / 1e6:.0f} MB/s, others "
        f"{usual / 1e6:.0f} MB/s: every collective over all nodes goes at its pace."
    )
    return [Finding(WARNING, "links", text, _without(job, one, other))]


def _without(job: JobFacts, one: str, other: str) -> str:
    """Return the commands that examine the link, and that run without one host.

    The latter where the batch system can leave a host out.
    """
    here, there = _look(job, one), _look(job, other)
    looks = f"{here}   # on {one} and on {other}" if here == there else f"{here}   # on {one}; on {other}: {there}"
    system = next((system for system in BATCH_SYSTEMS if system.name == job.first.batch_system), None)
    without = "" if system is None else system.without.format(host=other)
    return f"{looks}; or run without one of them: {without}" if without else looks


def _look(job: JobFacts, host: str) -> str:
    """Return the command that shows the interfaces of a host that messages took. All of them where that is unknown."""
    facts = next(facts for facts in job.known.values() if facts.host == host)
    infiniband = {interface.name for interface in facts.interfaces if interface.is_infiniband}
    used = job.in_use.get(host, ())
    shown = [f"ibstat {name}" if name in infiniband else f"ethtool {name}; ip -s link show {name}" for name in used]
    return "; ".join(shown) or "ip -s link"
