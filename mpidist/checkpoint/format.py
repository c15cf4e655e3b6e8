"""The files of a checkpoint: manifest.json, and tensors in the safetensors format.

The safetensors library copies tensors before it writes them and computes no checksum, so this module writes the format.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import reprlib
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpidist.arrays.dtypes import Array, DType
from mpidist.core import __version__
from mpidist.core.files import NotAFileError, open_regular
from mpidist.core.options import VariableAggregation, VariableSynchronization
from mpidist.core.text import pip_install
from mpidist.values.placement import on_host

MANIFEST = "manifest.json"
FORMAT = "mpidist checkpoint"
VERSION = 4
# The data file of a single writer. Several writers have numbered files.
DATA = "data.safetensors"
ALL_DATA = "data*.safetensors"
# Each piece of this size has a checksum, so several ranks can read and check one file.
PIECE_BYTES = 4 << 20
# Keys and states of iterators are traversed recursively.
DEEPEST = 100

# Bytes are copied and summed in steps that stay in the CPU cache.
_STEP_BYTES = 1 << 20
_BEFORE_CHECKSUM = '{\n "checksum": "'
_NO_CHECKSUM = "0" * 8
_NUMPY_DTYPES = {
    np.dtype(code).name: np.dtype(code) for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
}
_ML_DTYPES = ("bfloat16", "float8_e5m2")
_SAFETENSORS_NAMES = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "uint8": "U8", "uint16": "U16",
    "uint32": "U32", "uint64": "U64", "float16": "F16", "float32": "F32", "float64": "F64",
}  # fmt: skip
_STORED_DTYPES = {name: np.dtype(dtype) for dtype, name in _SAFETENSORS_NAMES.items()}
_END_OF_COUNTS = 1 << 63
# NumPy's limits, which also hold for arrays without elements.
_MOST_DIMENSIONS = 32 if np.__version__.startswith("1.") else 64
_END_OF_ELEMENTS = _END_OF_COUNTS // max(dtype.itemsize for dtype in _NUMPY_DTYPES.values())


class DamagedCheckpointError(ValueError):
    """A checkpoint was truncated or altered, or files of it are missing; restore another one."""


# The manifest -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileRecord:
    """Size of a file, and the CRC-32 (zlib's) of each piece, eight hexadecimal digits each.

    A single CRC-32 is that of the whole file. Files of format version 1 have none.
    """

    bytes: int
    crc32: str

    @property
    def piece_bytes(self) -> int:
        """Size of the pieces."""
        return PIECE_BYTES if len(self.crc32) > 8 else self.bytes


@dataclass(frozen=True)
class TensorPart:
    """A file, and the elements ``[start:stop]`` of a flattened tensor in it."""

    file: str
    start: int
    stop: int


@dataclass(frozen=True)
class Tensor:
    """One tensor in the manifest.

    Attributes:
        shape: Logical shape of the tensor.
        dtype: Name of its dtype, such as ``bfloat16``.
        stored_as: ``tensor``, or ``bytes``: a uint8 vector of its elements in C order, little-endian.
        parts: Locations of its elements, under the tensor's key. A part of a tensor is stored as a vector.
        synchronization: Policy of a variable, None for an array.
        aggregation: Policy of a variable, None for an array.
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
    """The content of manifest.json, except for the format and its version.

    Attributes:
        sequence: Order of the checkpoints of a directory, whatever their names.
        number: Number of the save, counted by the Checkpoint.
        tensors: Tensors by key.
        values: Numbers, strings, None and states of iterators by key.
        containers: Lists, tuples and dicts by key: ``["list", size]``, ``["tuple", size]`` or ``["dict", names]``.
        iterators: Keys of the values that are states of iterators.
        files: Size and checksums of each data file.
        saved_at: Time of writing, in seconds since the epoch.
        kept: Time of the newest checkpoint that a manager keeps for good, or of the manager's start, and their names.
        writer: Host and process id of the writer.
        is_shared: Whether the ranks of a strategy saved it together.
        run_calls: Steps counted by PreemptionCheckpointHandlers, in all runs of the program.
        classes: Class names of optimizers by key.
        links: Further keys of variables, arrays and objects, and the key that holds them.
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
        """Return the manifest as types that JSON can hold."""
        return {"format": FORMAT, "version": VERSION, "mpidist": __version__, **asdict(self)}

    @staticmethod
    def from_json(content: object, source: str) -> Manifest:
        """Return the manifest in the result of :meth:`to_json`, of this or an earlier version.

        Raises:
            DamagedCheckpointError: It was altered.
            ValueError: A later version of the format.
        """
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise DamagedCheckpointError(f"{source} is no manifest of an mpidist checkpoint; expected {FORMAT!r}")
        version: Any = content.get("version")
        _check(type(version) is int and version > 0, "version", content, source)
        if version > VERSION:
            raise ValueError(
                f"{source} has format version {version!r}, and mpidist {__version__} reads 1 to {VERSION}; "
                f"use the mpidist that wrote it, {content.get('mpidist')}, or a later one"
            )
        _check_manifest(content, source)
        known = {name: value for name, value in content.items() if name in Manifest.__dataclass_fields__}
        writer, kept = content.get("writer"), content.get("kept")
        known.update(
            tensors={key: _tensor_from(entry) for key, entry in content["tensors"].items()},
            files={name: FileRecord(**record) for name, record in content.get("files", {}).items()},
            iterators=tuple(content.get("iterators", ())),
            writer=None if writer is None else tuple(writer),
            kept=None if kept is None else (kept[0], tuple(kept[1])),
        )
        return Manifest(**known)

    def to_text(self) -> str:
        """Return the text of manifest.json, which begins with the checksum of itself."""
        text = json.dumps({"checksum": _NO_CHECKSUM, **self.to_json()}, indent=1)
        return _with_checksum(text, _digits(zlib.crc32(text.encode())))

    @staticmethod
    def from_text(data: bytes, source: str) -> Manifest:
        """Return the manifest in the bytes of manifest.json; errors as for :meth:`from_json`."""
        content, text = parse(data, source), data.decode()
        if text.startswith(_BEFORE_CHECKSUM):
            found = _digits(zlib.crc32(_with_checksum(text, _NO_CHECKSUM).encode()))
            expected = content["checksum"]
            if found != expected:
                raise DamagedCheckpointError(f"{source} is damaged: its CRC-32 is {found}, expected {expected}")
        elif isinstance(content, dict) and content.get("version") in range(2, VERSION + 1):
            raise DamagedCheckpointError(f"{source} is damaged: it has no checksum")
        manifest = Manifest.from_json(content, source)
        if content["version"] > 1:  # version 1 has no records of files
            used = {part.file for tensor in manifest.tensors.values() for part in tensor.parts}
            _check(manifest.files.keys() >= used, "files", content, source)
        return manifest


def _digits(checksum: int) -> str:
    return f"{checksum:08x}"


def _with_checksum(text: str, checksum: str) -> str:
    begin = len(_BEFORE_CHECKSUM)
    return text[:begin] + checksum + text[begin + len(checksum) :]


def _tensor_from(entry: dict[str, Any]) -> Tensor:
    entry = {**entry, "shape": tuple(entry["shape"])}
    if "file" in entry:  # version 1
        file = entry.pop("file")
        return replace(Tensor(**entry), parts=(TensorPart(file, 0, math.prod(entry["shape"])),))
    return Tensor(**{**entry, "parts": tuple(TensorPart(**part) for part in entry["parts"])})


def describe(
    shape: tuple[int, ...], dtype: DType, synchronization: str | None = None, aggregation: str | None = None
) -> Tensor:
    """Return the manifest's entry for a tensor, without parts."""
    stored_as = "tensor" if dtype.name in _SAFETENSORS_NAMES else "bytes"
    return Tensor(shape, dtype.name, stored_as, (), synchronization, aggregation)


def dtype_of(tensor: Tensor) -> DType:
    """Return the dtype of a tensor, or raise ImportError if it needs ml_dtypes."""
    if tensor.dtype in _NUMPY_DTYPES:
        return _NUMPY_DTYPES[tensor.dtype]
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(
            f"the checkpoint holds {tensor.dtype}, which needs ml_dtypes; type: {pip_install('half')}"
        ) from error
    extra: DType = np.dtype(getattr(ml_dtypes, tensor.dtype))
    return extra


# Validation: a manifest may come from a stranger --------------------------------------------------------------------


def parse(data: bytes | bytearray, source: str) -> Any:
    """Return the content of a JSON text, or raise DamagedCheckpointError."""
    try:
        return json.loads(data.decode(), object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{source} is damaged: it cannot be read: {error}") from error


def _without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a name stands there twice")
    return content


def _check_manifest(content: dict[str, Any], source: str) -> None:
    """Raise DamagedCheckpointError if a field is missing or invalid; unknown fields are ignored."""
    for name in Manifest.__dataclass_fields__:
        is_required = name in ("sequence", "number", "tensors", "values")
        _check(_is_valid(name, content[name]) if name in content else not is_required, name, content, source)
    values, iterators = content["values"], set(content.get("iterators", ()))
    _check(values.keys() >= iterators, "iterators", content, source)
    _check(all(_is_plain(values[key]) for key in values.keys() - iterators), "values", content, source)


def _check(is_right: bool, name: str, content: Mapping[str, object], source: str) -> None:
    if not is_right:
        found = reprlib.repr(content[name]) if name in content else "missing"
        raise DamagedCheckpointError(
            f"{source} is damaged: its {name!r} is {found}. The file was changed after Checkpoint.save() wrote it. "
            "Restore another checkpoint"
        )


def _is_valid(name: str, value: object) -> bool:
    """Return whether ``value`` is valid as the field ``name`` of a manifest."""
    match name:
        case "sequence" | "number" | "run_calls":
            return _is_count(value)
        case "saved_at":
            return _is_time(value)
        case "is_shared":
            return type(value) is bool
        case "tensors":
            return _is_dict(value, _is_tensor)
        case "values":
            return _is_dict(value, is_state)
        case "containers":
            return _is_dict(value, _is_container)
        case "classes":
            return _is_dict(value, _is_text)
        case "links":
            return _is_dict(value, _is_key) and isinstance(value, dict) and not _leads_further(value)
        case "iterators":
            return _is_list(value, _is_key)
        case "files":
            return _is_dict(value, is_record) and isinstance(value, dict) and all(map(_is_file_name, value))
        case "kept":
            return value is None or _is_pair(value, _is_time, lambda names: _is_list(names, _is_text))
        case _:  # writer
            return value is None or _is_pair(value, _is_text, _is_count)


def _is_text(value: object) -> bool:
    return type(value) is str


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _END_OF_COUNTS


def _is_time(value: object) -> bool:
    return _is_count(value) or (type(value) is float and math.isfinite(value))


def _is_plain(value: object) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _is_key(value: object) -> bool:
    return type(value) is str and value.count("/") < DEEPEST


def _is_list(value: object, is_valid: Callable[[object], bool]) -> bool:
    return isinstance(value, list) and all(map(is_valid, value))


def _is_pair(value: object, is_first: Callable[[object], bool], is_second: Callable[[object], bool]) -> bool:
    return isinstance(value, list) and len(value) == 2 and is_first(value[0]) and is_second(value[1])


def _is_dict(value: object, is_valid: Callable[[object], bool]) -> bool:
    return isinstance(value, dict) and all(map(_is_key, value)) and all(map(is_valid, value.values()))


def is_state(value: object, depth: int = 0) -> bool:
    """Return whether ``value`` can be the state of an iterator."""
    if isinstance(value, (list, dict)) and depth < DEEPEST:
        return all(is_state(inner, depth + 1) for inner in (value.values() if isinstance(value, dict) else value))
    return _is_plain(value)


def is_record(value: object) -> bool:
    """Return whether ``value`` is a FileRecord as JSON."""
    if not isinstance(value, dict) or value.keys() != {"bytes", "crc32"} or not _is_count(value["bytes"]):
        return False
    crc32 = value["crc32"]
    if type(crc32) is not str or re.fullmatch("[0-9a-f]*", crc32) is None:
        return False
    return len(crc32) in (0, 8) or len(crc32) == 8 * -(-value["bytes"] // PIECE_BYTES)


def _is_file_name(value: object) -> bool:
    """Return whether a file lies in the directory of the checkpoint."""
    return type(value) is str and re.fullmatch(r"data(-[0-9]{5,10}-of-[0-9]{5,10})?\.safetensors", value) is not None


def _is_shape(value: object) -> bool:
    return (
        isinstance(value, list)
        and all(map(_is_count, value))
        and len(value) <= _MOST_DIMENSIONS
        and math.prod(max(1, extent) for extent in value) < _END_OF_ELEMENTS
    )


def _is_tensor(value: object) -> bool:
    names = {"shape", "dtype", "stored_as", "synchronization", "aggregation"}
    if not isinstance(value, dict) or not value.keys() > names or not _is_shape(value["shape"]):
        return False
    chosen = {name: value[name] for name in names - {"shape"}}
    choices: dict[str, tuple[str | None, ...]] = {
        "dtype": (*_NUMPY_DTYPES, *_ML_DTYPES),
        "stored_as": ("tensor", "bytes"),
        "synchronization": (None, *VariableSynchronization.__members__),
        "aggregation": (None, *VariableAggregation.__members__),
    }
    if not all((value is None or _is_text(value)) and value in choices[name] for name, value in chosen.items()):
        return False
    location = value.keys() - names
    if location == {"file"}:  # version 1
        return _is_file_name(value["file"])
    return location == {"parts"} and _is_list(value["parts"], _is_part)


def _is_part(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() != {"file", "start", "stop"}:
        return False
    return _is_file_name(value["file"]) and _is_count(value["start"]) and _is_count(value["stop"])


def _is_container(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    kind, content = value
    if kind != "dict":
        return kind in ("list", "tuple") and _is_count(content)
    # Keys that are equal as text would be one location.
    is_named = isinstance(content, list) and all(type(name) in (str, int, bool) for name in content)
    return is_named and len({str(name) for name in content}) == len(content)


def _leads_further(links: dict[str, str]) -> bool:
    """Return whether a link leads to, or into, another link."""
    prefixes = ("/".join(to.split("/")[: end + 1]) for to in links.values() for end in range(to.count("/") + 1))
    return any(prefix in links for prefix in prefixes)


# Data files -------------------------------------------------------------------------------------------------------


def write_tensors(path: Path, tensors: Mapping[str, Array]) -> FileRecord:
    """Write a new file of arrays, and wait until it is on the disk.

    Arrays on a device, and arrays that are not contiguous, are copied in small steps. An OSError leaves an unfinished
    file.
    """
    header, end = {}, 0
    for key, array in tensors.items():
        begin, end = end, end + array.nbytes
        name = _SAFETENSORS_NAMES.get(array.dtype.name)
        dtype, shape = ("U8", [array.nbytes]) if name is None else (name, array.shape)
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    size, checksum, checksums = 0, 0, ""
    with named(path), open(path, "xb", buffering=0) as file:
        for data in (data for array in (head, *tensors.values()) for data in _steps_of(array)):
            _write_all(file, data)
            while data:
                part = data[: PIECE_BYTES - size % PIECE_BYTES]
                checksum, size, data = zlib.crc32(part, checksum), size + len(part), data[len(part) :]
                if size % PIECE_BYTES == 0:
                    checksums, checksum = checksums + _digits(checksum), 0
        os.fsync(file.fileno())
    return FileRecord(size, checksums + _digits(checksum) if size % PIECE_BYTES else checksums)


def _steps_of(array: Array) -> Iterator[memoryview]:
    """Yield the bytes of an array in C order, in small steps."""
    is_here = isinstance(array, np.ndarray)
    flat = array.flat if is_here and not array.flags.c_contiguous else array.reshape(-1)
    step = _STEP_BYTES // array.dtype.itemsize
    for begin in range(0, array.size, step):
        part = flat[begin : begin + step]
        yield (part if is_here else on_host(part)).view(np.uint8).data


class Segment(NamedTuple):
    """Bytes ``[start:stop]`` of a file: whole pieces, the first ones with its header."""

    file: str
    start: int
    stop: int


def read_segment(path: Path, segment: Segment, record: FileRecord) -> Array:
    """Return bytes of a file of the checkpoint ``path``.

    Raises:
        DamagedCheckpointError: The file is missing, or has another size or checksum.
        OSError: It cannot be read.
    """
    place = path / segment.file
    try:
        with named(place), open_to_read(place) as file:
            found = os.fstat(file.fileno()).st_size
            # Checked before memory is allocated.
            if found != record.bytes:
                raise DamagedCheckpointError(f"{place} is damaged: it has {found} bytes, expected {record.bytes}")
            data = np.empty(segment.stop - segment.start, np.uint8)
            file.seek(segment.start)
            for start in range(segment.start, segment.stop, record.piece_bytes):
                begin, index = start - segment.start, start // record.piece_bytes
                checksum = _digits(_read_into(file, data.data[begin : begin + record.piece_bytes], place))
                expected = record.crc32[8 * index : 8 * index + 8]
                if expected and checksum != expected:
                    raise DamagedCheckpointError(
                        f"{place} is damaged: its CRC-32 is {checksum} from byte {start}, expected {expected}"
                    )
            return data
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{place} is missing") from error
    except OSError as error:
        if error.errno == errno.EIO:
            raise DamagedCheckpointError(f"{place} cannot be read: {error}") from error
        raise


def entries_of(data: Array, size: int, path: Path) -> dict[str, tuple[DType, int, int]]:
    """Return dtype, first byte and end of each tensor of a file from its header.

    Raises:
        DamagedCheckpointError: The header is invalid, or longer than ``data``.
    """
    begin_of_data = 8 + int.from_bytes(data[:8].tobytes(), "little")
    if begin_of_data > size:
        raise DamagedCheckpointError(f"{path} is damaged: its header would end after the file")
    if begin_of_data > data.size:
        raise DamagedCheckpointError(f"{path} is damaged: it has more than {MANIFEST} says")
    source = f"the header of {path}"
    header = parse(data[8:begin_of_data].tobytes(), source)
    if not isinstance(header, dict):
        raise DamagedCheckpointError(f"{path} is damaged: its header is no dict")
    header.pop("__metadata__", None)
    for key, entry in header.items():
        _check(_is_header_entry(entry), key, header, source)
    entries, end = {}, begin_of_data
    for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype = _STORED_DTYPES[entry["dtype"]]
        begin, stop = (begin_of_data + offset for offset in entry["data_offsets"])
        if begin != end or stop - begin != dtype.itemsize * math.prod(entry["shape"]) or stop > size:
            raise DamagedCheckpointError(f"{path} is damaged: the place of {key!r} in it is impossible")
        entries[key], end = (dtype, begin, stop), stop
    if end != size:
        raise DamagedCheckpointError(f"{path} is damaged: it is longer than its header says")
    return entries


def _is_header_entry(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        return False
    is_stored = _is_text(value["dtype"]) and value["dtype"] in _STORED_DTYPES
    return is_stored and _is_shape(value["shape"]) and _is_pair(value["data_offsets"], _is_count, _is_count)


def _write_all(file: FileIO, data: memoryview) -> None:
    # A disk that fills up writes a part first, and raises for the rest.
    while data:
        data = data[file.write(data) :]


def _read_into(file: FileIO, data: memoryview, path: Path) -> int:
    """Fill ``data`` from a file, and return its CRC-32."""
    checksum = 0
    for begin in range(0, len(data), _STEP_BYTES):
        rest = step = data[begin : begin + _STEP_BYTES]
        while rest:
            count = file.readinto(rest)
            if not count:
                raise DamagedCheckpointError(f"{path} is damaged: it ends too early")
            rest = rest[count:]
        checksum = zlib.crc32(step, checksum)
    return checksum


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Add the name of the file to errors of reading and writing."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def open_to_read(path: Path) -> FileIO:
    """Open a file of a checkpoint; raise DamagedCheckpointError if it is no regular file."""
    try:
        return FileIO(open_regular(path, os.O_RDONLY))
    except NotAFileError as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}") from error


def size_of(path: Path) -> int:
    """Return the size of a file without opening it. Raise DamagedCheckpointError if it is no regular file."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise DamagedCheckpointError(f"{path} is damaged: {NotAFileError(path)}")
    return status.st_size
