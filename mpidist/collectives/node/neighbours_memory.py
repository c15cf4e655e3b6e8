"""Reading the memory of other processes on this machine (process_vm_readv), where the kernel allows it."""

from __future__ import annotations

import ctypes
import errno
import os

from mpidist.arrays.dtypes import Array


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def address_of(array: Array) -> int:
    """Return the address of a contiguous array in this process."""
    address: int = array.__array_interface__["data"][0]
    return address


class NeighboursMemory:
    """The memory of other processes, out of which bytes are copied."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self._read = getattr(library, "process_vm_readv", None)
        if self._read is not None:
            self._read.restype = ctypes.c_ssize_t
            self._read.argtypes = [
                ctypes.c_int,
                ctypes.c_void_p,
                ctypes.c_ulong,
                ctypes.c_void_p,
                ctypes.c_ulong,
                ctypes.c_ulong,
            ]
        self._local, self._remote = _IoVec(), _IoVec()
        self._local_pointer = ctypes.addressof(self._local)
        self._remote_pointer = ctypes.addressof(self._remote)

    @property
    def exists(self) -> bool:
        """Return whether this system has the call at all.

        Whether it is allowed shows when it is used.
        """
        return self._read is not None

    def read(self, pid: int, remote_address: int, local_address: int, nbytes: int) -> None:
        """Copy ``nbytes`` of process ``pid`` to an address of this process.

        Raises:
            PermissionError: The kernel forbids it.
            ProcessLookupError: The process is gone.
            OSError: The addresses are not those of memory that both processes have.
        """
        assert self._read is not None
        while nbytes:
            self._local.base, self._local.length = local_address, nbytes
            self._remote.base, self._remote.length = remote_address, nbytes
            done = self._read(pid, self._local_pointer, 1, self._remote_pointer, 1, 0)
            if done <= 0:
                code = ctypes.get_errno()
                if code == errno.ESRCH:
                    raise ProcessLookupError(code, f"process {pid}, a rank on this node, is gone")
                raise OSError(code, f"reading the memory of process {pid}: {os.strerror(code)}")
            remote_address += done
            local_address += done
            nbytes -= done
