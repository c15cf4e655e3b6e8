"""Text for the user: ranks and commands in messages, and lines on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable


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


def tell_user(text: str) -> None:
    """Print ``text`` on stderr under mpidist's name, at once."""
    print(f"mpidist: {text}", file=sys.stderr, flush=True)
