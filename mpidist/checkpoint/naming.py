"""Which checkpoints a directory holds, in the order they were written."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mpidist.checkpoint.manifest import ALL_DATA, Manifest
from mpidist.checkpoint.storage import MANIFEST, check_sizes, read_manifest


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
    """Return the checkpoints of ``directory`` whose names ``accepts`` accepts."""
    found = Found()
    # Names that begin with a dot are checkpoints that were not finished.
    for path in sorted(directory.glob("[!.]*/")) if directory.is_dir() else ():
        if not accepts(path.name):
            continue
        if not (path / MANIFEST).is_file():
            # Other directories are none of ours; and the manifest of a copy under way comes last, or is lost.
            if any(path.glob(ALL_DATA)):
                found.unusable[str(path)] = f"{path / MANIFEST} is missing"
            continue
        try:
            manifest = read_manifest(path)
            check_sizes(path, manifest)
        except (FileNotFoundError, ValueError) as error:
            # One that another process has removed in the meantime is none.
            if path.exists():
                found.unusable[str(path)] = str(error)
        else:
            found.checkpoints.append((path, manifest))
    found.checkpoints.sort(key=lambda entry: (entry[1].sequence, entry[1].saved_at, str(entry[0])))
    return found


def numbered(prefix: str | os.PathLike[str], number: int) -> Path:
    """Return the path of save ``number``.

    Raises:
        ValueError: The prefix ends in a separator, so the checkpoint would have no name.
    """
    text = os.fspath(prefix)
    if not os.path.basename(text):
        raise ValueError(f"prefix is {text!r}; expected a name after the directory, such as {text + 'ckpt'!r}")
    return Path(f"{text}-{number}")
