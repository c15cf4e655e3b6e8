"""Whether messages between nodes take the fastest network."""

from __future__ import annotations

from mpidist.cli.doctor_checks.finding import WARNING, Finding, names_text
from mpidist.cli.doctor_facts.facts import JobFacts


def check(job: JobFacts) -> list[Finding]:
    """Check that InfiniBand is used where it is active."""
    for host, names in job.in_use.items():
        facts = next(facts for facts in job.known.values() if facts.host == host)
        fast = [interface.name for interface in facts.interfaces if interface.is_infiniband]
        if fast and not set(fast) & set(names):
            text = (
                f"Messages between nodes take {names_text(names)} although InfiniBand ({names_text(fast)}) is active "
                f"on {host}: {facts.mpi.name} does not use it."
            )
            return [Finding(WARNING, "network", text, _command(facts.mpi.vendor, fast[0]))]
    return []


def _command(vendor: str, device: str) -> str:
    if vendor == "Open MPI":
        return f"export OMPI_MCA_pml=ucx UCX_NET_DEVICES={device}:1   # or load the cluster's own MPI: module avail mpi"
    if vendor == "Intel MPI":
        return "export I_MPI_FABRICS=shm:ofi FI_PROVIDER=mlx"
    return f"export UCX_NET_DEVICES={device}:1   # or load the cluster's own MPI: module avail mpi"
