"""The checks of ``python -m mpidist doctor``: functions from facts to findings.

Each file has checks that belong together. They ask nothing of MPI or the machine: all they need is in
    ``mpidist.cli.doctor_facts.facts``.
"""

from mpidist.cli.doctor_checks.finding import Finding
from mpidist.cli.doctor_checks.gpus import check_gpus
from mpidist.cli.doctor_checks.hosts import check_cores, check_shared_memory
from mpidist.cli.doctor_checks.network import check_links, check_network, check_reach
from mpidist.cli.doctor_checks.setup import check_native_core, check_settings, check_software, check_table, check_world
from mpidist.cli.doctor_facts.facts import JobFacts

CHECKS = (
    check_world,
    check_reach,
    check_settings,
    check_software,
    check_native_core,
    check_cores,
    check_shared_memory,
    check_gpus,
    check_network,
    check_links,
    check_table,
)


def findings(job: JobFacts) -> list[Finding]:
    """Return the findings of all checks, the errors first."""
    found = [finding for check in CHECKS for finding in check(job)]
    return sorted(found, key=lambda finding: finding.level != "error")
