"""Find the checkpoints of a directory, and name files that other libraries write."""

from __future__ import annotations

import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from mpidist.checkpoint import format as files
from mpidist.checkpoint.agreement import extended_of
from mpidist.checkpoint.format import MANIFEST, DamagedCheckpointError, FileRecord, Manifest
from mpidist.core.context import StrategyLike, get_strategy

_OUR_MANIFEST = re.compile(rb'"format":\s*"%b"' % files.FORMAT.encode())
_SMALLEST_FILE = 8  # the length of a header
_NUMBERED = re.compile(r".+-\d+")


# Finding ----------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """The checkpoints of a directory as they were saved. ``unusable`` has reasons by path."""

    checkpoints: list[tuple[Path, Manifest]] = field(default_factory=list)
    unusable: dict[str, str] = field(default_factory=dict)


def latest_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> str | None:
    """Return the path of the checkpoint of a directory that was saved last (tf.train.latest_checkpoint).

    Only this process looks. On several ranks use ``Checkpoint.restore_latest(directory)``, where one rank looks for
    all. The checkpoints themselves say which one is the last. Times and names do not count. Data files are not read,
    except for their sizes: ``restore_latest`` also detects altered ones, and restores the one before.

    Args:
        checkpoint_dir: Directory that ``Checkpoint.save("directory/name")`` wrote to.

    Returns:
        The path, or None without a checkpoint.

    Warns:
        UserWarning: A damaged checkpoint was skipped.

    >>> latest_checkpoint("no/such/directory") is None
    True
    """
    found = checkpoints_in(Path(checkpoint_dir))
    for path, reason in found.unusable.items():
        warnings.warn(f"checkpoint {path} is left out: {reason}", stacklevel=2)
    return str(found.checkpoints[-1][0]) if found.checkpoints else None


def checkpoints_in(directory: Path, accepts: Callable[[str], object] = bool) -> Found:
    """Return the checkpoints of ``directory`` whose names ``accepts`` accepts."""
    found = Found()
    for name in sorted(os.listdir(directory)) if directory.is_dir() else ():
        path = directory / name
        # Names of unfinished checkpoints begin with a dot.
        if name.startswith(".") or not accepts(name) or not path.is_dir():
            continue
        try:
            found.checkpoints.append((path, with_sizes(path, read_manifest(path))))
        except FileNotFoundError:
            # A directory of another program, or a copy whose manifest is lost or comes last.
            if any(path.glob(files.ALL_DATA)):
                found.unusable[str(path)] = f"{path / MANIFEST} is missing"
        except PermissionError as error:
            # Other accounts have directories too, such as lost+found.
            if _NUMBERED.fullmatch(name):
                found.unusable[str(path)] = f"it cannot be read: {error}"
        except ValueError as error:
            # Another process may have removed it since.
            if path.exists():
                found.unusable[str(path)] = str(error)
    found.checkpoints.sort(key=lambda entry: (entry[1].sequence, entry[1].saved_at, str(entry[0])))
    return found


