"""Find the checkpoint to read: the one named, or the newest undamaged one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from mpidist.checkpoint import storage
from mpidist.checkpoint.agreement import Agreement
from mpidist.checkpoint.format_rules import DamagedCheckpointError
from mpidist.checkpoint.formats import Manifest
from mpidist.checkpoint.shared_reading import Values, read_together
from mpidist.checkpoint.storage import Found


class Wanted(NamedTuple):
    """A checkpoint that the first rank wants to be read.

    Attributes:
        path: The checkpoint.
        manifest: Its manifest.
        sizes: Bytes of its files.
        unusable: Newer ones that cannot be used, and why.
    """

    path: Path
    manifest: Manifest
    sizes: dict[str, int]
    unusable: dict[str, str]


class Source(Protocol):
    """Where values come from."""

    def next(self, damage: str | None) -> Wanted | None:
        """Return the checkpoint to read, or None where there is none; on the first rank.

        Args:
            damage: Of the one before, which could not be used; None at first.

        Raises:
            DamagedCheckpointError: There is no other one.
        """

    def read(self, agreement: Agreement, path: Path, manifest: Manifest, sizes: dict[str, int]) -> Values:
        """Return the values of a checkpoint (collective).

        Args:
            agreement: Of the ranks.
            path: The checkpoint, as the first rank calls it.
            manifest: Its manifest.
            sizes: Bytes of its files.

        Raises:
            DamagedCheckpointError: Something of it is damaged; on all ranks.
        """


class OneCheckpoint:
    """One checkpoint and no other.

    Args:
        path: Of it.
    """

    read = staticmethod(read_together)

    def __init__(self, path: Path) -> None:
        self._path = path

    def next(self, damage: str | None) -> Wanted:
        """See ``Source``."""
        if damage is not None:
            raise DamagedCheckpointError(damage)
        manifest = storage.read_manifest(self._path)
        return Wanted(self._path, manifest, storage.check_sizes(self._path, manifest), {})


class Newest:
    """The newest checkpoint that is not damaged.

    Args:
        find: Returns those that are there.
    """

    read = staticmethod(read_together)

    def __init__(self, find: Callable[[], Found]) -> None:
        self._find = find
        self._found: Found | None = None
        self._last = Path()

    def next(self, damage: str | None) -> Wanted | None:
        """See ``Source``."""
        found = self._without_last(damage)
        while found.checkpoints:
            self._last, manifest = found.checkpoints.pop()
            try:
                return Wanted(self._last, manifest, storage.check_sizes(self._last, manifest), found.unusable)
            except DamagedCheckpointError as error:
                found = self._without_last(str(error))
        if found.unusable:
            reasons = "; ".join(found.unusable.values())
            raise DamagedCheckpointError(
                f"none of the checkpoints that are there can be used: {reasons}. To start from scratch, take another "
                "directory or move them away"
            )
        return None

    def _without_last(self, damage: str | None) -> Found:
        """Return those that are left, and may be usable."""
        if self._found is not None and damage is not None and self._last.exists():
            self._found.unusable[str(self._last)] = damage
        elif self._found is None or damage is not None:
            # At first; or the last one was removed by another process, which has saved a newer one before.
            self._found = self._find()
        return self._found


@dataclass
class Whole:
    """A checkpoint that is not damaged, as all ranks know it.

    Attributes:
        path: The checkpoint, as the first rank calls it.
        manifest: Its manifest.
        unusable: Newer ones that cannot be used, and why.
        values: Its tensors.
    """

    path: str
    manifest: Manifest
    unusable: dict[str, str]
    values: Values = field(repr=False)


def find_whole(agreement: Agreement, source: Source, check: Callable[[Path, Manifest], None]) -> Whole | None:
    """Return the first undamaged checkpoint of a source, or None (collective).

    Args:
        agreement: The ranks that read.
        source: The checkpoints.
        check: Raises DamagedCheckpointError if a state in the manifest is damaged. Called on the first rank.

    Raises:
        Exception: That of the source, on the first rank, or of reading, on the rank where that was.
        PeerError: The same, on the others.
    """
    damage: str | None = None

    def propose() -> tuple[str, dict[str, object], dict[str, int], dict[str, str]] | None:
        found = damage
        while (wanted := source.next(found)) is not None:
            try:
                check(wanted.path, wanted.manifest)
            except DamagedCheckpointError as error:
                found = str(error)
            else:
                return str(wanted.path), wanted.manifest.to_json(), wanted.sizes, wanted.unusable
        return None

    while True:
        answer = agreement.chief_does(propose)
        if answer is None:
            return None
        path, content, sizes, unusable = answer
        manifest = Manifest.from_json(content, path)
        try:
            return Whole(path, manifest, unusable, source.read(agreement, Path(path), manifest, sizes))
        except DamagedCheckpointError as error:
            damage = str(error)
