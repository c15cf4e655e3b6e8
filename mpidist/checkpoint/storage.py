"""The checkpoint format on the disk: a directory of safetensors files and manifest.json, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.checkpoint import safetensors_file
from mpidist.checkpoint.errors import DamagedCheckpointError
from mpidist.checkpoint.files import open_to_read, size_of
from mpidist.checkpoint.manifest import FORMAT, Manifest, Part, Tensor, dtype_of
from mpidist.checkpoint.safetensors_file import FileRecord
from mpidist.checkpoint.writer_lock import WriterLock, is_held_here

MANIFEST = "manifest.json"
_OUR_MANIFEST = re.compile(rb'"format":\s*"%b"' % FORMAT.encode())
# Of a manifest: the checksum and the format are at its beginning.
_FIRST_BYTES = 1000


def _program_start() -> float:
    """Return when this process began, in seconds of the epoch, and rather a little too late than too early."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - (ticks + 1) / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def this_writer() -> tuple[str, int]:
    """Return what tells this process from others."""
    return socket.gethostname(), os.getpid()


class Writing:
    """A checkpoint that is being written, in a hidden directory beside its place.

    Only ``publish`` gives it its name, so that a crash leaves either all of it or nothing under that name.

    Args:
        path: The directory to be; a checkpoint that is there already is replaced.
        is_shared: Whether the ranks of a strategy save together.

    Raises:
        FileExistsError: There is something else under ``path``, or someone saves there at the same time.
        OSError: It cannot be written.
    """

    def __init__(self, path: Path, is_shared: bool) -> None:
        self.path = path
        if path.exists() and not is_checkpoint(path):
            raise FileExistsError(f"{path} exists and is no checkpoint; expected a free name: move it away")
        _make_directory(path.parent)
        try:
            self._lock = WriterLock(path)
        except BlockingIOError as error:
            if is_held_here(path):
                raise FileExistsError(
                    f"this process itself still saves checkpoint {path}, in a thread (async_save=True); expected one "
                    "save under a name at a time: call wait() of the Checkpoint that saves it first"
                ) from error
            raise FileExistsError(_two_writers(path, "another process")) from error
        try:
            if not is_shared:
                _check_sole_writer(path)
            # Opened now: once the checkpoint has its name, nothing may go wrong any more.
            self._parent = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
            self.directory = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
            try:
                self.directory.mkdir()
            except BaseException:
                os.close(self._parent)
                raise
        except BaseException:
            self._lock.release()
            raise
        self._is_open = True

    def publish(self, manifest: Manifest) -> None:
        """Write the manifest and give the checkpoint, whose files are all on the disk, its name.

        Raises:
            OSError: It could not be done; call ``discard``.
        """
        for name, record in manifest.files.items():
            _check_is_there(self.directory / name, record)
        file = self.directory / MANIFEST
        with safetensors_file.named(file), open(file, "xb") as stream:
            stream.write(manifest.to_text().encode())
            stream.flush()
            os.fsync(stream.fileno())
        _sync(self.directory)
        self._put()
        self._close()

    def _put(self) -> None:
        if not self.path.exists():
            self.directory.rename(self.path)
            _sync_names(self._parent)
            return
        # A directory cannot be renamed over one that is not empty.
        old = self.path.parent / f".{self.path.name}.{uuid.uuid4().hex}.old"
        self.path.rename(old)
        try:
            self.directory.rename(self.path)
        except BaseException:
            old.rename(self.path)
            raise
        # The new name must be on the disk before the old data go.
        _sync_names(self._parent)
        # What cannot be removed does not make the new one worse; the next manager removes it.
        with contextlib.suppress(OSError):
            # From now on it is no longer what is to be put back after a crash.
            doomed = old.with_suffix(".del")
            old.rename(doomed)
            shutil.rmtree(doomed)

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._parent)
            self._lock.release()

    def discard(self, names: Mapping[str, object] | tuple[str, ...]) -> None:
        """Remove what has been written so far; ``names`` are those of the files.

        What cannot be removed matters less than the error that led here; the next manager removes it.
        """
        if not self._is_open:
            return
        # By name: a process without file descriptors left could not list the directory.
        with contextlib.suppress(OSError):
            for name in (*names, MANIFEST):
                with contextlib.suppress(FileNotFoundError):
                    (self.directory / name).unlink()
            self.directory.rmdir()
        with contextlib.suppress(OSError):
            self._close()


