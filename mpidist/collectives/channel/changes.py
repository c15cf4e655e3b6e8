"""LocalChanges: changes that a rank made to variables by itself since its last collective.

Copies of a variable drift apart if ranks assign different values, and no message shows it. So a checksum of the changed
variables is part of the id that opens the next collective, which costs no message.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

_MOST_LINES = 4


class _Change(NamedTuple):
    """The checksums of one variable before its first change and now, and the last act."""

    before: int
    now: int
    act: str


class LocalChanges:
    """The changed variables of this rank. A variable that has its old value again does not count.

    >>> mine, theirs = LocalChanges(), LocalChanges()
    >>> for changes in (mine, theirs):
    ...     changes.change("w", 17, 18, "assign of variable 'w' at train.py:7")
    >>> mine.checksum == theirs.checksum
    True
    >>> theirs.change("w", 18, 17, "assign of variable 'w' at train.py:9")
    >>> mine.checksum == theirs.checksum, theirs.checksum
    (False, 0)
    """

    def __init__(self) -> None:
        self._changes: dict[str, _Change] = {}

    def now(self, label: str) -> int | None:
        """Return the present checksum of a variable, or None if it is unknown."""
        return self._changes[label].now if label in self._changes else None

    def change(self, label: str, before: int, now: int, act: str) -> None:
        """Record the checksums of a variable before and after an act."""
        first = self._changes[label].before if label in self._changes else before
        self._changes[label] = _Change(first, now, act)

    def add(self, label: str, checksum: int, act: str) -> None:
        """Record an act with its value, if ranks can only compare their sequences of acts."""
        before = self._changes.get(label, _Change(0, 0, "")).now
        self._changes[label] = _Change(0, zlib.crc32(f"{before} {checksum}".encode()), act)

    def _changed(self) -> list[tuple[str, _Change]]:
        return [(label, change) for label, change in sorted(self._changes.items()) if change.now != change.before]

    @property
    def checksum(self) -> int:
        """Checksum of all changes; 0 if nothing has changed."""
        found = 0
        for label, change in self._changed():
            found = zlib.crc32(f"{label} {change.now}".encode(), found)
        return found

    @property
    def text(self) -> str:
        """The changes, for the error of ranks that differ."""
        changed = self._changed()
        lines = [f"{change.act} (checksum {change.now & 0xFFFFFFFF:08x})" for _, change in changed[:_MOST_LINES]]
        more = len(changed) - len(lines)
        return "; ".join([*lines, *([f"{more} more"] if more else [])])
