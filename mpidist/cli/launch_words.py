"""What stands on the command line of ``launch``: where mpirun's options end, and whether they say how many ranks."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

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


def is_python(word: str) -> bool:
    """Whether a command is a Python interpreter.

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
    position = 0
    while position < len(arguments):
        options, rest = list(arguments[:position]), list(arguments[position:])
        word = rest[0]
        if word == "--" and len(rest) > 1:
            return options, rest[1:]
        if word == "-m" and len(rest) > 1:
            return options, [sys.executable, *rest]
        if _may_be_program(word):
            if is_python(word):
                return options, rest
            if word.endswith(".py"):
                return options, [sys.executable, *rest]
        position += 1 + _values(rest)
    raise ValueError(
        f"there is no program in {shlex.join(arguments)!r}; expected a file that ends in .py, -m MODULE, or -- and a "
        "command, for example: python -m mpidist launch -n 4 train.py"
    )


def _may_be_program(word: str) -> bool:
    # NAME=VALUE belongs to an option that is not known here, but a folder's name may have the sign, too.
    return not word.startswith("-") and ("=" not in word or Path(word).is_file())


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
    found, position = False, 0
    while position < len(options):
        rest = options[position:]
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
        position += 1 + _values(rest)
    if is_needed and not found:
        late = next((word for word in program if word in _COUNTS[:-1] or _GLUED_COUNT.fullmatch(word)), None)
        after = f", and what comes after the program, as {late} here, is the program's own" if late else ""
        raise ValueError(
            f"{shlex.join(options)!r} does not say how many ranks{after}; expected for example: "
            "python -m mpidist launch -n 4 train.py"
        )
