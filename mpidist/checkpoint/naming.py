"""Which checkpoints a directory holds, in the order they were written."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mpidist.checkpoint.manifest import ALL_DATA, Manifest
from mpidist.checkpoint.storage import MANIFEST, check_sizes, read_manifest

_NUMBERED = re.compile(r".+-\d+")


@dataclass
class Found:
    """What a directory holds.

    Attributes:
        checkpoints: Paths and manifests, those saved last at the end.
        unusable: What cannot be read, and why, by path.
    """

    checkpoints: list[tuple[Path, Manifest]] = field(default_factory=list)
    unusable: dict[str, str] = field(default_factory=dict)


def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """Return the path of the checkpoint of ``directory`` that was saved last (tf.train.latest_checkpoint).

    Only this process looks: on several ranks use ``Checkpoint.restore_latest(directory)``, where one rank looks for
    all. Which is the last one stands in the checkpoints; times and names do not count. Their data are not read, but
    for their sizes: ``restore_latest`` also finds out what was altered, and takes the one before.

    Args:
        directory: Where ``Checkpoint.save("directory/name")`` wrote.

    Returns:
        The path, None where there is no checkpoint.

    Warns:
        UserWarning: A damaged checkpoint was left out.

    >>> latest_checkpoint("no/such/directory") is None
    True
    """
    found = checkpoints_in(Path(directory))
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
    """Add a directory to what was found, if it is a checkpoint."""
    try:
        manifest = read_manifest(path)
        check_sizes(path, manifest)
    except FileNotFoundError:
        # Other directories are none of ours; and the manifest of a copy under way comes last, or is lost.
        if any(path.glob(ALL_DATA)):
            found.unusable[str(path)] = f"{path / MANIFEST} is missing"
    except ValueError as error:
        # One that another process has removed in the meantime is none.
        if path.exists():
            found.unusable[str(path)] = str(error)
    else:
        found.checkpoints.append((path, manifest))


def numbered(prefix: str | os.PathLike[str], number: int) -> Path:
    """Return the path of save ``number``.

    Raises:
        ValueError: The checkpoint would have no name, or one that begins with a dot, by which it would not be found:
            those are of checkpoints that are not finished.
    """
    text = os.fspath(prefix)
    folder, name = os.path.split(text)
    if not name or name.startswith("."):
        better = os.path.join(text if name in ("", ".", "..") else folder, name.strip(".") or "ckpt")
        raise ValueError(
            f"the path of the checkpoint is {text!r}; expected a name after the directory that does not begin "
            f"with a dot, such as {better!r}"
        )
    return Path(f"{text}-{number}")
