"""What the processors of this machine did: a time that they set is no time of the network."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

# Of the columns of /proc/stat: waiting for nothing, and for a disk.
_IDLE = slice(3, 5)
# After these come times of guests, which are in those before.
_COLUMNS = 8


class Ticks(NamedTuple):
    """Time of all processors of a machine, in the kernel's ticks."""

    busy: int
    total: int

    @classmethod
    def now(cls) -> Ticks:
        """Return those since the machine started."""
        columns = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1 : 1 + _COLUMNS]]
        return cls(sum(columns) - sum(columns[_IDLE]), sum(columns))

    def since(self, before: Ticks) -> Ticks:
        """Return those after ``before``.

        >>> Ticks(50, 100).since(Ticks(20, 50)).share
        0.6
        """
        return Ticks(self.busy - before.busy, self.total - before.total)

    def and_also(self, more: Ticks) -> Ticks:
        """Return both together."""
        return Ticks(self.busy + more.busy, self.total + more.total)

    @property
    def share(self) -> float:
        """Which part of the time they were busy."""
        return self.busy / self.total
