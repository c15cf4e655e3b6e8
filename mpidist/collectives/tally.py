"""Tally: what a rank has done by itself since its last collective, and all ranks must have done alike.

Copies of a variable drift apart where ranks assign different values to them, and no message passes. So the sum of what
was assigned travels with the next collective, in the number that opens it (``handshake``), and costs no message either.
"""

from __future__ import annotations

import zlib

# What a report shows.
_MOST_LINES = 4


class Tally:
    """A running sum of acts and values, and the lines of the program that they come from.

    >>> mine, theirs = Tally(), Tally()
    >>> for tally in (mine, theirs):
    ...     tally.add("assigning to variable 'w'", 17, "train.py:7")
    >>> mine.identity == theirs.identity
    True
    >>> theirs.add("assigning to variable 'w'", 18, "train.py:9")
    >>> mine.identity == theirs.identity
    False
    """

    def __init__(self) -> None:
        self.identity = 0
        self._lines: list[str] = []
        self._left_out = 0

    def add(self, what: str, value: int | float, call_site: str) -> None:
        """Note one more act: what, with which value or checksum of one, and where in the program."""
        self.identity = zlib.crc32(f"{what} {value!r}".encode(), self.identity)
        if len(self._lines) == _MOST_LINES:
            self._lines.pop()
            self._left_out += 1
        shown = f"checksum {value:08x}" if isinstance(value, int) else f"{value!r}"
        self._lines.append(f"{what} ({shown}, at {call_site})")

    @property
    def text(self) -> str:
        """The acts, for the message where ranks differ: the first ones and the last."""
        lines = list(self._lines)
        if self._left_out:
            lines.insert(-1, f"{self._left_out} more")
        return "; ".join(lines)
