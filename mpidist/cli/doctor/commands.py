"""Commands that start the job in another way, from the table of launchers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpidist.cli.doctor.facts import JobFacts, RankFacts
from mpidist.topology.launchers import LAUNCHERS, Launcher

_PROGRAM = "python train.py"
_VARIABLE = "{variable}"


def start(
    job: JobFacts,
    ranks: int,
    *,
    unbound: bool = False,
    settings: Mapping[str, str] | None = None,
    options: str = "",
    program: str = _PROGRAM,
) -> str:
    """Return this launcher's command for ``ranks`` ranks, if ``unbound`` on any cores."""
    row, hosts = _row(job.first), len(job.machines)
    count = (row.unbound if unbound else "-n {ranks}").format(ranks=ranks, hosts=hosts, each=-(-ranks // hosts))
    assigned = [f"{name}={value}" for name, value in (settings or {}).items()]
    words = [_command(job.first), options, count]
    words = [*words, *_passed(row, assigned)] if _VARIABLE in row.passes else [*assigned, *words]
    return " ".join(filter(None, [*words, program]))


def start_unbound(job: JobFacts, ranks: int, threads: int) -> str:
    """Return the command that starts ranks on any cores, with ``threads`` threads of BLAS each."""
    first = job.first
    # `launch` knows the options that mpirun needs on a personal machine, such as root's permission.
    if _row(first).library and first.batch_system is None and len(job.machines) == 1:
        return f"OMP_NUM_THREADS={threads} python -m mpidist launch -n {ranks} train.py"
    return start(job, ranks, unbound=True, settings={"OMP_NUM_THREADS": str(threads)})


def with_all_gpus(job: JobFacts, gpus: int) -> str | None:
    """Return the command that shows each rank ``gpus`` GPUs. None if the launcher hides no GPUs."""
    options = _row(job.first).all_gpus.format(gpus=gpus)
    return start(job, len(job.ranks), options=options) if options else None


def near_gpus(job: JobFacts) -> str:
    """Return the command that runs ranks near their GPUs, or else on any cores."""
    options = _row(job.first).near_gpus
    return start(job, len(job.ranks), options=options, unbound=not options)


def with_settings(facts: RankFacts, names: Sequence[str]) -> str:
    """Return the command that passes variables of the shell to all ranks."""
    row = _row(facts)
    export = "" if _VARIABLE in row.passes else f"export {' '.join(names)};"
    return " ".join(filter(None, [export, _command(facts), *_passed(row, names), _PROGRAM]))


def show_hosts(job: JobFacts) -> str:
    """Return the command that prints the host of every rank."""
    return start(job, len(job.ranks), program=f"sh -c 'echo ${_row(job.first).rank} $(hostname)'")


def _row(facts: RankFacts) -> Launcher:
    return LAUNCHERS["Open MPI mpirun" if facts.launcher is None else facts.launcher.name]


def _command(facts: RankFacts) -> str:
    row = _row(facts)
    return row.starts.get(facts.mpi.vendor, row.command)


def _passed(row: Launcher, variables: Sequence[str]) -> list[str]:
    """Return the options that pass variables, NAME or NAME=VALUE each."""
    if _VARIABLE in row.passes:
        return [row.passes.format(variable=variable) for variable in variables]
    return [row.passes]