def _make_directory(path: Path) -> None:
    """Make a directory and those above it, for good: their names are on the disk, too."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    path.mkdir(exist_ok=True)
    _sync(path.parent)


def _check_sole_writer(path: Path) -> None:
    """Raise where another process, which no strategy joins to this one, has saved under ``path`` in the meantime."""
    try:
        manifest = read_manifest(path)
    except (FileNotFoundError, ValueError):
        return
    is_own = manifest.writer is None or manifest.writer == this_writer()
    if not is_own and not manifest.is_shared and manifest.saved_at > _program_start():
        assert manifest.writer is not None
        host, process = manifest.writer
        raise FileExistsError(_two_writers(path, f"process {process} on host {host}"))


def _two_writers(path: Path, other: str) -> str:
    return (
        f"{other} saves checkpoint {path}, too; expected one writer: in a job of several ranks save in the scope of a "
        "strategy of all ranks (with strategy.scope(): checkpoint.save(...)), or on one rank only, or under a name for "
        "each rank"
    )


def _check_is_there(file: Path, record: FileRecord) -> None:
    """Raise unless this rank sees a file that another one may have written."""
    try:
        size = size_of(file)
    except FileNotFoundError:
        size = -1
    if size != record.bytes:
        seen = "is not there" if size < 0 else f"has {size} bytes"
        raise OSError(
            f"{file}, which a rank has written with {record.bytes} bytes, {seen} where the first rank looks; expected "
            "a directory that all ranks share: save to one, or without sharded=True"
        )


def is_checkpoint(path: Path) -> bool:
    """Whether it is a directory whose manifest is one of ours, damaged or not: other programs have such a file, too."""
    try:
        with open_to_read(path / MANIFEST) as file:
            return _OUR_MANIFEST.search(file.read(_FIRST_BYTES)) is not None
    except (FileNotFoundError, NotADirectoryError, DamagedCheckpointError):
        return False


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint in directory ``path``.

    Raises:
        FileNotFoundError: There is no checkpoint.
        DamagedCheckpointError: The manifest is damaged.
        ValueError: It is of another version.
    """
    file = path / MANIFEST
    try:
        with safetensors_file.named(file), open_to_read(file) as stream:
            data = stream.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(
            f"{path} is no checkpoint: it has no {MANIFEST}; expected a directory that Checkpoint.save() returned. "
            f"mpidist.checkpoint.latest_checkpoint(DIRECTORY) finds the newest one of a directory"
        ) from error
    return Manifest.from_text(data, str(file))


def check_sizes(path: Path, manifest: Manifest) -> None:
    """Raise DamagedCheckpointError where the files of a checkpoint cannot hold its tensors; reads none of them."""
    counts: dict[str, int] = {}
    for key, tensor in manifest.tensors.items():
        borders = [0]
        for part in tensor.parts:
            borders += [part.start, part.stop]
            counts[part.file] = counts.get(part.file, 0) + part.stop - part.start
        borders.append(tensor.size)
        # Part follows upon part, so that memory is taken only for what there is.
        if borders != sorted(borders) or borders[::2] != borders[1::2]:
            raise DamagedCheckpointError(
                f"{path} is damaged: the parts of {key!r} do not come to {tensor.size} elements"
            )
    for name, count in sorted(counts.items()):
        record = manifest.files.get(name)
        try:
            size = size_of(path / name)
        except FileNotFoundError as error:
            raise DamagedCheckpointError(f"{path / name} is missing") from error
        if record is not None and size != record.bytes:
            raise DamagedCheckpointError(f"{path / name} is damaged: it has {size} bytes, expected {record.bytes}")
        if size < count:
            raise DamagedCheckpointError(f"{path / name} is damaged: it has {size} bytes for {count} elements")


def read_arrays(path: Path, manifest: Manifest) -> dict[str, Array]:
    """Return all tensors of the checkpoint by key, after checking every byte of its files.

    Raises:
        ImportError: ml_dtypes, for a dtype of its, is not installed.
        DamagedCheckpointError: The data are damaged, or do not fit the manifest.
        OSError: They cannot be read.
    """
    check_sizes(path, manifest)
    dtypes = {key: dtype_of(tensor) for key, tensor in manifest.tensors.items()}
    by_file: dict[str, list[tuple[str, Part]]] = {}
    for key, tensor in manifest.tensors.items():
        for part in tensor.parts:
            by_file.setdefault(part.file, []).append((key, part))
    arrays: dict[str, Array] = {}
    for name, parts in sorted(by_file.items()):
        stored = safetensors_file.read(path / name, manifest.files.get(name))
        for key, part in parts:
            _place(arrays, key, manifest.tensors[key], dtypes[key], part, stored.pop(key, None), path)
    return arrays


def _place(
    arrays: dict[str, Array],
    key: str,
    tensor: Tensor,
    dtype: np.dtype[np.generic],
    part: Part,
    elements: Array | None,
    path: Path,
) -> None:
    """Put a part of a tensor where it belongs in ``arrays``."""
    count = part.stop - part.start
    if elements is not None:
        elements = elements.reshape(-1)
        if tensor.stored_as == "bytes" and elements.nbytes == count * dtype.itemsize:
            elements = elements.view(dtype)
    if elements is None or (elements.size, elements.dtype) != (count, dtype):
        raise DamagedCheckpointError(
            f"{path / part.file} does not fit {MANIFEST}: expected {count} elements of {key!r}, of shape "
            f"{tensor.shape} and dtype {tensor.dtype}; restore another checkpoint"
        )
    if count == tensor.size:
        arrays[key] = elements.reshape(tensor.shape)
        return
    if key not in arrays:
        arrays[key] = np.empty(tensor.shape, dtype)
    arrays[key].reshape(-1)[part.start : part.stop] = elements


def encode(array: Array, tensor: Tensor, part: Part) -> Array:
    """Return what the file holds of a tensor: its elements in C order, a copy only where they lie otherwise."""
    flat = array.reshape(-1)
    flat = flat if flat.flags.c_contiguous else flat.copy()
    if tensor.stored_as == "bytes":
        return flat.view(np.uint8)
    return flat.reshape(tensor.shape) if part.stop - part.start == tensor.size else flat


def _sync(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _sync_names(descriptor)
    finally:
        os.close(descriptor)


def _sync_names(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems write names at once, and know no such call for a directory.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
