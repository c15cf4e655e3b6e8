"""Whether one link between nodes is much slower than the others."""

from __future__ import annotations

from statistics import median

from mpidist.cli.doctor_checks.finding import WARNING, Finding
from mpidist.cli.doctor_facts.facts import JobFacts
from mpidist.topology.environments import BATCH_SYSTEMS

_LEAST_LINKS = 3
_MUCH_SLOWER = 0.5


def check(job: JobFacts) -> list[Finding]:
    """Check bandwidth between nodes against the median; every collective goes at the pace of the slowest."""
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
    """Return how to look at the link, and how to run without a host where the batch system can leave one out."""
    here, there = _look(job, one), _look(job, other)
    looks = f"{here}   # on {one} and on {other}" if here == there else f"{here}   # on {one}; on {other}: {there}"
    system = next((system for system in BATCH_SYSTEMS if system.name == job.first.batch_system), None)
    without = "" if system is None else system.without.format(host=other)
    return f"{looks}; or run without one of them: {without}" if without else looks


def _look(job: JobFacts, host: str) -> str:
    """Return the command that shows the interfaces of a host that messages took, all of them where that is unknown."""
    facts = next(facts for facts in job.known.values() if facts.host == host)
    infiniband = {interface.name for interface in facts.interfaces if interface.is_infiniband}
    used = job.in_use.get(host, ())
    shown = [f"ibstat {name}" if name in infiniband else f"ethtool {name}; ip -s link show {name}" for name in used]
    return "; ".join(shown) or "ip -s link"
