"""Commands that start ranks as one world, by the table of launch environments."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mpidist.topology.environments import LAUNCHERS, Environ, Launcher, in_shell


def command_for(launcher: str, vendor: str, environ: Environ | None = None) -> str | None:
    """Return the command that starts ranks of an MPI library as one world. ``-n`` follows.

    Args:
        launcher: The name of a row of ``LAUNCHERS``, as in ``LauncherInfo.name``.
        vendor: The MPI library, as ``mpidist.topology.mpi_library.vendor_of`` names it.
        environ: The environment to read; ``os.environ`` by default.

    Returns:
        None where this launcher does not start that library (use the library's own mpirun), or where the job was
        started in just this way already, so that the command cannot have been missing.

    >>> command_for("srun", "Open MPI", {})
    'srun --mpi=pmix'
    """
    row = LAUNCHERS[launcher]
    command = row.starts.get(vendor)
    environ = os.environ if environ is None else environ
    taken = environ.get(row.kind) if row.kind else None
    if command is None or (taken and command.endswith("=" + taken.partition("_v")[0])):
        return None
    return f"{command} {row.from_shell}" if in_shell(launcher, environ) else command


def mpirun_of(vendor: str) -> Launcher | None:
    """Return the row of the mpirun that belongs to an MPI library, or None.

    >>> mpirun_of("Open MPI").command
    'mpirun'
    """
    return next((row for row in LAUNCHERS.values() if row.library == vendor), None)


def own_machine(vendor: str, version: tuple[int, ...]) -> Mapping[str, str]:
    """Return the variables with which mpirun fits a machine of one's own; see ``Launcher``.

    >>> own_machine("Intel MPI", (2021, 18)), own_machine("MPICH", (5, 0))
    ({'I_MPI_PIN': 'off'}, {})
    """
    row = mpirun_of(vendor)
    major = version[0] if version else 0
    known = {} if row is None else {first: names for first, names in row.own_machine.items() if first <= major}
    return known[max(known)] if known else {}
