"""The C functions: the library of the native core, and memory mappings of libc."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import shlex
import sys
import weakref
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_int32, c_int64, c_size_t, c_ssize_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.core.settings import NATIVE, TIMEOUT, WARN_AFTER
from mpidist.native.build_library import LIBRARY, SOURCES, source_id
from mpidist.topology import import_mpi

# Called by node leaders, see mpidist/native/leaders.c.
_LEADER_FUNCTIONS = ("MPI_Isend", "MPI_Irecv", "MPI_Test")
_LONGEST_SECONDS = 2**31 - 1
Opener = Callable[..., dict[str, Any]]
"""Opens a core. Returns its functions, which are Python builtins, because ctypes calls cost more."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = c_void_p
_libc.mmap.argtypes = [c_void_p, c_size_t, c_int, c_int, c_int, ctypes.c_long]
_libc.munmap.argtypes = [c_void_p, c_size_t]
_MAP_FAILED = c_void_p(-1).value


class SlotSizes(Structure):
    """nc_sizes of mpidist.h: sizes of a rank's slots in bytes, and the number of lanes."""

    _fields_ = (
        ("small", c_size_t),
        ("chunk", c_size_t),
        ("slice", c_size_t),
        ("lanes", c_int),
        ("usual", c_size_t),
    )

    @property
    def nbytes(self) -> int:
        """Size of a segment with all slots."""
        nbytes: int = library().nc_segment_bytes(byref(self))
        return nbytes


class Slice(Structure):
    """nc_slice of mpidist.h: a reduced slice that must be sent to other nodes."""

    _fields_ = (("chunk", c_size_t), ("start", c_size_t), ("length", c_size_t), ("lane", c_size_t))


class ChunkEvent(Structure):
    """nc_event of mpidist.h."""

    _fields_ = (("what", c_int), ("chunk", c_size_t), ("nanoseconds", c_int64))


class CoreReport(Structure):
    """nc_report of mpidist.h: results of the current call of a core."""

    _fields_ = (("error", c_int), ("shares", c_int), ("slice", Slice), ("event", ChunkEvent))


class MpiFunctions(Structure):
    """nc_mpi of mpidist.h."""

    _fields_ = (
        ("isend", c_void_p),
        ("irecv", c_void_p),
        ("test", c_void_p),
        ("comm", c_ssize_t),
        ("byte", c_ssize_t),
        ("handle_bytes", c_int),
    )


# Result and arguments of the functions called through ctypes.
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "nc_abandon": (None, c_void_p, c_int64, c_char_p),
    "nc_allow_push": (None, c_void_p, c_size_t, c_int),
    "nc_control_bytes": (c_size_t, c_int),
    "nc_crossed": (None, c_void_p, c_size_t),
    "nc_halve_from": (None, c_void_p, c_size_t),
    "nc_lead": (c_int, c_void_p, POINTER(MpiFunctions), POINTER(c_int32), c_int, c_int, c_int),
    "nc_limit_finalize": (c_int, c_int, c_char_p, c_int, c_char_p),
    "nc_ping": (c_int64, c_void_p, c_int, c_int, c_int64),
    "nc_read": (c_int, c_int, c_void_p, c_void_p, c_size_t),
    "nc_room": (None, c_void_p, POINTER(c_void_p), POINTER(SlotSizes)),
    "nc_segment": (c_int, c_void_p, POINTER(c_void_p), c_size_t),
    "nc_segment_bytes": (c_size_t, POINTER(SlotSizes)),
    "nc_report_of": (POINTER(CoreReport), c_void_p),
    "nc_waited": (c_int64, c_void_p),
    "nc_write": (c_int, c_int, c_void_p, c_void_p, c_size_t),
}


def opener() -> Opener | None:
    """Return the function that opens a core, or None. The first call loads the library."""
    found = _core()
    return None if isinstance(found, str) else found[0]


def why_not() -> str | None:
    """Return why this process has no native core, or None if it has one."""
    found = _core()
    return found if isinstance(found, str) else None


def library() -> ctypes.CDLL:
    """Return the library for the functions in ``_PROTOTYPES``. Calls release the GIL."""
    found = _core()
    assert not isinstance(found, str), found
    return found[1]


