"""Text: numbers, ranks, device strings, lines of the user's program, and messages."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Sequence
from functools import cache, lru_cache
from types import FrameType
from typing import NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)


# Numbers --------------------------------------------------------------------------------------------------------

# Launchers and Slurm write nothing longer, and no loop could count to a longer one.
_WHOLE = re.compile(r"[0-9]{1,18}")
_DECIMAL = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|inf")


def whole_number(text: str) -> int:
    """Return the value of ASCII digits. Raise ValueError for any other text."""
    if _WHOLE.fullmatch(text) is None:
        raise ValueError(f"{text!r} is no whole number; expected digits alone")
    return int(text)


def decimal_number(text: str) -> float:
    """Return the value of a text such as ``1800``, ``0.5``, ``1e3`` or ``inf``."""
    if _DECIMAL.fullmatch(text) is None:
        raise ValueError(f"{text!r} is no number of at least 0; expected one such as 60 or 0.5")
    return float(text)


# Ranks ----------------------------------------------------------------------------------------------------------

# Limits of a message: characters of a list of ranks, groups of ranks, characters of all groups, and of one group.
_RANKS_WIDTH, MOST_GROUPS, _ROOM, _LEAST_ROOM = 60, 20, 6000, 200
_MOST_NAMES = 4


def ranks_text(ranks: Iterable[int], width: int = _RANKS_WIDTH) -> str:
    """Return ranks as text, with ranges. A long text is cut, and has the number of ranks.

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
    """Return ranks as text, such as ``rank 3`` or ``ranks 0-4095``."""
    return f"rank{'s' * (len(ranks) != 1)} {ranks_text(ranks, width)}"


def names_text(names: Iterable[str], most: int = _MOST_NAMES) -> str:
    """Return names as text, such as ``a, b, c and 2 more``."""
    *others, last = names
    if len(others) >= most:
        return f"{', '.join(others[: most - 1])} and {len(others) + 2 - most} more"
    return f"{', '.join(others)} and {last}" if others else last


def groups_of(said: Iterable[tuple[int, K]], last: Container[int] = ()) -> list[tuple[K, list[int]]]:
    """Group ranks by their values, smallest groups first, and groups with ``last`` ranks last.

    >>> groups_of(enumerate(["waits", "waits", "computes"]))
    [('computes', [2]), ('waits', [0, 1])]
    """
    groups: dict[K, list[int]] = {}
    for rank, value in said:
        groups.setdefault(value, []).append(rank)
    return sorted(groups.items(), key=lambda group: (group[1][0] in last, len(group[1]), group[1][0]))


