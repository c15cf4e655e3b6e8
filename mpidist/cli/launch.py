"""``python -m mpidist launch -n 4 train.py``: starts a program by mpi4py's own mpirun.

That is the mpirun of the MPI library that mpi4py uses.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mpidist.cli.doctor_facts.machine import THREAD_SETTINGS
from mpidist.core.errors import LaunchError
from mpidist.topology import launchers
from mpidist.topology.mpi_library import INTEL_MPI, MpiLibrary, find_library, find_mpirun, mpi_install

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
_PYTHON = re.compile(r"python[\d.]*")
_COUNTS = ("-n", "-np", "--n", "--np", "-c")
_GLUED_COUNT = re.compile(r"(-n|-np|-c)(\d+)|(-n|-np|--n|--np|-c)=(.*)")
# Without the dashes, which Open MPI takes one or two of; the others are of MPICH and Intel MPI.
_ONE_VALUE = frozenset(
    shlex.split(
        "n np c N x H host hostfile machinefile default-hostfile wd wdir prefix path app output output-filename "
        "output-directory map-by rank-by bind-to rankfile rf cpu-set cpu-list pe-list npernode npersocket ppn "
        "personality timeout stdin preload-files tune am report-uri ompi-server dvm dvm-uri launch-agent max-restarts "
        "f hosts genvlist envlist configfile outfile-pattern errfile-pattern prepend-pattern perhost grr launcher "
        "launcher-exec bootstrap bootstrap-exec rmk iface membind usize"
    )
)
_TWO_VALUES = frozenset(("mca", "gmca", "prtemca", "gprtemca", "pmixmca", "gpmixmca", "omca", "gomca"))
_VARIABLE = frozenset(("env", "genv"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take all arguments as they are."""
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
        variables, command = command_for_ranks(*split_program(given))
    except (LaunchError, ValueError) as error:
        print(f"python -m mpidist launch: {error}", file=sys.stderr)
        return _USAGE_ERROR
    print(f"mpidist launch: {_shown(variables, command)}", file=sys.stderr, flush=True)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and a process that it becomes inherits that
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execve(command[0], command, {**os.environ, **variables})
    except OSError as error:
        print(f"python -m mpidist launch: {command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        return _USAGE_ERROR


def command_for_ranks(options: Sequence[str], program: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables and the command that start a program by mpirun.

    Args:
        options: Those of mpirun; they say how many ranks.
        program: The command of each rank.

    Raises:
        LaunchError: There is no MPI library, or no mpirun that belongs to it.
        ValueError: The options are wrong, or no ranks can be started from here.
    """
    _check(options, program)
    library = _library_of(program[0])
    mpirun = _mpirun_of(library)
    variables, flags = additions(library, mpirun)
    return variables, [str(mpirun), *flags, *options, *program]


def _shown(variables: Mapping[str, str], command: Sequence[str]) -> str:
    """Return the command as it can be typed."""
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items() if name != "PATH"]
    if "PATH" in variables:
        words.append(f'PATH={shlex.quote(variables["PATH"].split(os.pathsep)[0])}:"$PATH"')
    return " ".join(["env", *words, shlex.join(command)]) if words else shlex.join(command)


def _check(options: Sequence[str], program: Sequence[str]) -> None:
    launcher = launchers.read_launcher()
    if launcher is not None and launchers.in_shell(launcher.name):
        raise ValueError(
            f"this is a shell that {launcher.name} --pty started, and mpirun would wait for what that shell holds. "
            "Expected: a shell of salloc; type: exit; then: salloc -n 4   # or as many; and there launch again"
        )
    if launcher is not None and launcher.size != 1:
        raise ValueError(
            f"this process is a rank that {launcher.name} started ({launcher.size_variable} is set). Expected: launch "
            "is started once and starts the ranks; or under mpirun and srun type: python train.py"
        )
    if is_python(program[0]) and program[1:2] == ["-"]:
        raise ValueError(
            "mpirun passes standard input to rank 0 alone, so the other ranks would have no program. Write the program "
            "to a file: python -m mpidist launch -n 4 train.py"
        )
    check_count(options, program, is_needed=launchers.read_batch_system() is None)


def _library_of(command: str) -> MpiLibrary:
    """Return the MPI library of the ranks' Python. That of this Python where they run something else."""
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
    mpirun, system = find_mpirun(library), launchers.read_batch_system()
    if mpirun is not None:
        # Intel's mpirun is a shell script that finds out about batch systems, and keeps signals to itself.
        hydra = mpirun.with_name("mpiexec.hydra")
        return hydra if library.vendor == INTEL_MPI and system is None and hydra.exists() else mpirun
    own = None if system is None else system.launcher
    direct = None if own is None else launchers.command_for(own, library.vendor)
    hint = f"Type: {direct} -n 4 python train.py" if direct else "Start the program as this site's documentation says"
    raise LaunchError(
        f"mpi4py uses {library} ({library.path}), and neither beside it nor in PATH is an mpirun that belongs to it. "
        f"Expected: one of the same MPI library. {hint}; or on a machine of your own: "
        f"{mpi_install()}"
    )


def additions(library: MpiLibrary, mpirun: Path) -> tuple[dict[str, str], list[str]]:
    """Return the variables and flags that a program still needs with this library.

    Root needs Open MPI's permission. In a batch job slots and binding are the site's business; elsewhere more ranks
    than cores are allowed, and no rank is bound to one core, which its BLAS and its progress thread would then share.
    MPICH does so by itself. There each rank's BLAS would start a thread for each core, unless a variable says how many.
    """
    row = launchers.mpirun_of(library.vendor)
    flags = [row.as_root] if row is not None and row.as_root and os.geteuid() == 0 else []
    wanted: dict[str, str] = {}
    if launchers.read_batch_system() is None:
        if not any(os.environ.get(name) for name in THREAD_SETTINGS):
            wanted["OMP_NUM_THREADS"] = "1"
        wanted.update(launchers.own_machine(library.vendor, library.version))
    variables = {name: value for name, value in wanted.items() if name not in os.environ}
    folders = os.environ.get("PATH", "").split(os.pathsep)
    if library.vendor == INTEL_MPI and str(mpirun.parent) not in folders:
        variables["PATH"] = os.pathsep.join([str(mpirun.parent), *folders])  # where its launcher looks for its parts
    return variables, flags


# The command line: where mpirun's options end, and whether they say how many ranks ------------------------------------


def is_python(word: str) -> bool:
    """Return whether a command is a Python interpreter.

    >>> is_python("/opt/bin/python3.11"), is_python("train.py")
    (True, False)
    """
    return _PYTHON.fullmatch(Path(word).name) is not None


def split_program(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options of mpirun, and the command that each rank runs.

    The command begins at ``--`` (which is left out), at a Python, at ``-m``, or at a file that ends in ``.py``; the
    last two are run by the Python of this process. Values of mpirun's options are passed over.

    Raises:
        ValueError: Nothing of that is there.
    """
    for rest in _from_each_option(arguments):
        options, word = list(arguments[: -len(rest)]), rest[0]
        if word == "--" and len(rest) > 1:
            return options, rest[1:]
        if word == "-m" and len(rest) > 1:
            return options, [sys.executable, *rest]
        if _may_be_program(word):
            if is_python(word):
                return options, rest
            if word.endswith(".py"):
                return options, [sys.executable, *rest]
    raise ValueError(
        f"there is no program in {shlex.join(arguments)!r}; expected a file that ends in .py, -m MODULE, or -- and a "
        "command, for example: python -m mpidist launch -n 4 train.py"
    )


def _may_be_program(word: str) -> bool:
    # NAME=VALUE belongs to an option that is not known here, but a folder's name may have the sign, too.
    return not word.startswith("-") and ("=" not in word or Path(word).is_file())


def _from_each_option(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield the words from each option on; values of options are passed over."""
    rest = list(words)
    while rest:
        yield rest
        rest = rest[1 + _values(rest) :]


def _values(words: Sequence[str]) -> int:
    """Return how many words after the first one are the values of that option."""
    option = words[0].removeprefix("-").removeprefix("-") if words[0].startswith("-") else ""
    if option in _VARIABLE:  # of Hydra, which takes NAME=VALUE as well as NAME VALUE
        return 1 if len(words) > 1 and "=" in words[1] else 2
    if option in _TWO_VALUES:
        return 2
    return 1 if option in _ONE_VALUE else 0


def check_count(options: Sequence[str], program: Sequence[str], *, is_needed: bool) -> None:
    """Check how many ranks the options ask for.

    Args:
        options: Those of mpirun.
        program: The command of each rank.
        is_needed: Whether they have to say it; a batch system knows it without.

    Raises:
        ValueError: They do not say it, or it is no whole number of at least 1.
    """
    found = False
    for rest in _from_each_option(options):
        glued = _GLUED_COUNT.fullmatch(rest[0])
        if glued:
            name, value = glued[1] or glued[3], glued[2] or glued[4]
            raise ValueError(f"{rest[0]!r} is one word; expected two: {name} {value}")
        if rest[0] in _COUNTS:
            found = True
            value = rest[1] if len(rest) > 1 else ""
            if not value.isdecimal() or int(value) < 1:
                raise ValueError(
                    f"{shlex.join(rest[:2])!r} is no number of ranks; expected a whole number of at least 1, for "
                    "example: python -m mpidist launch -n 4 train.py"
                )
    if is_needed and not found:
        late = next((word for word in program if word in _COUNTS[:-1] or _GLUED_COUNT.fullmatch(word)), None)
        after = f", and what comes after the program, as {late} here, is the program's own" if late else ""
        raise ValueError(
            f"{shlex.join(options)!r} does not say how many ranks{after}; expected for example: "
            "python -m mpidist launch -n 4 train.py"
        )
