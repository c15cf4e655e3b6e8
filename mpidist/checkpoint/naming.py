"""Which checkpoints a directory holds, in the order they were written."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from mpidist.checkpoint.storage import MANIFEST, read_manifest


def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """Return the path of the checkpoint of ``directory`` that was saved last (tf.train.latest_checkpoint).

    Only this process looks: on several ranks use ``Checkpoint.restore_latest(directory)``, where one rank looks for
    all. Which is the last one stands in the checkpoints; times and names do not count.

    Args:
        directory: Where ``Checkpoint.save("directory/name")`` wrote.

    Returns:
        The path, None where there is no checkpoint.

    Warns:
        UserWarning: A checkpoint whose manifest is damaged was left out.

    >>> latest_checkpoint("no/such/directory") is None
    True
    """
    found = checkpoints_in(Path(directory))
    return str(found[-1][1]) if found else None


def checkpoints_in(directory: Path) -> list[tuple[int, Path]]:
    """Return (sequence, path) of each checkpoint of ``directory``, those saved last at the end."""
    found = []
    # Names that begin with a dot are checkpoints that were not finished.
    for path in directory.glob("[!.]*/") if directory.is_dir() else ():
        if not (path / MANIFEST).is_file():
            continue
        try:
            manifest = read_manifest(path)
        except ValueError as error:
            warnings.warn(f"checkpoint {path} is left out: {error}", stacklevel=3)
            continue
        found.append((manifest.sequence, path))
    return sorted(found)


def numbered(prefix: str | os.PathLike[str], number: int) -> Path:
    """Return the path of save ``number``.

    Raises:
        ValueError: The prefix ends in a separator, so the checkpoint would have no name.
    """
    text = os.fspath(prefix)
    if not os.path.basename(text):
        raise ValueError(f"prefix is {text!r}; expected a name after the directory, such as {text + 'ckpt'!r}")
    return Path(f"{text}-{number}")
