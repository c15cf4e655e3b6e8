"""LocalChanges: changes that a rank made to variables by itself since its last collective.

Copies of a variable drift apart if ranks assign different values, and no message shows it. So a checksum of the changed
variables is part of the id that opens the next collective, which costs no message. It is computed only then, because
checksums take several times as long as the assignments.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import NamedTuple

_MOST_LINES = 4


class _Change(NamedTuple):
    """Old content of a variable, function that returns its content, and last act."""

    before: bytes
    content: Callable[[], bytes]
    act: str


class LocalChanges:
    """The changed variables of this rank. A variable that has its old value again does not count.

    >>> mine, theirs, variable = LocalChanges(), LocalChanges(), bytearray(b"old")
    >>> for changes in (mine, theirs):
    ...     changes.change("w", b"old", lambda: bytes(variable), "assign of variable 'w' at train.py:7")
    >>> variable[:] = b"new"
    >>> mine.settled().text
    "assign of variable 'w' at train.py:7 (checksum 6be34445)"
    >>> variable[:] = b"old"
    >>> theirs.settled() is None
    True
    """

    def __init__(self) -> None:
        self._changes: dict[str, _Change] = {}
        # Checksum and last act by label.
        self._settled: dict[str, tuple[int, str]] = {}

    def before(self, label: str) -> bytes | None:
        """Return the old content of a changed variable, or None."""
        return self._changes[label].before if label in self._changes else None

    def change(self, label: str, before: bytes, content: Callable[[], bytes], act: str) -> None:
        """Record the content before an act, and a function that returns the content."""
        first = self.before(label)
        self._changes[label] = _Change(before if first is None else first, content, act)

    def add(self, label: str, checksum: int, act: str) -> None:
        """Record an act with its value, if ranks can only compare their sequences of acts."""
        before = self._settled.get(label, (0, ""))[0]
        self._settled[label] = zlib.crc32(f"{before} {checksum}".encode()), act

    def settled(self) -> LocalChanges | None:
        """Compute the checksums, at the next collective. Return None if nothing has changed in the end."""
        for label, change in self._changes.items():
            now = change.content()
            if now != change.before:
                self._settled[label] = zlib.crc32(now), change.act
        self._changes.clear()
        return self if self._settled else None

    @property
    def checksum(self) -> int:
        """Checksum of all settled changes."""
        found = 0
        for label, (checksum, _) in sorted(self._settled.items()):
            found = zlib.crc32(f"{label} {checksum}".encode(), found)
        return found

    @property
    def text(self) -> str:
        """The changes, for the error of ranks that differ."""
        changed = [each for _, each in sorted(self._settled.items())]
        lines = [f"{act} (checksum {checksum & 0xFFFFFFFF:08x})" for checksum, act in changed[:_MOST_LINES]]
        more = len(changed) - len(lines)
        return "; ".join([*lines, *([f"{more} more"] if more else [])])
