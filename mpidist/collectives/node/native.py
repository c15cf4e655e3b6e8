"""The C functions of the native core, or why this process has none."""

from __future__ import annotations

import ctypes
import functools
import math
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpidist.core.settings import NATIVE, TIMEOUT, WARN_AFTER
from mpidist.native.build_library import LIBRARY, SOURCES, source_id
from mpidist.topology import import_mpi

# The functions that leaders call, see mpidist/native/leaders.c.
_OF_LEADERS = ("MPI_Isend", "MPI_Irecv", "MPI_Test")
_LONGEST_SECONDS = 2**31 - 1
Functions = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class _Core:
    """The functions of the library, or the reason why there are none."""

    functions: Functions | None = None
    why_not: str | None = None


def functions() -> Functions | None:
    """Return the C functions by name, or None. Loads the library at the first call.

    Raises:
        RuntimeError: The library was built from other sources than those beside it.
        ValueError: MPIDIST_NATIVE is neither 0 nor 1.
    """
    return _core().functions


def why_not() -> str | None:
    """Return why this process has no native core, or None where it has one.

    Raises:
        RuntimeError: The library was built from other sources than those beside it.
        ValueError: MPIDIST_NATIVE is neither 0 nor 1.
    """
    return _core().why_not


def build_command() -> str:
    """Return the command that builds the library beside the sources of this mpidist."""
    return shlex.join([sys.executable, str(SOURCES / "build_library.py")])


def mpi_functions() -> list[int]:
    """Return the addresses of the functions of MPI that leaders call.

    Raises:
        OSError: mpi4py's library does not have them.
    """
    library = ctypes.CDLL(import_mpi().__file__)
    try:
        functions = [getattr(library, name) for name in _OF_LEADERS]
    except AttributeError as error:
        raise OSError(str(error)) from error
    return [ctypes.c_size_t.from_buffer(function).value for function in functions]


def limit_finalize(rank: int, size: int) -> None:
    """Bound the time that this process takes to end, if it has the native core."""
    core = functions()
    if core is None:
        return
    warn, limit = (min(math.ceil(each.read()), _LONGEST_SECONDS) for each in (WARN_AFTER, TIMEOUT))
    text = (
        f"mpidist: rank {rank} of {size} ended its program {{}} s ago and has not finished MPI_Finalize{{}}. Look for "
        "a rank that is stopped, or for a slow atexit function. Set MPIDIST_TIMEOUT=SECONDS to allow more time.\n"
    )
    core["limit_finalize"](warn, text.format(warn, "").encode(), limit, text.format(limit, "; it exits now").encode())


def why_not_between_nodes() -> str | None:
    """Return why the core cannot exchange data with other nodes, or None.

    Raises:
        LaunchError: There is no MPI.
    """
    try:
        mpi_functions()
    except OSError as error:
        return f"it cannot call MPI: {error}"
    return None


def _core() -> _Core:
    return _load(SOURCES) if NATIVE.read() else _Core(why_not=f"{NATIVE.name}=0")


@functools.cache
def _load(folder: Path) -> _Core:
    path = folder / LIBRARY
    if not path.exists():
        return _Core(why_not=f"{path} is missing (docs/install.md; the native core is for 64-bit Linux)")
    try:
        # Of the kind that keeps the GIL: its functions use Python's objects.
        library = ctypes.PyDLL(str(path))
    except OSError as error:
        return _Core(why_not=f"it cannot be loaded: {error}")
    library.nc_build.restype = ctypes.c_char_p
    library.nc_functions.restype = ctypes.py_object
    built, expected = library.nc_build().decode(), source_id(folder)
    if built != expected:
        raise RuntimeError(
            f"{path} was built from other sources (id {built}) than those beside it (id {expected}). "
            f"Build it again: {build_command()}"
        )
    return _Core(functions=library.nc_functions())
