"""Addresses of arrays, and files mapped into memory without keeping them open.

Each ``mmap.mmap`` of Python before 3.13 holds a descriptor.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import numpy as np

from mpidist.arrays.dtypes import Array

_library = ctypes.CDLL(None, use_errno=True)
_library.mmap.restype = ctypes.c_void_p
_library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


def address_of(array: Array) -> int:
    """Return the address of a contiguous array in this process."""
    address: int = array.__array_interface__["data"][0]
    return address


def map_shared(descriptor: int, nbytes: int) -> Array:
    """Return the first ``nbytes`` of a file as an array.

    All who map the file see writes to it. The file may be closed. It stays mapped while any array over it is there.

    Raises:
        OSError: The system refuses; also where ``nbytes`` is 0.
    """
    address = _library.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mapping {nbytes} bytes: {os.strerror(code)}")
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    # At the end of the program arrays may still be read; the system takes the mapping away after that.
    weakref.finalize(memory, _library.munmap, address, nbytes).atexit = False
    return np.frombuffer(memoryview(memory), np.uint8)
