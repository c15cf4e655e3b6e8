"""The checks of ``python -m mpidist doctor``: one file per subject, each a function from facts to findings.

They ask nothing of MPI or the machine: what they need to know stands in ``mpidist.cli.doctor_facts.facts``.
"""

from mpidist.cli.doctor_checks import (
    cores,
    gpus,
    links,
    network,
    reach,
    settings,
    shared_memory,
    software,
    table,
    world,
)
from mpidist.cli.doctor_checks.finding import Finding
from mpidist.cli.doctor_facts.facts import JobFacts

CHECKS = (world, reach, settings, software, cores, shared_memory, gpus, network, links, table)


def findings(job: JobFacts) -> list[Finding]:
    """Return what all checks find, the errors first."""
    found = [finding for subject in CHECKS for finding in subject.check(job)]
    return sorted(found, key=lambda finding: finding.level != "error")
