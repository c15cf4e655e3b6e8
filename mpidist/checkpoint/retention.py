"""Retention: which of a manager's checkpoints stay, and the removal of the others; on the rank that writes."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

from mpidist.checkpoint.leftovers import remove_checkpoint
from mpidist.checkpoint.manifest import Manifest
from mpidist.checkpoint.naming import Found

_SECONDS_PER_HOUR = 3600.0


class Retention:
    """The checkpoints that a manager may remove, those saved last at the end.

    Args:
        found: What the directory holds.
        max_to_keep: How many to keep; None for all.
        keep_every_hours: One per so many hours is kept for good; None for none.
    """

    def __init__(self, found: Found, max_to_keep: int | None, keep_every_hours: float | None) -> None:
        self._max_to_keep = max_to_keep
        self._keep_every_hours = keep_every_hours
        # What was kept before stands in the newest checkpoint that knows; without, the first interval begins now.
        known = [manifest.kept for _, manifest in found.checkpoints if manifest.kept is not None]
        self._kept = known[-1] if known else None if keep_every_hours is None else (time.time(), ())
        kept_names = self._kept[1] if self._kept is not None else ()
        self._saved_at = {
            str(path): manifest.saved_at for path, manifest in found.checkpoints if path.name not in kept_names
        }

    @property
    def checkpoints(self) -> list[str]:
        """The paths."""
        return list(self._saved_at)

    def forget(self, *paths: str) -> None:
        """Leave checkpoints alone from now on."""
        for path in paths:
            self._saved_at.pop(path, None)

    def kept_after(self, path: Path) -> tuple[float, tuple[str, ...]] | None:
        """Return what the manifest of the next checkpoint, ``path``, says of those that are kept for good."""
        return self._sorted_out({**self._without(path), str(path): time.time()})[1]

    def add(self, path: Path, manifest: Manifest) -> None:
        """Take in a new checkpoint, which is on the disk, and remove those that are too many.

        Warns:
            UserWarning: One cannot be removed.
        """
        self._saved_at = {**self._without(path), str(path): manifest.saved_at}
        surplus, self._kept = self._sorted_out(self._saved_at)
        for oldest, is_kept in surplus.items():
            self.forget(oldest)
            if is_kept:
                continue
            try:
                remove_checkpoint(Path(oldest))
            except OSError as error:
                warnings.warn(f"checkpoint {oldest}, an old one, cannot be removed: {error}", stacklevel=2)

    def _without(self, path: Path) -> dict[str, float]:
        # One that is replaced is the newest from now on.
        return {other: saved_at for other, saved_at in self._saved_at.items() if other != str(path)}

    def _sorted_out(self, saved_at: dict[str, float]) -> tuple[dict[str, bool], tuple[float, tuple[str, ...]] | None]:
        """Return the checkpoints that are too many, with whether each is kept for good, and ``kept`` after that."""
        count = 0 if self._max_to_keep is None else max(0, len(saved_at) - self._max_to_keep)
        surplus, kept = {}, self._kept
        for path in list(saved_at)[:count]:
            surplus[path] = kept is not None and self._is_due(saved_at[path], kept[0])
            if kept is not None and surplus[path]:
                kept = (saved_at[path], (*kept[1], Path(path).name))
        return surplus, kept

    def _is_due(self, saved_at: float, last: float) -> bool:
        return self._keep_every_hours is not None and saved_at - last >= self._keep_every_hours * _SECONDS_PER_HOUR