def is_checkpoint(path: Path) -> bool:
    """Return whether a directory has a manifest of mpidist, damaged or not. Other programs use the name too."""
    try:
        return _OUR_MANIFEST.search(_first_bytes(path)) is not None
    except (FileNotFoundError, NotADirectoryError, DamagedCheckpointError):
        return False


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint in directory ``path``.

    Raises:
        FileNotFoundError: The directory has no manifest.
        DamagedCheckpointError: The manifest is damaged.
        ValueError: It has a later version.
    """
    file = path / MANIFEST
    try:
        with files.named(file), files.open_to_read(file) as stream:
            data = stream.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(
            f"{path} is no checkpoint: it has no {MANIFEST}; expected a directory that Checkpoint.save() returned. "
            f"mpidist.checkpoint.latest_checkpoint(DIRECTORY) finds the newest one of a directory"
        ) from error
    return Manifest.from_text(data, str(file))


def mark_of(path: Path) -> int | None:
    """Return a checksum that identifies a checkpoint, or None if it is not seen."""
    try:
        return zlib.crc32(_first_bytes(path))
    except (OSError, DamagedCheckpointError):
        return None


def _first_bytes(path: Path) -> bytes:
    """Return the beginning of a manifest, which has the checksum and the format."""
    with files.open_to_read(path / MANIFEST) as file:
        return file.read(1000)


def with_sizes(path: Path, manifest: Manifest) -> Manifest:
    """Return the manifest with records of exactly the files in use. No file is read.

    Raises:
        DamagedCheckpointError: A file is missing or has another size, or the parts of a tensor do not fit.
    """
    counts: dict[str, int] = {}
    for key, tensor in manifest.tensors.items():
        borders = [0]
        for part in tensor.parts:
            borders += [part.start, part.stop]
            counts[part.file] = counts.get(part.file, 0) + part.stop - part.start
        borders.append(tensor.size)
        # Consecutive parts: no more memory is allocated than the files can fill.
        if borders != sorted(borders) or borders[::2] != borders[1::2]:
            raise DamagedCheckpointError(
                f"{path} is damaged: the parts of {key!r} do not come to {tensor.size} elements"
            )
    records = {}
    for name, count in sorted(counts.items()):
        try:
            size = files.size_of(path / name)
        except FileNotFoundError as error:
            raise DamagedCheckpointError(f"{path / name} is missing") from error
        records[name] = record = manifest.files.get(name, FileRecord(size, ""))
        if size != record.bytes:
            raise DamagedCheckpointError(f"{path / name} is damaged: it has {size} bytes, expected {record.bytes}")
        if size < max(count, _SMALLEST_FILE):
            raise DamagedCheckpointError(f"{path / name} is damaged: it has {size} bytes for {count} elements")
    return replace(manifest, files=records)


# Files of other libraries, with the names that Keras uses (keras.src.distribute.distributed_file_utils) --------------


def write_dirpath(dirpath: str | os.PathLike[str], strategy: StrategyLike | None = None) -> str:
    """Return the directory in which this rank must write files of ``dirpath``.

    This is ``dirpath`` itself on the rank that writes checkpoints, and in a program of one process. On other ranks it
    is a directory in it, created here, which ``remove_temp_dirpath`` removes.

    Args:
        dirpath: Directory of the files to keep.
        strategy: Strategy whose ranks write, the current one by default.

    >>> write_dirpath("out")
    'out'
    """
    path = _temporary_path(dirpath, strategy)
    if path is None:
        return os.fspath(dirpath)
    os.makedirs(path, exist_ok=True)
    return path


def write_filepath(filepath: str | os.PathLike[str], strategy: StrategyLike | None = None) -> str:
    """Return the file that this rank must write instead of ``filepath``: see :func:`write_dirpath`.

    >>> write_filepath("out/model.npz")
    'out/model.npz'
    """
    directory, name = os.path.split(os.fspath(filepath))
    return os.path.join(write_dirpath(directory, strategy), name)


def remove_temp_dirpath(dirpath: str | os.PathLike[str], strategy: StrategyLike | None = None) -> None:
    """Remove this rank's temporary directory, if it has one.

    Args:
        dirpath: Argument or result of ``write_dirpath``.
        strategy: Strategy whose ranks write, the current one by default.
    """
    path = _temporary_path(dirpath, strategy)
    if path is not None and os.path.isdir(path):
        shutil.rmtree(path)


def remove_temp_dir_with_filepath(filepath: str | os.PathLike[str], strategy: StrategyLike | None = None) -> None:
    """Remove the temporary directory of an argument or result of ``write_filepath``."""
    remove_temp_dirpath(os.path.dirname(os.fspath(filepath)), strategy)


def _temporary_path(dirpath: str | os.PathLike[str], strategy: StrategyLike | None) -> str | None:
    """Return this rank's temporary directory, or None on the rank whose files stay."""
    extended = extended_of(strategy if strategy is not None else get_strategy())
    if not extended.spans_ranks or extended.should_checkpoint:
        return None
    path, name = os.fspath(dirpath), f"workertemp_{extended.input_workers().worker_id}"
    return path if os.path.basename(path) == name else os.path.join(path, name)
