"""The files of a checkpoint: manifest.json, and tensors in the safetensors format.

Tensors are written in one pass with their checksum, and read with every byte checked: the safetensors library copies
them before it writes, and knows no checksum.
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
from dataclasses import asdict, dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from mpidist.arrays.dtypes import Array, DType
from mpidist.checkpoint import format_rules
from mpidist.checkpoint.format_rules import DamagedCheckpointError, check, parse
from mpidist.core.files import NotAFileError, open_regular
from mpidist.core.version import __version__
from mpidist.core.wording import pip_install

MANIFEST = "manifest.json"
FORMAT = "mpidist checkpoint"
VERSION = 2
# The file of a checkpoint that one rank wrote; those of several have numbers.
DATA = "data.safetensors"
# That, or what several ranks write.
ALL_DATA = "data*.safetensors"

_BEFORE_CHECKSUM = '{\n "checksum": "'
_NO_CHECKSUM = "0" * 8
_DTYPES = {name: np.dtype(dtype) for dtype, name in format_rules.SAFETENSORS_NAMES.items()}
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


@dataclass(frozen=True)
class TensorPart:
    """A file, and the elements ``[start:stop]`` of a flattened tensor that are in it."""

    file: str
    start: int
    stop: int


@dataclass(frozen=True)
class Tensor:
    """One tensor in the manifest.

    Attributes:
        shape: Of the tensor, whatever it is stored as.
        dtype: Name of its dtype, such as ``bfloat16``.
        stored_as: ``tensor``, or ``bytes``: a uint8 vector of its elements in C order, little-endian.
        parts: Where its elements are, under the key of the tensor; a part of a tensor is stored as a vector.
        synchronization: Of the variable, None for an array.
        aggregation: Of the variable, None for an array.
    """

    shape: tuple[int, ...]
    dtype: str
    stored_as: str
    parts: tuple[TensorPart, ...] = ()
    synchronization: str | None = None
    aggregation: str | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json beside the format and its version.

    Attributes:
        sequence: Later checkpoints of one directory have greater numbers, whatever they are called.
        number: Of the save, counted by the Checkpoint.
        run_calls: Steps that PreemptionCheckpointHandlers have counted, in all runs of the program.
        tensors: By key.
        values: Numbers, strings and None, and the states of iterators, by key.
        containers: Lists, tuples and dicts by key: ``["list", size]``, ``["tuple", size]`` or ``["dict", names]``.
        iterators: Which of the values are states of iterators.
        files: By name.
        saved_at: When it was written, in seconds of the epoch.
        kept: Of its manager: when the newest of the checkpoints that it keeps for good was saved, or when it began
            to count, and their names; None without.
        writer: Host and process id of the one that wrote it.
        is_shared: Whether it was saved by the ranks of a strategy together.
        classes: Names of the classes of optimizers, by key; empty in checkpoints of before.
        links: By key, the key under which a thing is held: variables, arrays and objects with several paths.
    """

    sequence: int
    number: int
    tensors: dict[str, Tensor]
    values: dict[str, object]
    containers: dict[str, Any] = field(default_factory=dict)
    iterators: tuple[str, ...] = ()
    files: dict[str, FileRecord] = field(default_factory=dict)
    saved_at: float = 0.0
    kept: tuple[float, tuple[str, ...]] | None = None
    writer: tuple[str, int] | None = None
    is_shared: bool = True
    run_calls: int = 0
    classes: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Return it in types that JSON has."""
        return {"format": FORMAT, "version": VERSION, "mpidist": __version__, **asdict(self)}

    @staticmethod
    def from_json(content: object, source: str) -> Manifest:
        """Return the manifest that :meth:`to_json` gave, or that of version 1.

        Raises:
            DamagedCheckpointError: It was altered.
            ValueError: It is of a later version than this mpidist reads.
        """
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise DamagedCheckpointError(f"{source} is no manifest of an mpidist checkpoint; expected {FORMAT!r}")
        version: Any = content.get("version")
        check(type(version) is int and version > 0, "version", content, source)
        if version > VERSION:
            raise ValueError(
                f"{source} has format version {version!r}, and mpidist {__version__} reads 1 and {VERSION}; "
                f"use the mpidist that wrote it, {content.get('mpidist')}, or a later one"
            )
        format_rules.check_manifest(content, source)
        known = {name: value for name, value in content.items() if name in Manifest.__dataclass_fields__}
        writer, kept = content.get("writer"), content.get("kept")
        return replace(
            Manifest(**known),
            tensors={key: _tensor(entry) for key, entry in content["tensors"].items()},
            files={name: FileRecord(**record) for name, record in content.get("files", {}).items()},
            iterators=tuple(content.get("iterators", ())),
            writer=None if writer is None else (writer[0], writer[1]),
            kept=None if kept is None else (kept[0], tuple(kept[1])),
        )

    def to_text(self) -> str:
        """Return the text of manifest.json, which begins with the checksum of itself."""
        text = json.dumps({"checksum": _NO_CHECKSUM, **self.to_json()}, indent=1)
        return _with_checksum(text, _digits(zlib.crc32(text.encode())))

    @staticmethod
    def from_text(data: bytes, source: str) -> Manifest:
        """Return the manifest in ``data``, the bytes of manifest.json.

        Raises:
            DamagedCheckpointError: They were altered.
            ValueError: They are of a later version than this mpidist reads.
        """
        content, text = parse(data, source), data.decode()
        if text.startswith(_BEFORE_CHECKSUM):
            found = _digits(zlib.crc32(_with_checksum(text, _NO_CHECKSUM).encode()))
            expected = content["checksum"]
            if found != expected:
                raise DamagedCheckpointError(f"{source} is damaged: its CRC-32 is {found}, expected {expected}")
        elif isinstance(content, dict) and content.get("version") == VERSION:
            raise DamagedCheckpointError(f"{source} is damaged: it has no checksum")
        manifest = Manifest.from_json(content, source)
        if content["version"] == VERSION:  # those of version 1 knew no checksums
            used = {part.file for tensor in manifest.tensors.values() for part in tensor.parts}
            check(manifest.files.keys() >= used, "files", content, source)
        return manifest


def _digits(checksum: int) -> str:
    return f"{checksum:08x}"


def _with_checksum(text: str, checksum: str) -> str:
    begin = len(_BEFORE_CHECKSUM)
    return text[:begin] + checksum + text[begin + len(checksum) :]


def _tensor(entry: dict[str, Any]) -> Tensor:
    entry = {**entry, "shape": tuple(entry["shape"])}
    if "file" in entry:  # version 1
        file = entry.pop("file")
        whole = Tensor(**entry)
        return replace(whole, parts=(TensorPart(file, 0, whole.size),))
    return Tensor(**{**entry, "parts": tuple(TensorPart(**part) for part in entry["parts"])})


def describe(
    shape: tuple[int, ...], dtype: DType, synchronization: str | None = None, aggregation: str | None = None
) -> Tensor:
    """Return the manifest's entry for a tensor, as yet without parts."""
    stored_as = "tensor" if dtype.name in format_rules.SAFETENSORS_NAMES else "bytes"
    return Tensor(shape, dtype.name, stored_as, (), synchronization, aggregation)


