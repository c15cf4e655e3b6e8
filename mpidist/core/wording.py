"""Text: numbers that are read strictly, groups of ranks, commands, lines on stderr."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

# Launchers and Slurm write nothing longer; a longer one could not be counted to.
_WHOLE = re.compile(r"[0-9]{1,18}")
_DECIMAL = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|inf")
# How long ranks may be in a message; how many groups of them a message shows, and in how many characters.
_RANKS_WIDTH, MOST_GROUPS, _ROOM = 60, 20, 6000
# To a group, however many there are.
_LEAST_ROOM = 200
_MOST_NAMES = 4
K = TypeVar("K", bound=Hashable)


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


def ranks_text(ranks: Iterable[int], width: int = _RANKS_WIDTH) -> str:
    """Return ranks as text, consecutive ones as a range, the first of very many.

    >>> ranks_text([0, 1, 2, 5, 4])
    '0-2,5,4'
    >>> ranks_text(range(0, 10000, 2), width=24)
    '0,2,4,6,8,10,... (5000)'
    """
    runs: list[list[int]] = []
    count = 0
    for rank in ranks:
        count += 1
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text, more = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs), f",... ({count})"
    return text if len(text) <= width else text[: width - len(more) + 1].rpartition(",")[0] + more


def numbered_ranks(ranks: Collection[int], width: int = _RANKS_WIDTH) -> str:
    """Return the ranks with the noun before them.

    >>> numbered_ranks([3]), numbered_ranks(range(4096))
    ('rank 3', 'ranks 0-4095')
    """
    return f"rank{'s' * (len(ranks) != 1)} {ranks_text(ranks, width)}"


def names_text(names: Iterable[str], most: int = _MOST_NAMES) -> str:
    """Return names as text, the first few of many.

    >>> names_text(["node0"]), names_text(["a", "b", "c", "d", "e"])
    ('node0', 'a, b, c and 2 more')
    """
    *others, last = names
    if len(others) >= most:
        return f"{', '.join(others[: most - 1])} and {len(others) + 2 - most} more"
    return f"{', '.join(others)} and {last}" if others else last


def groups_of(said: Iterable[tuple[int, K]], last: Container[int] = ()) -> list[tuple[K, list[int]]]:
    """Return the ranks by their sayings: the odd ones, which are the fewest, first.

    Args:
        said: Each rank with its own.
        last: Ranks that come behind all others.

    >>> groups_of(enumerate(["waits", "waits", "computes"]))
    [('computes', [2]), ('waits', [0, 1])]
    """
    groups: dict[K, list[int]] = {}
    for rank, saying in said:
        groups.setdefault(saying, []).append(rank)
    return sorted(groups.items(), key=lambda group: (group[1][0] in last, len(group[1]), group[1][0]))


def group_lines(
    groups: Sequence[tuple[K, list[int]]],
    line: Callable[[K, list[int]], tuple[str, str, str]],
    *,
    most: int = MOST_GROUPS,
    room: int = _ROOM,
    elsewhere: str = "",
) -> list[str]:
    """Return a line for each group of ranks, as many as a screen holds.

    Args:
        groups: As ``groups_of`` returns them. Of too many the first are shown, and how many ranks are left out.
        line: Returns the head, the text and the tail of a group's line; long texts are cut where there are many.
        most: How many lines.
        room: How many characters, in all.
        elsewhere: Where the groups that are left out can be read, as in ``"; all: --json"``.

    >>> said = enumerate(["b", "a", "b", "b", "c", "c"])
    >>> group_lines(groups_of(said), lambda text, ranks: (f"{numbered_ranks(ranks)}: ", text, ""), most=1)
    ['rank 1: a', 'and 2 more lines, of 5 ranks']
    """
    shown = groups[: max(1, min(most, room // _LEAST_ROOM))]
    lines = []
    for saying, ranks in shown:
        head, text, tail = line(saying, ranks)
        lines.append(f"{head}{cut_text(text, room // len(shown) - len(head) - len(tail))}{tail}")
    left = groups[len(shown) :]
    if left:
        head = line(*left[0])[0]
        count = sum(len(ranks) for _, ranks in left)
        indent = head[: len(head) - len(head.lstrip())]
        lines.append(
            f"{indent}and {len(left)} more line{'s' * (len(left) > 1)}, of {count} rank{'s' * (count > 1)}{elsewhere}"
        )
    return lines


def said_lines(said: Iterable[tuple[int, str]], indent: str = "", *, last: Container[int] = ()) -> list[str]:
    """Return ``group_lines`` of ranks, each with a text.

    >>> said_lines(enumerate(["no file", "no file"]))
    ['ranks 0-1: no file']
    """
    return group_lines(groups_of(said, last), lambda text, ranks: (f"{indent}{numbered_ranks(ranks)}: ", text, ""))


def cut_text(text: str, width: int) -> str:
    """Return the text, cut where it is longer.

    >>> cut_text("all_reduce SUM", 13)
    'all_reduce...'
    """
    return text if len(text) <= width else f"{text[: max(0, width - 3)]}..."


def pip_install(extra: str) -> str:
    """Return the command that installs an extra from this installation's checkout or wheel.

    >>> print(pip_install("half"))
    pip install ...[half]'...
    """
    # First, because in its own folder a checkout is imported whatever is installed.
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").exists():
        return f"pip install -e {shlex.quote(f'{checkout}[{extra}]')}"
    source = _pip_source()
    if source is None:
        return f"pip install 'PATH[{extra}]' (PATH: a checkout or a wheel of mpidist; docs/install.md)"
    return f"pip install {shlex.quote(f'{source}[{extra}]')}"


def _pip_source() -> Path | None:
    """Return the existing folder or wheel that pip installed mpidist from (PEP 610)."""
    # Only error messages need it, and it takes longer to import than the rest of this module.
    from importlib import metadata

    try:
        record = metadata.distribution("mpidist").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    url = urlsplit(json.loads(record or "{}").get("url", ""))
    source = Path(unquote(url.path))
    return source if url.scheme == "file" and source.exists() else None


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
