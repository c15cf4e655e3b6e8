"""Manifest: content and files of a checkpoint, as the text of manifest.json."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from mpidist.checkpoint.format_rules import NUMPY_DTYPES, DamagedCheckpointError, check, check_manifest, parse
from mpidist.checkpoint.safetensors_file import FileRecord, stores
from mpidist.core.version import __version__
from mpidist.core.wording import pip_install

FORMAT = "mpidist checkpoint"
VERSION = 2
# The file of a checkpoint that one rank wrote; those of several have numbers.
DATA = "data.safetensors"
# That, or what several ranks write.
ALL_DATA = "data*.safetensors"

_BEFORE_CHECKSUM = '{\n "checksum": "'
_NO_CHECKSUM = "0" * 8


@dataclass(frozen=True)
class Part:
    """Some of the elements of a tensor, in C order: those from ``start`` to before ``stop``, and their file."""

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
    parts: tuple[Part, ...] = ()
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
    values: dict[str, Any]
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

    def to_json(self) -> dict[str, Any]:
        """Return it in types that JSON has."""
        return {"format": FORMAT, "version": VERSION, "mpidist": __version__, **asdict(self)}

    @staticmethod
    def from_json(content: Any, source: str) -> Manifest:
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
        check_manifest(content, source)
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
        content = {"checksum": _NO_CHECKSUM, **self.to_json()}
        text = json.dumps(content, indent=1)
        return _with_checksum(text, _checksum(text))

    @staticmethod
    def from_text(data: bytes, source: str) -> Manifest:
        """Return the manifest that ``data``, the bytes of manifest.json, say.

        Raises:
            DamagedCheckpointError: They were altered.
            ValueError: They are of a later version than this mpidist reads.
        """
        content, text = parse(data, source), data.decode()
        if text.startswith(_BEFORE_CHECKSUM):
            found, expected = _checksum(_with_checksum(text, _NO_CHECKSUM)), content["checksum"]
            if found != expected:
                raise DamagedCheckpointError(f"{source} is damaged: its CRC-32 is {found}, expected {expected}")
        elif isinstance(content, dict) and content.get("version") == VERSION:
            raise DamagedCheckpointError(f"{source} is damaged: it has no checksum")
        manifest = Manifest.from_json(content, source)
        if content["version"] == VERSION:  # those of version 1 knew no checksums
            used = {part.file for tensor in manifest.tensors.values() for part in tensor.parts}
            check(manifest.files.keys() >= used, "files", content, source)
        return manifest


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _with_checksum(text: str, checksum: str) -> str:
    begin = len(_BEFORE_CHECKSUM)
    return text[:begin] + checksum + text[begin + len(checksum) :]


def _tensor(entry: dict[str, Any]) -> Tensor:
    entry = {**entry, "shape": tuple(entry["shape"])}
    if "file" in entry:  # version 1
        file = entry.pop("file")
        whole = Tensor(**entry)
        return replace(whole, parts=(Part(file, 0, whole.size),))
    return Tensor(**{**entry, "parts": tuple(Part(**part) for part in entry["parts"])})


def describe(
    shape: tuple[int, ...], dtype: np.dtype[Any], synchronization: str | None = None, aggregation: str | None = None
) -> Tensor:
    """Return the manifest's entry for a tensor, as yet without parts."""
    return Tensor(shape, dtype.name, "tensor" if stores(dtype) else "bytes", (), synchronization, aggregation)


def dtype_of(tensor: Tensor) -> np.dtype[Any]:
    """Return the dtype of a tensor.

    Raises:
        ImportError: It is one of ml_dtypes, which is not installed.
    """
    if tensor.dtype in NUMPY_DTYPES:
        return NUMPY_DTYPES[tensor.dtype]
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(
            f"the checkpoint holds {tensor.dtype}, which needs ml_dtypes; type: {pip_install('half')}"
        ) from error
    extra: np.dtype[Any] = np.dtype(getattr(ml_dtypes, tensor.dtype))
    return extra
