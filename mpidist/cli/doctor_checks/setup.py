"""Checks of the setup: one world, equal software and settings, and the tuning file."""

from __future__ import annotations

from difflib import get_close_matches

from mpidist.cli.doctor_checks import commands
from mpidist.cli.doctor_checks.finding import ERROR, WARNING, Finding
from mpidist.cli.doctor_facts.facts import JobFacts, MpiFacts
from mpidist.cluster_resolver.cluster_spec import deal_tasks
from mpidist.collectives.node import native
from mpidist.core.settings import JOBS, NATIVE, SETTINGS, TUNING_FILE
from mpidist.core.text import names_text, numbered_ranks
from mpidist.topology.launchers import LauncherInfo

_NEEDED_LEVEL = "MPI_THREAD_MULTIPLE"


def is_torn(launcher: LauncherInfo | None, mpi: MpiFacts) -> bool:
    """Return whether the launcher started more ranks than this process's MPI world has."""
    return launcher is not None and (mpi.size <= launcher.rank or mpi.size < (launcher.size or 0))


def torn(launcher: LauncherInfo, mpi: MpiFacts, command: str) -> Finding:
    """Return the finding on a world that has only a part of the ranks.

    Args:
        launcher: The facts of the launcher.
        mpi: The facts of MPI.
        command: The command that makes one world of the ranks.
    """
    started = "several" if launcher.size is None else str(launcher.size)
    worlds = f"{started} worlds of one rank" if mpi.size == 1 else f"worlds of {mpi.size}"
    text = (
        f"{launcher.name} started {started} ranks, and MPI made {worlds} of them: each would train alone. "
        f"{launcher.name} and {mpi.name} did not understand each other."
    )
    return Finding(ERROR, "world", text, command)


def check_world(job: JobFacts) -> list[Finding]:
    """Check the level of thread support."""
    level = job.first.mpi.thread_level
    if level == _NEEDED_LEVEL:
        return []
    text = (
        f"{job.first.mpi.name} gives {level}; mpidist needs {_NEEDED_LEVEL} to move collectives on in the background "
        "while the program computes."
    )
    if job.first.mpi.vendor == "Cray MPICH":
        return [Finding(WARNING, "threads", text, "export MPICH_MAX_THREAD_SAFETY=multiple")]
    if job.first.mpi.vendor == "Intel MPI":
        return [Finding(WARNING, "threads", text, "export I_MPI_THREAD_SPLIT=0 I_MPI_THREAD_MAX=2")]
    return [Finding(WARNING, "threads", text, "module avail mpi   # and load one that is built with thread support")]


def check_barriers(job: JobFacts) -> list[Finding]:
    """Check that the launcher's barriers, which MPI starts by, hold the ranks of all nodes."""
    if len(job.machines) == 1 or not job.first.loose_barriers:
        return []
    text = (
        "Slurm's PMIx lets ranks out of MPI_Init before those of other nodes are through; one that gets a message "
        "meanwhile now and then ends with a segmentation fault."
    )
    return [Finding(WARNING, "start", text, "export SLURM_PMIX_FENCE=ring   # before srun")]


def check_software(job: JobFacts) -> list[Finding]:
    """Check that versions are equal; pickles and the order of messages depend on them."""
    findings = []
    for name, version in job.first.software.items():
        others: dict[str, list[str]] = {}
        for facts in job.known.values():
            if facts.software[name] != version:
                others.setdefault(facts.software[name], []).append(facts.host)
        for other, hosts in others.items():
            text = f"{name} is {version} on {job.first.host} and {other} on {names_text(dict.fromkeys(hosts))}."
            findings.append(Finding(ERROR, "software", text, _installing(name, version, hosts[0])))
    findings += _libraries(job)
    return findings


def _installing(name: str, version: str, host: str) -> str:
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


def check_native_core(job: JobFacts) -> list[Finding]:
    """Check that every rank has the native core; where one lacks it none takes it."""
    between_nodes = len(job.machines) > 1
    reasons = {
        rank: facts.without_core or facts.without_core_between_nodes * between_nodes
        for rank, facts in job.known.items()
    }
    without = {rank: job.known[rank] for rank, reason in reasons.items() if reason}
    if not without:
        return []
    rank, first = next(iter(without.items()))
    hosts = names_text(dict.fromkeys(facts.host for facts in without.values()))
    effect = "The ranks of a node exchange messages in place of sharing memory."
    text = f"{numbered_ranks(without)} on {hosts} without the native core: {reasons[rank]}. {effect}"
    if NATIVE.name in first.settings:
        return [Finding(WARNING, "native core", text, f"unset {NATIVE.name}")]
    reinstall = "python -m pip install --force-reinstall --no-binary=mpi4py mpi4py"
    command = native.build_command() if first.without_core else reinstall
    return [Finding(WARNING, "native core", text, f"{command}   # on {first.host}; docs/install.md")]


def check_settings(job: JobFacts) -> list[Finding]:
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
        text = f"{' and '.join(differing)} on rank 0 and on {numbered_ranks(others)} differ; they are to be equal."
        findings.append(Finding(ERROR, "settings", text, commands.with_settings(job.first, differing)))
    return findings


def _unknown(name: str) -> Finding:
    close = get_close_matches(name, SETTINGS, n=1)
    meant = f"; {close[0]} does" if close else ""
    command = f'export {close[0]}="${name}"; unset {name}' if close else f"unset {name}"
    return Finding(WARNING, "settings", f"{name} means nothing to mpidist{meant}.", command)


def _roles(job: JobFacts) -> list[Finding]:
    """Deal the tasks of ``MPIDIST_JOBS`` out. A process without a launcher may be none of the job that it is for."""
    text, first = job.first.settings.get(JOBS.name), job.first
    if not text or JOBS.name in first.wrong_settings:
        return []
    jobs = JOBS.parse(text)
    assert jobs is not None
    size = sum(jobs.values()) if first.launcher is None and first.mpi.size == 1 else len(job.ranks)
    try:
        deal_tasks(jobs, size, JOBS.name)
    except ValueError as error:
        return [Finding(ERROR, "settings", f"{error}.", f"unset {JOBS.name}")]
    return []


def _differing(job: JobFacts) -> list[str]:
    """Return the variables that differ among ranks; one counts on rank 0 alone."""
    names = {name for facts in job.known.values() for name in facts.settings} - {TUNING_FILE.name}
    first = job.first.settings
    return sorted(
        name for name in names if any(facts.settings.get(name) != first.get(name) for facts in job.known.values())
    )


def check_table(job: JobFacts) -> list[Finding]:
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
