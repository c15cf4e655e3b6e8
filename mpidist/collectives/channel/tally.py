"""Tally: changes of one rank since its last collective, to be alike on all ranks.

Copies of a variable drift apart where ranks assign different values to them, and no message passes. So checksums of
the changed things travel with the next collective, in the number that opens it (``handshake``), which costs no message.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

# Those that a report shows.
_MOST_LINES = 4


class _Change(NamedTuple):
    """The change of one thing: its checksum at first and now, and the last act."""

    before: int
    now: int
    act: str


class Tally:
    """The things that were changed, each with a checksum of how it is now.

    One that is again as it was does not count: a rank may go to averaged weights and back.

    >>> mine, theirs = Tally(), Tally()
    >>> for tally in (mine, theirs):
    ...     tally.change("w", 17, 18, "assign of variable 'w' at train.py:7")
    >>> mine.identity == theirs.identity
    True
    >>> theirs.change("w", 18, 17, "assign of variable 'w' at train.py:9")
    >>> mine.identity == theirs.identity, theirs.identity
    (False, 0)
    """

    def __init__(self) -> None:
        self._changes: dict[str, _Change] = {}

    def now(self, label: str) -> int | None:
        """Return the present checksum of a thing, or None if it is not known."""
        return self._changes[label].now if label in self._changes else None

    def change(self, label: str, before: int, now: int, act: str) -> None:
        """Note the checksums of a thing before and after an act."""
        first = self._changes[label].before if label in self._changes else before
        self._changes[label] = _Change(first, now, act)

    def add(self, label: str, checksum: int, act: str) -> None:
        """Note an act and its value, where only sequences of acts can be compared."""
        before = self._changes.get(label, _Change(0, 0, "")).now
        self._changes[label] = _Change(0, zlib.crc32(f"{before} {checksum}".encode()), act)

    def _changed(self) -> list[tuple[str, _Change]]:
        return [(label, change) for label, change in sorted(self._changes.items()) if change.now != change.before]

    @property
    def identity(self) -> int:
        """One number for all of it; 0 where nothing has changed."""
        found = 0
        for label, change in self._changed():
            found = zlib.crc32(f"{label} {change.now}".encode(), found)
        return found

    @property
    def text(self) -> str:
        """The changes, for the message where ranks differ."""
        changed = self._changed()
        lines = [f"{change.act} (checksum {change.now & 0xFFFFFFFF:08x})" for _, change in changed[:_MOST_LINES]]
        more = len(changed) - len(lines)
        return "; ".join([*lines, *([f"{more} more"] if more else [])])
