"""Tracebacks for people who have not written mpidist: its own frames take one line."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from itertools import groupby

from mpidist.core import settings
from mpidist.core.callsite import is_of_package, is_of_program, path_in_package

_SHOWS = "; MPIDIST_FULL_TRACEBACK=1 shows them\n"


def traceback_text(error: BaseException) -> str:
    """Return an uncaught exception as Python prints it, with mpidist's frames folded.

    Each run of frames inside mpidist is one line.

    All frames are there where ``MPIDIST_FULL_TRACEBACK=1``, and where none is of the user's program.
    """
    found = traceback.TracebackException.from_exception(error, compact=True)
    full, wrong = read_setting()
    chain = list(_chain(found))
    if not full and any(is_of_program(frame.filename) for one in chain for frame in one.stack):
        for one in chain:
            one.stack = _FoldedStack(one.stack)
    return "".join(found.format()) + wrong


def without_folds(text: str) -> str:
    """Return a traceback without the lines for mpidist's frames, which may differ among ranks."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.endswith(_SHOWS))


def read_setting() -> tuple[bool, str]:
    """Return whether to print all frames on every rank, and the setting's error. A wrong setting asks for all frames.

    An error in place of the one that is to be printed would hide it.
    """
    try:
        return settings.FULL_TRACEBACK.read(), ""
    except ValueError as problem:
        return True, f"mpidist: {problem}\n"


def _chain(first: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """Yield an exception with its causes and contexts, and those of a group."""
    left = [first]
    while left:
        one = left.pop()
        yield one
        # Python 3.10 knows no groups.
        others = (one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ()))
        left += [other for other in others if other is not None]


class _FoldedStack(traceback.StackSummary):
    """Frames of a traceback, printed without those of mpidist."""

    def format(self, **options: bool) -> list[str]:
        lines: list[str] = []
        for inside, run in groupby(self, lambda frame: is_of_package(frame.filename)):
            frames = list(run)
            if inside:
                count = "1 frame" if len(frames) == 1 else f"{len(frames)} frames"
                last = f"{path_in_package(frames[-1].filename)}:{frames[-1].lineno}"
                lines.append(f"  ... {count} inside mpidist, to {last}{_SHOWS}")
            else:
                lines += traceback.StackSummary.from_list(frames).format(**options)
        return lines
