"""Whether MPI knows as many ranks as the launcher started, and lets several threads call it."""

from __future__ import annotations

from mpidist.cli.doctor_checks.finding import ERROR, WARNING, Finding
from mpidist.cli.doctor_facts.facts import JobFacts, MpiFacts
from mpidist.topology.environments import LauncherInfo

_NEEDED = "MPI_THREAD_MULTIPLE"


def is_torn(launcher: LauncherInfo | None, mpi: MpiFacts) -> bool:
    """Whether the launcher started more ranks than the MPI world of this process has."""
    return launcher is not None and (mpi.size <= launcher.rank or mpi.size < (launcher.size or 0))


def torn(launcher: LauncherInfo, mpi: MpiFacts, command: str) -> Finding:
    """Return the finding on a world that is torn.

    Args:
        launcher: What the launcher says.
        mpi: What MPI says.
        command: What makes one world of the ranks.
    """
    started = "several" if launcher.size is None else str(launcher.size)
    worlds = f"{started} worlds of one rank" if mpi.size == 1 else f"worlds of {mpi.size}"
    text = (
        f"{launcher.name} started {started} ranks, and MPI made {worlds} of them: each would train alone. "
        f"{launcher.name} and {mpi.name} did not understand each other."
    )
    return Finding(ERROR, "world", text, command)


def check(job: JobFacts) -> list[Finding]:
    """Check the level of thread support."""
    level = job.first.mpi.thread_level
    if level == _NEEDED:
        return []
    text = (
        f"{job.first.mpi.name} gives {level}; mpidist needs {_NEEDED} to move collectives on in the background "
        "while the program computes."
    )
    if job.first.mpi.vendor == "Cray MPICH":
        return [Finding(WARNING, "threads", text, "export MPICH_MAX_THREAD_SAFETY=multiple")]
    if job.first.mpi.vendor == "Intel MPI":
        return [Finding(WARNING, "threads", text, "export I_MPI_THREAD_SPLIT=0 I_MPI_THREAD_MAX=2")]
    return [Finding(WARNING, "threads", text, "module avail mpi   # and load one that is built with thread support")]
