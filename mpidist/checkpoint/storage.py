"""The checkpoint format: a directory of data.safetensors and manifest.json, written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.core.version import __version__

FORMAT = "mpidist checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
DATA = "data.safetensors"

# What safetensors and NumPy both have; everything else is stored as bytes.
_DIRECT = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """What the manifest says of one tensor.

    Attributes:
        shape: Of the tensor, whatever it is stored as.
        dtype: Name of its dtype, such as ``bfloat16``.
        stored_as: ``tensor``, or ``bytes``: a uint8 vector of its elements in C order, little-endian.
        file: The file of the directory that holds it, under the key of the tensor.
        synchronization: Of the variable, None for an array.
        aggregation: Of the variable, None for an array.
    """

    shape: tuple[int, ...]
    dtype: str
    stored_as: str
    file: str = DATA
    synchronization: str | None = None
    aggregation: str | None = None


@dataclass(frozen=True)
class Manifest:
    """What stands in manifest.json beside the format and its version.

    Attributes:
        sequence: Later checkpoints of one directory have greater numbers, whatever they are called.
        number: Of the save, as in its name.
        tensors: By key.
        values: Numbers, strings and None, by key.
    """

    sequence: int
    number: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return it in types that JSON has."""
        return {"format": FORMAT, "version": VERSION, "mpidist": __version__, **asdict(self)}

    @staticmethod
    def from_json(content: Any, source: str) -> Manifest:
        """Return the manifest that :meth:`to_json` gave.

        Raises:
            ValueError: It is no manifest of a version that this mpidist reads.
        """
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{source} is no manifest of an mpidist checkpoint; expected format {FORMAT!r}")
        if content.get("version") != VERSION:
            raise ValueError(
                f"{source} has format version {content.get('version')!r}, and mpidist {__version__} reads {VERSION}; "
                f"use the mpidist that wrote it, {content.get('mpidist')}, or a later one"
            )
        tensors = {
            key: Tensor(**{**entry, "shape": tuple(entry["shape"])}) for key, entry in content["tensors"].items()
        }
        return Manifest(content["sequence"], content["number"], tensors, content["values"])


def describe(array: Array, synchronization: str | None = None, aggregation: str | None = None) -> Tensor:
    """Return the manifest's entry for ``array``."""
    stored_as = "tensor" if array.dtype.name in _DIRECT else "bytes"
    return Tensor(array.shape, array.dtype.name, stored_as, DATA, synchronization, aggregation)


def dtype_of(tensor: Tensor) -> np.dtype[Any]:
    """Return the dtype of a tensor.

    Raises:
        ImportError: It is one of ml_dtypes, which is not installed.
    """
    try:
        return np.dtype(tensor.dtype)
    except TypeError:
        pass
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(
            f'the checkpoint holds {tensor.dtype}, which needs ml_dtypes; type: pip install "mpidist[half]"'
        ) from error
    extra: np.dtype[Any] = np.dtype(getattr(ml_dtypes, tensor.dtype))
    return extra


def write(path: Path, manifest: Manifest, arrays: dict[str, Array]) -> None:
    """Write a checkpoint; afterwards it is there completely, or (also after a crash) not at all.

    Args:
        path: The directory to be; a checkpoint that is there already is replaced.
        manifest: With an entry for each of ``arrays``.
        arrays: By key.

    Raises:
        FileExistsError: There is something else under ``path``.
        ImportError: safetensors is not installed.
        OSError: It cannot be written.
    """
    numpy_files = _safetensors()
    if path.exists() and not (path / MANIFEST).is_file():
        raise FileExistsError(f"{path} exists and is no checkpoint; expected a free name: move it away")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
    temporary.mkdir()
    try:
        encoded = {key: _encode(array, manifest.tensors[key]) for key, array in arrays.items()}
        numpy_files.save_file(encoded, temporary / DATA)
        _sync(temporary / DATA)
        with open(temporary / MANIFEST, "w", encoding="utf-8") as file:
            json.dump(manifest.to_json(), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync(temporary)
        _put(temporary, path)
    finally:
        # Only there after an error, which matters more than what cannot be removed.
        shutil.rmtree(temporary, ignore_errors=True)
    _sync(path.parent)


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint in directory ``path``.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: The manifest is damaged, or of another version.
    """
    file = path / MANIFEST
    if not file.is_file():
        raise FileNotFoundError(
            f"{path} is no checkpoint: it has no {MANIFEST}; expected a directory that Checkpoint.save() returned. "
            f"mpidist.checkpoint.latest_checkpoint(DIRECTORY) finds the newest one of a directory"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}; restore another checkpoint") from error
    return Manifest.from_json(content, str(file))


def read_arrays(path: Path, manifest: Manifest) -> dict[str, Array]:
    """Return all tensors of the checkpoint by key.

    Raises:
        ImportError: safetensors, or ml_dtypes for a dtype of its, is not installed.
        ValueError: The data are damaged, or do not fit the manifest.
        OSError: They cannot be read.
    """
    numpy_files = _safetensors()
    from safetensors import SafetensorError

    stored: dict[str, dict[str, Array]] = {}
    for name in sorted({tensor.file for tensor in manifest.tensors.values()}):
        try:
            stored[name] = numpy_files.load_file(path / name)
        except SafetensorError as error:
            raise ValueError(f"{path / name} is damaged: {error}; restore another checkpoint") from error
    return {key: _decode(path, key, stored[tensor.file], tensor) for key, tensor in manifest.tensors.items()}


def _encode(array: Array, tensor: Tensor) -> Array:
    # safetensors writes the memory as it lies, so it must be contiguous; ascontiguousarray would add an axis to 0-d.
    array = np.array(array, order="C", copy=not array.flags.c_contiguous)
    return array if tensor.stored_as == "tensor" else np.frombuffer(array.tobytes(), np.uint8)


def _decode(path: Path, key: str, stored: dict[str, Array], tensor: Tensor) -> Array:
    dtype = dtype_of(tensor)
    array = stored.get(key)
    if array is not None and tensor.stored_as == "bytes":
        size = dtype.itemsize * int(np.prod(tensor.shape))
        array = np.frombuffer(array.tobytes(), dtype).reshape(tensor.shape) if array.size == size else None
    if array is None or (array.shape, array.dtype) != (tensor.shape, dtype):
        raise ValueError(
            f"{path / tensor.file} does not fit {MANIFEST}: expected {key!r} of shape {tensor.shape} and dtype "
            f"{tensor.dtype}; restore another checkpoint"
        )
    return array


def _put(temporary: Path, path: Path) -> None:
    """Give the finished directory its name."""
    if not path.exists():
        temporary.rename(path)
        return
    # A directory cannot be renamed over one that is not empty.
    old = path.parent / f".{path.name}.{uuid.uuid4().hex}.old"
    path.rename(old)
    temporary.rename(path)
    # The new name must be on the disk before the old data go.
    _sync(path.parent)
    shutil.rmtree(old)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            'checkpoints need safetensors, which is not installed; type: pip install "mpidist[checkpoint]"'
        ) from error
    return safetensors.numpy
