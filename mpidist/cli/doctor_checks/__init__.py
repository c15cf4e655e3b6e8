"""The checks of ``python -m mpidist doctor``: functions from facts to findings.

Each file has checks that belong together. They ask nothing of MPI or the machine: all they need is in
    ``mpidist.cli.doctor_facts.facts``.
"""

from mpidist.cli.doctor_checks import gpus, hosts, network, setup
from mpidist.cli.doctor_checks.finding import Finding
from mpidist.cli.doctor_facts.facts import JobFacts

CHECKS = (
    setup.check_world,
    setup.check_barriers,
    network.check_reach,
    setup.check_settings,
    setup.check_software,
    setup.check_native_core,
    hosts.check_cores,
    hosts.check_shared_memory,
    gpus.check_gpus,
    network.check_network,
    network.check_links,
    setup.check_table,
)


def findings(job: JobFacts) -> list[Finding]:
    """Return the findings of all checks, the errors first."""
    found = [finding for check in CHECKS for finding in check(job)]
    return sorted(found, key=lambda finding: finding.level != "error")
