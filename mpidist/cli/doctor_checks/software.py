"""Whether all ranks run the same software."""

from __future__ import annotations

from mpidist.cli.doctor_checks.finding import ERROR, Finding, names_text
from mpidist.cli.doctor_facts.facts import JobFacts


def check(job: JobFacts) -> list[Finding]:
    """Check that versions are equal; pickles and the order of messages depend on them."""
    findings = []
    for name, version in job.first.software.items():
        others: dict[str, list[str]] = {}
        for facts in job.known.values():
            if facts.software[name] != version:
                others.setdefault(facts.software[name], []).append(facts.host)
        for other, hosts in others.items():
            text = f"{name} is {version} on {job.first.host} and {other} on {names_text(dict.fromkeys(hosts))}."
            findings.append(Finding(ERROR, "software", text, _command(name, version, hosts[0])))
    findings += _libraries(job)
    return findings


def _command(name: str, version: str, host: str) -> str:
    package = name.lower()
    if package == "python":
        return f"/path/to/bin/python train.py   # the whole path, the same for all ranks; look: ssh {host} which python"
    return f"python -m pip install '{package}=={version}'   # on {host}"


def _libraries(job: JobFacts) -> list[Finding]:
    first = job.first.mpi
    for facts in job.known.values():
        if facts.mpi.name != first.name:
            text = f"mpi4py loaded {first.name} on {job.first.host} and {facts.mpi.name} on {facts.host}."
            path = first.path or "/path/to/libmpi.so"
            return [Finding(ERROR, "software", text, f"export MPI4PY_LIBMPI={path}   # for all ranks")]
    return []
