"""The checksum by which ranks tell whether their arrays are the same."""

from __future__ import annotations

import zlib

import numpy as np

from mpidist.arrays.convert import Array

# A larger array is told by so many pieces of it, the first and the last among them.
_PIECES, _PIECE_BYTES = 16, 64 << 10


def checksum(array: Array) -> int:
    """Return the CRC-32 of the bytes of an array in host memory, of a large one that of pieces of it.

    >>> checksum(np.arange(3)) == checksum(np.arange(3) + 1)
    False
    """
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if data.size <= _PIECES * _PIECE_BYTES:
        return zlib.crc32(data.data)
    found = 0
    for start in np.linspace(0, data.size - _PIECE_BYTES, _PIECES, dtype=np.int64):
        found = zlib.crc32(data[start : start + _PIECE_BYTES].data, found)
    return found
