"""Whether the ``MPIDIST_*`` variables mean something, and the same on all ranks."""

from __future__ import annotations

from difflib import get_close_matches

from mpidist.cli.doctor_checks import commands
from mpidist.cli.doctor_checks.finding import ERROR, WARNING, Finding, ranks_text
from mpidist.cli.doctor_facts.facts import JobFacts
from mpidist.cluster_resolver.roles import deal_tasks
from mpidist.core.settings import JOBS, SETTINGS, TUNING_FILE


def check(job: JobFacts) -> list[Finding]:
    """Check names, values, and that the ranks agree."""
    findings = []
    wrong = {name: text for facts in job.known.values() for name, text in facts.wrong_settings.items()}
    for name, text in sorted(wrong.items()):
        findings.append(Finding(ERROR, "settings", text, f"unset {name}"))
    unknown = {name for facts in job.known.values() for name in facts.unknown_settings}
    findings += [_unknown(name) for name in sorted(unknown)]
    findings += _roles(job)
    differing = _differing(job)
    if differing:
        others = [rank for rank, facts in job.known.items() if facts.settings != job.first.settings]
        text = f"{' and '.join(differing)} on rank 0 and on {ranks_text(others)} differ; they are to be equal."
        findings.append(Finding(ERROR, "settings", text, commands.with_settings(job.first, differing)))
    return findings


def _unknown(name: str) -> Finding:
    close = get_close_matches(name, SETTINGS, n=1)
    meant = f"; {close[0]} does" if close else ""
    command = f'export {close[0]}="${name}"; unset {name}' if close else f"unset {name}"
    return Finding(WARNING, "settings", f"{name} means nothing to mpidist{meant}.", command)


def _roles(job: JobFacts) -> list[Finding]:
    """Deal the tasks of ``MPIDIST_JOBS`` out; a process without a launcher may be none of the job that it is for."""
    text, first = job.first.settings.get(JOBS.name), job.first
    if not text or JOBS.name in first.wrong_settings:
        return []
    jobs: dict[str, int] = JOBS.parse(text)
    size = sum(jobs.values()) if first.launcher is None and first.mpi.size == 1 else len(job.ranks)
    try:
        deal_tasks(jobs, size, JOBS.name)
    except ValueError as error:
        return [Finding(ERROR, "settings", f"{error}.", f"unset {JOBS.name}")]
    return []


def _differing(job: JobFacts) -> list[str]:
    """Return the names of variables that are not the same on all ranks; that of rank 0 alone counts for one of them."""
    names = {name for facts in job.known.values() for name in facts.settings} - {TUNING_FILE.name}
    first = job.first.settings
    return sorted(
        name for name in names if any(facts.settings.get(name) != first.get(name) for facts in job.known.values())
    )
