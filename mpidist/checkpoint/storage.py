"""Find the checkpoints of a directory, in the order they were written, and read them."""

from __future__ import annotations

import os
import re
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mpidist.checkpoint import formats
from mpidist.checkpoint.format_rules import DamagedCheckpointError
from mpidist.checkpoint.formats import MANIFEST, Manifest

_OUR_MANIFEST = re.compile(rb'"format":\s*"%b"' % formats.FORMAT.encode())
# Of a manifest: the checksum and the format are at its beginning.
_FIRST_BYTES = 1000
# The length of a header, and nothing else.
_SMALLEST_FILE = 8
_NUMBERED = re.compile(r".+-\d+")


@dataclass
class Found:
    """The checkpoints of a directory.

    Attributes:
        checkpoints: Paths and manifests, those saved last at the end.
        unusable: Why others cannot be read, by path.
    """

    checkpoints: list[tuple[Path, Manifest]] = field(default_factory=list)
    unusable: dict[str, str] = field(default_factory=dict)


def latest_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> str | None:
    """Return the path of the checkpoint of a folder that was saved last (tf.train.latest_checkpoint).

    Only this process looks: on several ranks use ``Checkpoint.restore_latest(directory)``, where one rank looks for
    all. Which is the last one stands in the checkpoints; times and names do not count. Their data are not read, but
    for their sizes: ``restore_latest`` also notices altered ones, and takes the one before.

    Args:
        checkpoint_dir: Where ``Checkpoint.save("directory/name")`` wrote.

    Returns:
        The path, None where there is no checkpoint.

    Warns:
        UserWarning: A damaged checkpoint was left out.

    >>> latest_checkpoint("no/such/directory") is None
    True
    """
    found = checkpoints_in(Path(checkpoint_dir))
    for path, reason in found.unusable.items():
        warnings.warn(f"checkpoint {path} is left out: {reason}", stacklevel=2)
    return str(found.checkpoints[-1][0]) if found.checkpoints else None


def checkpoints_in(directory: Path, accepts: Callable[[str], object] = bool) -> Found:
    """Return the checkpoints of ``directory`` whose names ``accepts`` accepts.

    Raises:
        OSError: The directory cannot be read.
    """
    found = Found()
    for name in sorted(os.listdir(directory)) if directory.is_dir() else ():
        # Names that begin with a dot are checkpoints that were not finished.
        if name.startswith(".") or not accepts(name) or not (directory / name).is_dir():
            continue
        try:
            _look_at(directory / name, found)
        except PermissionError as error:
            # Other accounts have directories, too, such as lost+found: by its name it may be a checkpoint, or not.
            if _NUMBERED.fullmatch(name):
                found.unusable[str(directory / name)] = f"it cannot be read: {error}"
    found.checkpoints.sort(key=lambda entry: (entry[1].sequence, entry[1].saved_at, str(entry[0])))
    return found


def _look_at(path: Path, found: Found) -> None:
    """Add a directory to those found, if it is a checkpoint."""
    try:
        manifest = read_manifest(path)
        check_sizes(path, manifest)
    except FileNotFoundError:
        # Other directories are none of ours; and the manifest of a copy under way comes last, or is lost.
        if any(path.glob(formats.ALL_DATA)):
            found.unusable[str(path)] = f"{path / MANIFEST} is missing"
    except ValueError as error:
        # One that another process has removed in the meantime is none.
        if path.exists():
            found.unusable[str(path)] = str(error)
    else:
        found.checkpoints.append((path, manifest))


# One checkpoint ---------------------------------------------------------------------------------------------------


def is_checkpoint(path: Path) -> bool:
    """Return whether a directory has a manifest of ours, damaged or not.

    Other programs have a file of this name, too.
    """
    try:
        with formats.open_to_read(path / MANIFEST) as file:
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
        with formats.named(file), formats.open_to_read(file) as stream:
            data = stream.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(
            f"{path} is no checkpoint: it has no {MANIFEST}; expected a directory that Checkpoint.save() returned. "
            f"mpidist.checkpoint.latest_checkpoint(DIRECTORY) finds the newest one of a directory"
        ) from error
    return Manifest.from_text(data, str(file))


def mark_of(path: Path) -> int | None:
    """Return a number that tells one checkpoint from another, None where none is seen."""
    try:
        with formats.open_to_read(path / MANIFEST) as file:
            return zlib.crc32(file.read(_FIRST_BYTES))
    except (OSError, DamagedCheckpointError):
        return None  # whoever does not see it reads nothing of it


def check_sizes(path: Path, manifest: Manifest) -> dict[str, int]:
    """Return the sizes of the files, none of which is read.

    Raises:
        DamagedCheckpointError: They are too small for the tensors.
    """
    counts: dict[str, int] = {}
    sizes: dict[str, int] = {}
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
            size = formats.size_of(path / name)
        except FileNotFoundError as error:
            raise DamagedCheckpointError(f"{path / name} is missing") from error
        if record is not None and size != record.bytes:
            raise DamagedCheckpointError(f"{path / name} is damaged: it has {size} bytes, expected {record.bytes}")
        if size < max(count, _SMALLEST_FILE):
            raise DamagedCheckpointError(f"{path / name} is damaged: it has {size} bytes for {count} elements")
        sizes[name] = size
    return sizes
