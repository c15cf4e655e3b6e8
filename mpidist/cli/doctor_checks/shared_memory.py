"""Whether /dev/shm has room for what the ranks of a node share."""

from __future__ import annotations

from mpidist.cli.doctor_checks.finding import WARNING, Finding, names_text
from mpidist.cli.doctor_facts.facts import JobFacts
from mpidist.collectives.reduce.table import size_text

ENOUGH_BYTES = 256 << 20
"""For input and result of a large bucket of gradients, and what MPI and NCCL take."""
_SUGGESTED = "8g"


def check(job: JobFacts) -> list[Finding]:
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
