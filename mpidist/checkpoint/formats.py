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
from mpidist.core import __version__
from mpidist.core.files import NotAFileError, open_regular
from mpidist.core.text import pip_install
from mpidist.values.placement import on_host

MANIFEST = "manifest.json"
FORMAT = "mpidist checkpoint"
VERSION = 3
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
                f"{source} has format version {version!r}, and mpidist {__version__} reads 1 to {VERSION}; "
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
        return _with_checksum(text, digits(zlib.crc32(text.encode())))

    @staticmethod
    def from_text(data: bytes, source: str) -> Manifest:
        """Return the manifest in ``data``, the bytes of manifest.json.

        Raises:
            DamagedCheckpointError: They were altered.
            ValueError: They are of a later version than this mpidist reads.
        """
        content, text = parse(data, source), data.decode()
        if text.startswith(_BEFORE_CHECKSUM):
            found = digits(zlib.crc32(_with_checksum(text, _NO_CHECKSUM).encode()))
            expected = content["checksum"]
            if found != expected:
                raise DamagedCheckpointError(f"{source} is damaged: its CRC-32 is {found}, expected {expected}")
        elif isinstance(content, dict) and content.get("version") in (2, VERSION):
            raise DamagedCheckpointError(f"{source} is damaged: it has no checksum")
        manifest = Manifest.from_json(content, source)
        if content["version"] > 1:  # manifests of version 1 have no checksums
            used = {part.file for tensor in manifest.tensors.values() for part in tensor.parts}
            check(manifest.files.keys() >= used, "files", content, source)
        return manifest


def digits(checksum: int) -> str:
    """Return a CRC-32 as a manifest has it."""
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
    """Write a new file piece by piece, and wait until it is on the disk.

    Args:
        path: Where nothing is yet.
        tensors: Arrays on the host or a device; of those that are not contiguous, and of a device, pieces are copied.

    Raises:
        OSError: It cannot be written; an unfinished file stays.
    """
    header, end = {}, 0
    for key, array in tensors.items():
        begin, end = end, end + array.nbytes
        name = format_rules.SAFETENSORS_NAMES.get(array.dtype.name)
        dtype, shape = ("U8", [array.nbytes]) if name is None else (name, array.shape)
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    size, checksum = 0, 0
    with named(path), open(path, "xb", buffering=0) as file:
        for piece in (piece for array in (head, *tensors.values()) for piece in _pieces_of(array)):
            checksum = zlib.crc32(piece, checksum)
            size += len(piece)
            _write_all(file, piece)
        os.fsync(file.fileno())
    return FileRecord(size, digits(checksum))


def _pieces_of(array: Array) -> Iterator[memoryview]:
    """Yield the bytes of an array in C order, in small pieces."""
    is_here = isinstance(array, np.ndarray)
    flat = array.flat if is_here and not array.flags.c_contiguous else array.reshape(-1)
    step = _PIECE_BYTES // array.dtype.itemsize
    for begin in range(0, array.size, step):
        piece = flat[begin : begin + step]
        yield (piece if is_here else on_host(piece)).view(np.uint8).data


@dataclass(frozen=True)
class Segment:
    """Bytes ``[start:stop]`` of a file, which one rank reads; the first ones are its header."""

    file: str
    start: int
    stop: int


def read_segment(path: Path, segment: Segment, size: int) -> tuple[Array, int]:
    """Return bytes of a file, and their CRC-32.

    Args:
        path: The directory of the checkpoint.
        segment: The bytes.
        size: Of the whole file.

    Raises:
        DamagedCheckpointError: The file is not there, or has another size.
        OSError: It cannot be read.
    """
    place = path / segment.file
    try:
        with named(place), open_to_read(place) as file:
            found = os.fstat(file.fileno()).st_size
            # Checked before memory is taken.
            if found != size:
                raise DamagedCheckpointError(f"{place} is damaged: it has {found} bytes, expected {size}")
            data = np.empty(segment.stop - segment.start, np.uint8)
            file.seek(segment.start)
            return data, _read_into(file, data.data, place)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{place} is missing") from error
    except OSError as error:
        if error.errno == errno.EIO:
            raise DamagedCheckpointError(f"{place} cannot be read: {error}") from error
        raise


def entries_of(data: Array, size: int, path: Path) -> dict[str, tuple[DType, int, int]]:
    """Return dtype, first byte in the file and end of each tensor of a file.

    Args:
        data: The first bytes of the file, with all of its header.
        size: Of the file.
        path: The file.

    Raises:
        DamagedCheckpointError: It is not in the format.
    """
    length = int.from_bytes(data[:8].tobytes(), "little")
    begin_of_data = 8 + length
    if size < 8 or begin_of_data > size:
        raise DamagedCheckpointError(f"{path} is damaged: its header would end after the file")
    if begin_of_data > data.size:
        raise DamagedCheckpointError(f"{path} is damaged: it has more than {MANIFEST} says")
    entries, end = {}, begin_of_data
    for key, dtype, shape, begin, stop in _sorted_entries(data[8:begin_of_data].tobytes(), path):
        begin, stop = begin + begin_of_data, stop + begin_of_data
        if begin != end or stop - begin != dtype.itemsize * math.prod(shape) or stop > size:
            raise DamagedCheckpointError(f"{path} is damaged: the place of {key!r} in it is impossible")
        entries[key], end = (dtype, begin, stop), stop
    if end != size:
        raise DamagedCheckpointError(f"{path} is damaged: it is longer than its header says")
    return entries


def _sorted_entries(text: bytes, path: Path) -> list[tuple[str, DType, tuple[int, ...], int, int]]:
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


def _write_all(file: FileIO, data: memoryview) -> None:
    # A disk that fills up takes a part first, and raises for the rest.
    while data:
        data = data[file.write(data) :]


def _read_into(file: FileIO, data: memoryview, path: Path) -> int:
    checksum = 0
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
