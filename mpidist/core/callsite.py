"""Finding the line of the user's program that led into mpidist, for errors and reports."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import threading
from types import FrameType

_CONTEXTLIB = contextlib.__file__
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Beside the package, since importing a module of the package imports all of it.
_TORCH_ENTRY = _PACKAGE.rstrip(os.sep) + "_torch_entry.py"
_LIBRARIES = (
    _PACKAGE,
    "<frozen ",
    *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")},
)
# Folders of libraries that call mpidist for their users: their frames are not the user's either.
_callers: list[str] = []


def skip_frames_of(file: str) -> None:
    """Look for the user's lines outside of a library, too, given its ``__init__.py``."""
    folder = os.path.dirname(os.path.abspath(file)) + os.sep
    if folder not in _callers:
        _callers.append(folder)


def is_of_package(file: str) -> bool:
    """Return whether code of ``file`` is mpidist's own."""
    return file.startswith((_PACKAGE, _TORCH_ENTRY))


def is_of_program(file: str) -> bool:
    """Return whether code of ``file`` is neither mpidist's nor that of a library."""
    return not file.startswith(_LIBRARIES)


def path_in_package(file: str) -> str:
    """Return the path of a file of mpidist without that of the package."""
    return file.removeprefix(_PACKAGE)


def user_call_site(frame: FrameType | None = None) -> str:
    """Return ``file:line (function)`` of the innermost frame outside the package.

    Libraries that call it for their users count as part of it; behind one, others that call that library for theirs do,
    too, where a program is found behind them. A function of the package that works for code of another thread says
    whose with a local variable ``works_for_call_site``, which is returned when the search comes through it.

    Args:
        frame: Where to start; the caller by default.
    """
    if frame is None:
        frame = sys._getframe(1)
    is_behind_caller, in_library = False, None
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if file.startswith(tuple(_callers)):
            is_behind_caller = True
        elif not is_of_package(file) and file != _CONTEXTLIB:
            if not is_behind_caller or is_of_program(file):
                return _text_of(frame)
            in_library = in_library or frame
        if "works_for_call_site" in code.co_varnames:
            return str(frame.f_locals["works_for_call_site"])
        frame = frame.f_back
    return "unknown" if in_library is None else _text_of(in_library)


def main_thread_frame() -> FrameType | None:
    """Return the innermost frame of the main thread, or None at the end."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def program_line(frame: FrameType) -> str:
    """Return ``file:line (function)`` of the innermost frame of the user's program.

    It is neither in this package nor in a library.

    Args:
        frame: Where to start; that of another thread, too.
    """
    found: FrameType | None = frame
    while found is not None:
        if is_of_program(found.f_code.co_filename):
            return _text_of(found)
        found = found.f_back
    return user_call_site(frame)


def _text_of(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