def group_lines(
    groups: Sequence[tuple[K, list[int]]],
    line: Callable[[K, list[int]], tuple[str, str, str]],
    *,
    most: int = MOST_GROUPS,
    room: int = _ROOM,
    elsewhere: str = "",
) -> list[str]:
    """Return a line for each group of ranks, as many as fit on a screen.

    ``line`` returns head, text and tail of a line. The text is cut if there are many lines.

    >>> said = enumerate(["b", "a", "b", "b", "c", "c"])
    >>> group_lines(groups_of(said), lambda text, ranks: (f"{numbered_ranks(ranks)}: ", text, ""), most=1)
    ['rank 1: a', 'and 2 more lines, of 5 ranks']
    """
    shown = groups[: max(1, min(most, room // _LEAST_ROOM))]
    lines = []
    for value, ranks in shown:
        head, text, tail = line(value, ranks)
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
    """Return the lines of ranks with a text each, such as ``ranks 0-1: no file``."""
    return group_lines(groups_of(said, last), lambda text, ranks: (f"{indent}{numbered_ranks(ranks)}: ", text, ""))


def cut_text(text: str, width: int) -> str:
    """Return the text, cut to a width."""
    return text if len(text) <= width else f"{text[: max(0, width - 3)]}..."


# Devices --------------------------------------------------------------------------------------------------------

_DEVICE = re.compile(
    r"^/?(?:job:(?P<job>[a-zA-Z_]\w*))?/?(?:replica:\d+)?/?(?:task:(?P<task>\d+))?"
    r"/?(?:device:)?(?P<kind>cpu|gpu)(?::(?P<index>\d+))?$",
    re.IGNORECASE,
)
# TensorFlow's name of a process without a cluster.
_THIS_PROCESS = ("localhost", 0)


class Device(NamedTuple):
    """A parsed device string. ``job`` and ``task`` are None for a device of this process.

    CPU numbers are virtual: ``cpu:0`` and ``cpu:1`` are two replicas on the same processor.
    """

    kind: str
    number: int
    job: str | None = None
    task: int | None = None

    def __str__(self) -> str:
        if self.job is None:
            return f"{self.kind}:{self.number}"
        return f"/job:{self.job}/replica:0/task:{self.task}/device:{self.kind.upper()}:{self.number}"


def parse_device(text: str) -> Device:
    """Return the device of a string such as ``"gpu:1"``, or of TensorFlow's longer forms."""
    if not isinstance(text, str):
        raise TypeError(f"device is {text!r} of type {type(text).__name__}; expected a string such as 'cpu:0'")
    match = _DEVICE.match(text)
    if match is None or (match["job"] is None) != (match["task"] is None):
        raise ValueError(f"device is {text!r}; expected 'cpu:0', 'gpu:1' or '/job:worker/task:0/device:GPU:1'")
    kind, number = match["kind"].lower(), int(match["index"] or 0)
    if match["task"] is None or (match["job"], int(match["task"])) == _THIS_PROCESS:
        return Device(kind, number)
    return Device(kind, number, match["job"], int(match["task"]))


# Lines of the user's program ------------------------------------------------------------------------------------

_CONTEXTLIB = contextlib.__file__
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Outside of the package, because importing a module of the package imports all of it.
_TORCH_ENTRY = _PACKAGE.rstrip(os.sep) + "_torch_entry.py"
# Folders of libraries that call mpidist for their users.
_callers: list[str] = []
_OWN, _CALLER, _OTHER = range(3)


def skip_frames_of(file: str) -> None:
    """Skip a library in the search for the user's lines, given its ``__init__.py``."""
    folder = os.path.dirname(os.path.abspath(file)) + os.sep
    if folder not in _callers:
        _callers.append(folder)
        _kind_of.cache_clear()


def is_of_package(file: str) -> bool:
    """Return whether ``file`` is mpidist's own."""
    return file.startswith((_PACKAGE, _TORCH_ENTRY))


def is_of_program(file: str) -> bool:
    """Return whether ``file`` is neither mpidist's nor a library's."""
    return not file.startswith(_libraries())


@cache
def _libraries() -> tuple[str, ...]:
    import sysconfig

    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return (_PACKAGE, "<frozen ", *{sysconfig.get_path(name) + os.sep for name in names})


def path_in_package(file: str) -> str:
    """Return the path of a file of mpidist inside the package."""
    return file.removeprefix(_PACKAGE)


@lru_cache(maxsize=4096)
def _kind_of(file: str) -> int:
    """Return whether a file is mpidist's own, of a library that calls it, or neither."""
    if file.startswith(tuple(_callers)):
        return _CALLER
    return _OWN if is_of_package(file) or file == _CONTEXTLIB else _OTHER


def user_call_site(frame: FrameType | None = None) -> str:
    """Return ``file:line (function)`` of the innermost frame outside of mpidist.

    Libraries that call mpidist for their users are skipped, too. So are the libraries that call these, unless no frame
    of a program is behind them. A function of mpidist that works for another thread names that thread's line in a local
    variable ``works_for_call_site``.
    """
    if frame is None:
        frame = sys._getframe(1)
    is_behind_caller, in_library = False, None
    while frame is not None:
        code = frame.f_code
        kind = _kind_of(code.co_filename)
        if kind == _CALLER:
            is_behind_caller = True
        elif kind == _OTHER:
            if not is_behind_caller or is_of_program(code.co_filename):
                return _line_of(frame)
            in_library = in_library or frame
        elif "works_for_call_site" in code.co_varnames:
            return str(frame.f_locals["works_for_call_site"])
        frame = frame.f_back
    return "unknown" if in_library is None else _line_of(in_library)


def main_thread_frame() -> FrameType | None:
    """Return the innermost frame of the main thread. None if it has ended."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def program_line(frame: FrameType) -> str:
    """Return ``file:line (function)`` of the innermost frame of the user's program, in any thread."""
    found: FrameType | None = frame
    while found is not None:
        if is_of_program(found.f_code.co_filename):
            return _line_of(found)
        found = found.f_back
    return user_call_site(frame)


def _line_of(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


# Commands and messages ------------------------------------------------------------------------------------------


def pip_install(extra: str) -> str:
    """Return the command that installs an extra from this installation's checkout or wheel."""
    import shlex
    from pathlib import Path

    # First, because Python imports a checkout in its own folder even if another mpidist is installed.
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").exists():
        return f"pip install -e {shlex.quote(f'{checkout}[{extra}]')}"
    source = _pip_source()
    if source is None:
        return f"pip install 'PATH[{extra}]' (PATH: a checkout or a wheel of mpidist; docs/install.md)"
    return f"pip install {shlex.quote(f'{source}[{extra}]')}"


def _pip_source() -> str | None:
    """Return the existing folder or wheel that pip installed mpidist from (PEP 610)."""
    import json
    from importlib import metadata
    from urllib.parse import unquote, urlsplit

    try:
        record = metadata.distribution("mpidist").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    url = urlsplit(json.loads(record or "{}").get("url", ""))
    source = unquote(url.path)
    return source if url.scheme == "file" and os.path.exists(source) else None


def error_text(error: BaseException) -> str:
    """Return the type and message of an error."""
    try:
        text = str(error)
    except Exception as problem:  # __str__ is the program's code
        text = f"its message raised {type(problem).__name__}"
    return f"{type(error).__name__}: {text}"


def tell_user(text: str) -> None:
    """Print ``text`` on stderr at once, after mpidist's name."""
    print(f"mpidist: {text}", file=sys.stderr, flush=True)
