"""Commands that start the job in another way, by the table of launchers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpidist.cli.doctor_facts.facts import JobFacts, RankFacts
from mpidist.topology.launchers import LAUNCHERS, Launcher

_PROGRAM = "python train.py"
_VARIABLE = "{variable}"
_WITHOUT = LAUNCHERS["Open MPI mpirun"]


def start(
    job: JobFacts,
    ranks: int,
    *,
    unbound: bool = False,
    settings: Mapping[str, str] | None = None,
    options: str = "",
    program: str = _PROGRAM,
) -> str:
    """Return the command that starts so many ranks by the launcher of this job.

    Args:
        job: The job as it is.
        ranks: How many.
        unbound: Whether they may run on any core.
        settings: Environment variables that all ranks get.
        options: More of them, for the launcher.
        program: The program of each rank.
    """
    row, hosts = _row(job.first), len(job.machines)
    places = (row.unbound if unbound else "-n {ranks}").format(ranks=ranks, hosts=hosts, each=-(-ranks // hosts))
    given = [f"{name}={value}" for name, value in (settings or {}).items()]
    words = [_command(row, job.first), options, places]
    if _VARIABLE in row.passes:
        words += _passed(row, given)
    else:
        words = [*given, *words]
    return " ".join(filter(None, [*words, program]))


def start_unbound(job: JobFacts, ranks: int, threads: int) -> str:
    """Return the command that starts ``ranks`` ranks, which may run on any core.

    Each has ``threads`` threads of BLAS. On a machine of one's own ``launch`` knows the options that mpirun needs
    there, such as root's permission.
    """
    row, first = _row(job.first), job.first
    if row.library and first.batch_system is None and len(job.machines) == 1:
        return f"OMP_NUM_THREADS={threads} python -m mpidist launch -n {ranks} train.py"
    return start(job, ranks, unbound=True, settings={"OMP_NUM_THREADS": str(threads)})


def with_all_gpus(job: JobFacts, gpus: int) -> str | None:
    """Return the command whose ranks each see so many GPUs, or None. None where the launcher hides no GPUs."""
    options = _row(job.first).all_gpus.format(gpus=gpus)
    return start(job, len(job.ranks), options=options) if options else None


def near_gpus(job: JobFacts) -> str:
    """Return the command whose ranks run on cores next to their GPUs.

    On any cores where the launcher has no option for it.
    """
    options, ranks = _row(job.first).near_gpus, len(job.ranks)
    return start(job, ranks, options=options) if options else start(job, ranks, unbound=True)


def with_settings(facts: RankFacts, names: Sequence[str]) -> str:
    """Return the command that gives all ranks the variables of the shell."""
    row = _row(facts)
    export = "" if _VARIABLE in row.passes else f"export {' '.join(names)};"
    return " ".join(filter(None, [export, _command(row, facts), *_passed(row, names), _PROGRAM]))


def show_hosts(job: JobFacts, ranks: int) -> str:
    """Return the command that prints the host of every rank."""
    return start(job, ranks, program=f"sh -c 'echo ${_row(job.first).rank} $(hostname)'")


def _row(facts: RankFacts) -> Launcher:
    return _WITHOUT if facts.launcher is None else LAUNCHERS[facts.launcher.name]


def _command(row: Launcher, facts: RankFacts) -> str:
    return row.starts.get(facts.mpi.vendor, row.command)


def _passed(row: Launcher, variables: Sequence[str]) -> list[str]:
    """Return the options with which the ranks get variables, NAME or NAME=VALUE each."""
    if _VARIABLE in row.passes:
        return [row.passes.format(variable=variable) for variable in variables]
    return [row.passes]
