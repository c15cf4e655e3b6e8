"""Files in the safetensors format: written in one pass with their checksum, and read with every byte checked.

The safetensors library copies the tensors before it writes them, and knows no checksum.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.checkpoint.format_rules import HEADER_ENTRY, SAFETENSORS_NAMES, DamagedCheckpointError, check, parse
from mpidist.core.files import NotAFileError, open_regular

_DTYPES = {name: np.dtype(dtype) for dtype, name in SAFETENSORS_NAMES.items()}
# What is checked or summed up at a time, small enough to stay in the cache between the two.
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class FileRecord:
    """Size and checksum of a file.

    Attributes:
        bytes: Its size.
        crc32: The CRC-32 of all of it (zlib's), as eight hexadecimal digits.
    """

    bytes: int
    crc32: str


def stores(dtype: np.dtype[Any]) -> bool:
    """Return whether the format has a name for ``dtype`` that NumPy by itself has, too."""
    return dtype.name in SAFETENSORS_NAMES


def write(path: Path, tensors: Mapping[str, Array]) -> FileRecord:
    """Write a new file and wait until it is on the disk.

    Args:
        path: Where nothing is yet.
        tensors: C-contiguous arrays of dtypes that the format :func:`stores`.

    Raises:
        OSError: It cannot be written; an unfinished file stays.
    """
    header, end = {}, 0
    for key, array in tensors.items():
        begin, end = end, end + array.nbytes
        header[key] = {"dtype": SAFETENSORS_NAMES[array.dtype.name], "shape": array.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    size, checksum = 0, 0
    with named(path), open(path, "xb", buffering=0) as file:
        front = [memoryview(len(text).to_bytes(8, "little")), memoryview(text)]
        for piece in (*front, *map(_bytes_of, tensors.values())):
            for part in _cut(piece):
                checksum = zlib.crc32(part, checksum)
                size += len(part)
                _write_all(file, part)
        os.fsync(file.fileno())
    return FileRecord(size, _digits(checksum))


def read(path: Path, expected: FileRecord | None) -> dict[str, Array]:
    """Return the tensors of a file.

    Args:
        path: The file.
        expected: Its record; None where that is not known.

    Raises:
        DamagedCheckpointError: It is not there, not in the format, or unlike its record.
        OSError: It cannot be read.
    """
    try:
        with named(path), open_to_read(path) as file:
            size = os.fstat(file.fileno()).st_size
            if expected is not None and size != expected.bytes:
                raise DamagedCheckpointError(f"{path} is damaged: it has {size} bytes, expected {expected.bytes}")
            tensors, checksum = _read_tensors(file, size, path)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{path} is missing") from error
    except OSError as error:
        if error.errno == errno.EIO:
            raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error
        raise
    if expected is not None and _digits(checksum) != expected.crc32:
        raise DamagedCheckpointError(f"{path} is damaged: its CRC-32 is {_digits(checksum)}, expected {expected.crc32}")
    return tensors


def _read_tensors(file: FileIO, size: int, path: Path) -> tuple[dict[str, Array], int]:
    first = bytearray(8)
    checksum = _read_into(file, memoryview(first), 0, path)
    length = int.from_bytes(first, "little")
    if length > size - 8:
        raise DamagedCheckpointError(f"{path} is damaged: its header would end after the file")
    text = bytearray(length)
    checksum = _read_into(file, memoryview(text), checksum, path)
    tensors, end = {}, 0
    for key, dtype, shape, begin, stop in _entries(text, path):
        # Checked before memory is taken: a damaged header may ask for any amount.
        if begin != end or stop - begin != dtype.itemsize * math.prod(shape) or stop > size - 8 - length:
            raise DamagedCheckpointError(f"{path} is damaged: the place of {key!r} in it is impossible")
        array = np.empty(shape, dtype)
        checksum = _read_into(file, _bytes_of(array), checksum, path)
        tensors[key], end = array, stop
    if 8 + length + end != size:
        raise DamagedCheckpointError(f"{path} is damaged: it is longer than its header says")
    return tensors, checksum


def _entries(text: bytearray, path: Path) -> list[tuple[str, np.dtype[Any], tuple[int, ...], int, int]]:
    """Return key, dtype, shape, begin and end of each tensor, in the order of the file."""
    header = parse(text, f"the header of {path}")
    if not isinstance(header, dict):
        raise DamagedCheckpointError(f"{path} is damaged: its header is no dict")
    entries = []
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        check(HEADER_ENTRY(entry), key, header, f"the header of {path}")
        entries.append((key, _DTYPES[entry["dtype"]], tuple(entry["shape"]), *entry["data_offsets"]))
    return sorted(entries, key=lambda entry: entry[3:])


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _cut(data: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(data), _PIECE_BYTES):
        yield data[begin : begin + _PIECE_BYTES]


def _write_all(file: FileIO, data: memoryview) -> None:
    # A disk that fills up takes a part first, and raises for the rest.
    while data:
        written = file.write(data)
        data = data[written:]


def _read_into(file: FileIO, data: memoryview, checksum: int, path: Path) -> int:
    for part in _cut(data):
        rest = part
        while rest:
            count = file.readinto(rest)
            if not count:
                raise DamagedCheckpointError(f"{path} is damaged: it ends too early")
            rest = rest[count:]
        checksum = zlib.crc32(part, checksum)
    return checksum


def _digits(checksum: int) -> str:
    return f"{checksum:08x}"


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Let errors of reading and writing in the block say which file they are about."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def open_to_read(path: Path) -> FileIO:
    """Open a file of a checkpoint.

    Raises:
        DamagedCheckpointError: There is no regular file, but something else.
        OSError: It cannot be opened.
    """
    try:
        return FileIO(open_regular(path, os.O_RDONLY))
    except NotAFileError as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}") from error


def size_of(path: Path) -> int:
    """Return the size of a file of a checkpoint, which is not opened.

    Raises:
        DamagedCheckpointError: There is no regular file, but something else.
        OSError: It cannot be looked at.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise DamagedCheckpointError(f"{path} is damaged: {NotAFileError(path)}")
    return status.st_size
