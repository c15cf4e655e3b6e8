"""Text: numbers that are read strictly, ranks and commands in messages, lines on stderr."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

# Launchers and Slurm write nothing longer; a longer one could not be counted to.
_WHOLE = re.compile(r"[0-9]{1,18}")
_DECIMAL = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|inf")


def whole_number(text: str) -> int:
    """Return the whole number of at least 0 that ASCII digits are.

    Raises:
        ValueError: There is something else in ``text``.

    >>> whole_number("08")
    8
    """
    if _WHOLE.fullmatch(text) is None:
        raise ValueError(f"{text!r} is no whole number; expected digits alone")
    return int(text)


def decimal_number(text: str) -> float:
    """Return the number of at least 0 in a text such as ``1800`` or ``0.5``. ``1e3`` and ``inf`` are read, too.

    Raises:
        ValueError: There is something else in ``text``.
    """
    if _DECIMAL.fullmatch(text) is None:
        raise ValueError(f"{text!r} is no number of at least 0; expected one such as 60 or 0.5")
    return float(text)


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as text, consecutive ones as a range.

    >>> ranks_text([0, 1, 2, 5, 4])
    '0-2,5,4'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def pip_install(extra: str) -> str:
    """Return the command that installs an extra of the package, in a checkout too.

    >>> print(pip_install("half"))
    pip install 'mpidist[half]' (in a checkout: pip install '.[half]')
    """
    return f"pip install 'mpidist[{extra}]' (in a checkout: pip install '.[{extra}]')"


def error_text(error: BaseException) -> str:
    """Return the type and message of an error, whose ``__str__`` may fail.

    >>> error_text(ValueError("no rows"))
    'ValueError: no rows'
    """
    try:
        text = str(error)
    except Exception as problem:  # which runs the program's code
        text = f"its message raised {type(problem).__name__}"
    return f"{type(error).__name__}: {text}"


def tell_user(text: str) -> None:
    """Print ``text`` on stderr under mpidist's name, at once."""
    print(f"mpidist: {text}", file=sys.stderr, flush=True)