def read_number(pid: int, address: int) -> int | None:
    """Return an 8-byte integer of another process, or None if it is not accessible."""
    number = c_int64()
    return number.value if library().nc_read(pid, byref(number), address, 8) == 0 else None


def write_number(pid: int, address: int, number: int) -> bool:
    """Write an 8-byte integer of another process. Return whether it is accessible."""
    return bool(library().nc_write(pid, address, byref(c_int64(number)), 8) == 0)


def address_of(array: Array) -> int:
    """Return the address of a contiguous array."""
    address: int = array.__array_interface__["data"][0]
    return address


def map_shared(descriptor: int, nbytes: int) -> Array:
    """Map the first ``nbytes`` of a file as an array (MAP_SHARED).

    The file may be closed. It stays mapped until the last array in it is dropped.
    """
    # Not mmap.mmap, which keeps a descriptor open before Python 3.13.
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mapping {nbytes} bytes: {os.strerror(code)}")
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    # Not at exit, because arrays may still be read then. The kernel unmaps the file later.
    weakref.finalize(memory, _libc.munmap, address, nbytes).atexit = False
    return np.frombuffer(memoryview(memory), np.uint8)


def build_command() -> str:
    """Return the command that builds the library."""
    return shlex.join([sys.executable, str(SOURCES / "build_library.py")])


def mpi_functions() -> list[int]:
    """Return the addresses of the MPI functions that leaders call. Raises OSError if one is missing."""
    library = ctypes.CDLL(import_mpi().__file__)
    try:
        functions = [getattr(library, name) for name in _LEADER_FUNCTIONS]
    except AttributeError as error:
        raise OSError(str(error)) from error
    return [ctypes.c_size_t.from_buffer(function).value for function in functions]


def limit_finalize(rank: int, size: int) -> None:
    """Limit the time of MPI_Finalize by a C thread, if the native core is loaded."""
    if opener() is None:
        return
    warn, limit = (min(math.ceil(each.read()), _LONGEST_SECONDS) for each in (WARN_AFTER, TIMEOUT))
    text = (
        f"mpidist: rank {rank} of {size} ended its program {{}} s ago and has not finished MPI_Finalize{{}}. Look for "
        "a rank that is stopped, or for a slow atexit function. Set MPIDIST_TIMEOUT=SECONDS to allow more time.\n"
    )
    warning, error = text.format(warn, "").encode(), text.format(limit, "; it exits now").encode()
    status = library().nc_limit_finalize(warn, warning, limit, error)
    if status:
        raise OSError(status, os.strerror(status))


def why_not_between_nodes() -> str | None:
    """Return why the core cannot exchange data with other nodes, or None."""
    try:
        mpi_functions()
    except OSError as error:
        return f"it cannot call MPI: {error}"
    return None


def _core() -> tuple[Opener, ctypes.CDLL] | str:
    """Return the opener and the library, or the reason why they are missing."""
    return _load(SOURCES) if NATIVE.read() else f"{NATIVE.name}=0"


@functools.cache
def _load(folder: Path) -> tuple[Opener, ctypes.CDLL] | str:
    path = folder / LIBRARY
    if not path.exists():
        return f"{path} is missing (docs/install.md; the native core is for 64-bit Linux)"
    try:
        # PyDLL keeps the GIL, because these functions use Python objects.
        builtin = ctypes.PyDLL(str(path))
    except OSError as error:
        return f"it cannot be loaded: {error}"
    builtin.nc_build.restype = ctypes.c_char_p
    builtin.nc_open_for_python.restype = ctypes.py_object
    builtin.nc_open_for_python.argtypes = [c_void_p, c_int, c_int, c_int, POINTER(c_int32), c_int, c_int]
    built, expected = builtin.nc_build().decode(), source_id(folder)
    if built != expected:
        raise RuntimeError(
            f"{path} was built from other sources (id {built}) than this mpidist (id {expected}). "
            f"Build it again: {build_command()}"
        )
    library = ctypes.CDLL(str(path), use_errno=True)
    for name, (result, *arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return builtin.nc_open_for_python, library
