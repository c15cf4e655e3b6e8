"""Whether the tuning file is one that can be used for these ranks."""

from __future__ import annotations

from mpidist.cli.doctor_checks import commands
from mpidist.cli.doctor_checks.finding import ERROR, WARNING, Finding
from mpidist.cli.doctor_facts.facts import JobFacts
from mpidist.core.settings import TUNING_FILE


def check(job: JobFacts) -> list[Finding]:
    """Check that the file can be read, and that it was measured on such ranks."""
    collectives = job.collectives
    # One rank takes no table.
    if collectives is None or not collectives.table_error or len(job.ranks) == 1:
        return []
    if collectives.table_origin == "the shipped table":
        program = f'python -m mpidist tune --out "${TUNING_FILE.name}"'
        command = commands.start(job, len(job.ranks), program=program)
        text = f"{TUNING_FILE.name}: {collectives.table_error}; the shipped one is taken."
        return [Finding(WARNING, "table", text, command)]
    return [Finding(ERROR, "table", f"{TUNING_FILE.name}: {collectives.table_error}", f"unset {TUNING_FILE.name}")]