def dtype_of(tensor: Tensor) -> DType:
    """Return the dtype of a tensor.

    Raises:
        ImportError: It is one of ml_dtypes, which is not installed.
    """
    if tensor.dtype in format_rules.NUMPY_DTYPES:
        return format_rules.NUMPY_DTYPES[tensor.dtype]
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(
            f"the checkpoint holds {tensor.dtype}, which needs ml_dtypes; type: {pip_install('half')}"
        ) from error
    extra: DType = np.dtype(getattr(ml_dtypes, tensor.dtype))
    return extra


# Tensors ----------------------------------------------------------------------------------------------------------


def write_tensors(path: Path, tensors: Mapping[str, Array]) -> FileRecord:
    """Write a new file and wait until it is on the disk.

    Args:
        path: Where nothing is yet.
        tensors: C-contiguous arrays of dtypes for which the format has a name.

    Raises:
        OSError: It cannot be written; an unfinished file stays.
    """
    header, end = {}, 0
    for key, array in tensors.items():
        begin, end = end, end + array.nbytes
        name = format_rules.SAFETENSORS_NAMES[array.dtype.name]
        header[key] = {"dtype": name, "shape": array.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    size, checksum = 0, 0
    with named(path), open(path, "xb", buffering=0) as file:
        for data in (memoryview(len(text).to_bytes(8, "little") + text), *map(_bytes_of, tensors.values())):
            for begin in range(0, len(data), _PIECE_BYTES):
                piece = data[begin : begin + _PIECE_BYTES]
                checksum = zlib.crc32(piece, checksum)
                size += len(piece)
                _write_all(file, piece)
        os.fsync(file.fileno())
    return FileRecord(size, _digits(checksum))


def read_tensors(path: Path, expected: FileRecord | None) -> dict[str, Array]:
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
            tensors, checksum = _read_all(file, size, path)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{path} is missing") from error
    except OSError as error:
        if error.errno == errno.EIO:
            raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error
        raise
    if expected is not None and _digits(checksum) != expected.crc32:
        raise DamagedCheckpointError(f"{path} is damaged: its CRC-32 is {_digits(checksum)}, expected {expected.crc32}")
    return tensors


def _read_all(file: FileIO, size: int, path: Path) -> tuple[dict[str, Array], int]:
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


def _entries(text: bytearray, path: Path) -> list[tuple[str, DType, tuple[int, ...], int, int]]:
    """Return key, dtype, shape, begin and end of each tensor, in the file's order."""
    header = parse(text, f"the header of {path}")
    if not isinstance(header, dict):
        raise DamagedCheckpointError(f"{path} is damaged: its header is no dict")
    entries = []
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        check(format_rules.HEADER_ENTRY(entry), key, header, f"the header of {path}")
        entries.append((key, _DTYPES[entry["dtype"]], tuple(entry["shape"]), *entry["data_offsets"]))
    return sorted(entries, key=lambda entry: entry[3:])


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _write_all(file: FileIO, data: memoryview) -> None:
    # A disk that fills up takes a part first, and raises for the rest.
    while data:
        data = data[file.write(data) :]


def _read_into(file: FileIO, data: memoryview, checksum: int, path: Path) -> int:
    for begin in range(0, len(data), _PIECE_BYTES):
        rest = piece = data[begin : begin + _PIECE_BYTES]
        while rest:
            count = file.readinto(rest)
            if not count:
                raise DamagedCheckpointError(f"{path} is damaged: it ends too early")
            rest = rest[count:]
        checksum = zlib.crc32(piece, checksum)
    return checksum


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Name the file in errors of reading and writing in the block."""
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
