"""``python -m mpidist launch``: starts a program by the mpirun of mpi4py's MPI library."""

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

from mpidist.cli.doctor.machine import THREAD_SETTINGS
from mpidist.core.errors import LaunchError
from mpidist.core.settings import SETTINGS
from mpidist.topology import launchers
from mpidist.topology.mpi_library import INTEL_MPI, MpiLibrary, find_library, find_mpirun, mpi_install

HELP = "start a program with the mpirun of the MPI library in use, as root and on few cores, too"
_USAGE_ERROR = 2
_USAGE = """\
usage: python -m mpidist launch -n RANKS [MPIRUN OPTIONS] PROGRAM.py [ARGUMENTS]
       python -m mpidist launch -n RANKS [MPIRUN OPTIONS] -m MODULE [ARGUMENTS]
       python -m mpidist launch -n RANKS [MPIRUN OPTIONS] -- COMMAND [ARGUMENTS]
       python -m mpidist launch --hostfile FILE [-n RANKS] [MPIRUN OPTIONS] PROGRAM.py [ARGUMENTS]

Finds the MPI library that mpi4py uses (a wheel's or the system's) and its mpirun, and adds what it needs to run as
root. Outside of batch jobs it also sets one thread of BLAS for each rank (OMP_NUM_THREADS=1, unless a variable sets the
threads), does not bind ranks to cores, and allows more ranks than cores. With --hostfile or --host, the hosts' slots
limit the ranks, and the MPIDIST_* variables reach all hosts. All other options are passed to mpirun. Prints the command
on stderr and becomes it: its exit code and its signals are mpirun's."""
_PYTHON = re.compile(r"python[\d.]*")
_EXAMPLE = "python -m mpidist launch -n 4 train.py"
_COUNTS = ("-n", "-np", "--n", "--np", "-c")
# Options with values that could pass for a program, without dashes. Open MPI accepts one or two dashes.
_HOSTFILES = frozenset(("hostfile", "machinefile", "default-hostfile", "f"))
_HOSTS = frozenset((*_HOSTFILES, "H", "host", "hosts"))
_ONE_VALUE = _HOSTS | frozenset(
    shlex.split(
        "n np c N x wd wdir prefix path app output output-filename output-directory map-by rank-by bind-to rankfile rf "
        "cpu-set cpu-list pe-list npernode npersocket ppn personality timeout stdin preload-files tune am report-uri "
        "ompi-server dvm dvm-uri launch-agent max-restarts genvlist envlist configfile outfile-pattern errfile-pattern "
        "prepend-pattern perhost grr launcher launcher-exec bootstrap bootstrap-exec rmk iface membind usize"
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
    """Become mpirun. Return only after an error."""
    given: list[str] = arguments.arguments
    if not given or given[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stdout if given else sys.stderr)
        return 0 if given else _USAGE_ERROR
    variables, command = command_for_ranks(*split_program(given))
    print(f"mpidist launch: {_shown(variables, command)}", file=sys.stderr, flush=True)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and mpirun would inherit that
        signal.signal(ignored, signal.SIG_DFL)
    return os.execve(command[0], command, {**os.environ, **variables})


def command_for_ranks(options: Sequence[str], program: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables and the command that start a program by mpirun.

    Args:
        options: Options of mpirun, with the number of ranks.
        program: The command of each rank.

    Raises:
        LaunchError: There is no MPI library, or no mpirun that belongs to it.
        ValueError: The options are wrong, or no ranks can be started from here.
    """
    _check(options, program)
    library = _library_of(program[0])
    mpirun = _mpirun_of(library)
    variables, flags = additions(library, mpirun, has_hosts=_names_hosts(options))
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
            f"this is a shell that {launcher.name} --pty started. It holds the resources that mpirun would wait for. "
            "Use a shell of salloc. Type: exit; then: salloc -n 4; then launch again"
        )
    if launcher is not None and launcher.size != 1:
        raise ValueError(
            f"this process is a rank that {launcher.name} started ({launcher.size_variable} is set). Start launch "
            "once, outside of a job, because it starts the ranks; or under mpirun and srun type: python train.py"
        )
    if is_python(program[0]) and program[1:2] == ["-"]:
        raise ValueError(
            "mpirun passes standard input to rank 0 alone, so the other ranks would have no program. Write the program "
            f"to a file: {_EXAMPLE}"
        )
    for _, name, values in _parsed(options):
        if name in _HOSTFILES and values and not Path(values[0]).is_file():
            raise ValueError(
                f"the hostfile {values[0]!r} is missing. Write a line for each host, such as: node0 slots=4"
            )
    check_count(options, program, is_needed=launchers.read_batch_system() is None and not _names_hosts(options))


def _names_hosts(options: Sequence[str]) -> bool:
    return any(name in _HOSTS for _, name, _ in _parsed(options))


def _library_of(command: str) -> MpiLibrary:
    """Return the MPI library of the ranks' Python, or of this Python for other programs."""
    if not is_python(command) or command == sys.executable:
        return find_library()
    python = shutil.which(command)
    if python is None:
        raise ValueError(
            f"the program {command!r} is not found. Name a Python that can be started, such as one in PATH"
        )
    try:
        return find_library(python)
    except LaunchError as error:
        raise LaunchError(f"under {python}: {error}") from error


def _mpirun_of(library: MpiLibrary) -> Path:
    mpirun, system = find_mpirun(library), launchers.read_batch_system()
    if mpirun is not None:
        # Intel's mpirun is a shell script that detects batch systems, and does not pass on signals.
        hydra = mpirun.with_name("mpiexec.hydra")
        return hydra if library.vendor == INTEL_MPI and system is None and hydra.exists() else mpirun
    own = None if system is None else system.launcher
    direct = None if own is None else launchers.command_for(own, library.vendor)
    hint = f"Type: {direct} -n 4 python train.py" if direct else "Start the program as this site's documentation says"
    raise LaunchError(
        f"mpi4py uses {library} ({library.path}), but no mpirun of that library is near it or in PATH. {hint}. On a "
        f"machine of your own: {mpi_install()}"
    )


def additions(library: MpiLibrary, mpirun: Path, *, has_hosts: bool = False) -> tuple[dict[str, str], list[str]]:
    """Return the variables and flags that a program needs with this library.

    Root needs Open MPI's permission. In a batch job the site decides about slots and binding. Elsewhere more ranks than
    cores are allowed, and no rank is bound to one core, which its BLAS and its progress thread would then share. MPICH
    does so by default. With ``has_hosts``, the slots of the hosts limit the ranks.
    """
    row = launchers.mpirun_of(library.vendor)
    flags = [row.as_root] if row is not None and row.as_root and os.geteuid() == 0 else []
    wanted: dict[str, str] = {}
    is_own = launchers.read_batch_system() is None
    if is_own:
        # Without a limit, each rank's BLAS would start a thread for each core.
        if not any(os.environ.get(name) for name in THREAD_SETTINGS):
            wanted["OMP_NUM_THREADS"] = "1"
        wanted.update(launchers.own_machine(library.vendor, library.version))
        if has_hosts:
            # With this policy of mapping, Open MPI would place all ranks on the first host.
            wanted = {name: value for name, value in wanted.items() if "_rmaps_" not in name}
    variables = {name: value for name, value in wanted.items() if name not in os.environ}
    if row is not None and "{variable}" in row.passes and (has_hosts or not is_own):
        # Open MPI passes only its own variables to other hosts.
        names = [name for name in {**os.environ, **variables} if name in (*THREAD_SETTINGS, *SETTINGS)]
        flags += [word for name in sorted(names) for word in row.passes.format(variable=name).split()]
    folders = os.environ.get("PATH", "").split(os.pathsep)
    if library.vendor == INTEL_MPI and str(mpirun.parent) not in folders:
        variables["PATH"] = os.pathsep.join([str(mpirun.parent), *folders])  # its launcher searches its parts there
    return variables, flags


# The command line -----------------------------------------------------------------------------------------------


def is_python(word: str) -> bool:
    """Return whether a command is a Python interpreter.

    >>> is_python("/opt/bin/python3.11"), is_python("train.py")
    (True, False)
    """
    return _PYTHON.fullmatch(Path(word).name) is not None


def split_program(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options of mpirun, and the command that each rank runs.

    The command begins at ``--`` (which is left out), at a Python, at ``-m``, or at a file that ends in ``.py``. The
    Python of this process runs the last two.

    Raises:
        ValueError: No program was found.
    """
    for position, _, _ in _parsed(arguments):
        options, word, rest = list(arguments[:position]), arguments[position], list(arguments[position:])
        if word == "--" and len(rest) > 1:
            return options, rest[1:]
        if word == "-m" and len(rest) > 1:
            return options, [sys.executable, *rest]
        # NAME=VALUE is the value of an unknown option, but the name of a folder may contain "=", too.
        if not word.startswith("-") and ("=" not in word or Path(word).is_file()):
            if is_python(word):
                return options, rest
            if word.endswith(".py"):
                return options, [sys.executable, *rest]
    raise ValueError(
        f"there is no program in {shlex.join(arguments)!r}. Pass a file that ends in .py, -m MODULE, or -- and a "
        f"command, for example: {_EXAMPLE}"
    )


def _parsed(words: Sequence[str]) -> Iterator[tuple[int, str, list[str]]]:
    """Yield position, name without dashes, and values of each option. Other words have no name."""
    position = 0
    while position < len(words):
        word, following = words[position], words[position + 1 :]
        if not word.startswith("-"):
            name, values = "", []
        else:
            name, is_glued, value = word.removeprefix("-").removeprefix("-").partition("=")
            values = [value] if is_glued else list(following[: _values(name, following)])
        yield position, name, values
        position += 1 + (0 if "=" in word else len(values))


def _values(option: str, following: Sequence[str]) -> int:
    """Return the number of values of an option."""
    if option in _VARIABLE:  # Hydra accepts NAME=VALUE and NAME VALUE
        return 1 if following and "=" in following[0] else 2
    if option in _TWO_VALUES:
        return 2
    return 1 if option in _ONE_VALUE else 0


def check_count(options: Sequence[str], program: Sequence[str], *, is_needed: bool) -> None:
    """Check the number of ranks in the options of mpirun.

    Raises:
        ValueError: It is missing but needed, or it is no whole number of at least 1.
    """
    found = False
    for position, _, values in _parsed(options):
        word = options[position]
        if word in _COUNTS:
            found = True
            if not values or not values[0].isdecimal() or int(values[0]) < 1:
                raise ValueError(
                    f"{shlex.join([word, *values])!r} is no number of ranks. Pass a whole number of at least 1, for "
                    f"example: {_EXAMPLE}"
                )
    if is_needed and not found:
        late = next((word for word in program if word in _COUNTS[:-1]), None)
        after = f" Options after the program, such as {late} here, are passed to the program." if late else ""
        raise ValueError(f"{shlex.join(options)!r} has no number of ranks.{after} Type for example: {_EXAMPLE}")
