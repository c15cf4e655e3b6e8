"""How often to save, by Young and Daly: from measured times and failures."""

from __future__ import annotations

import math
import time

from mpidist.core import settings
from mpidist.topology import world_topology
from mpidist.topology.topology import has_world

# Steps until the second save, which tell how long one takes.
FIRST_STEPS = 10
_SECONDS_PER_DAY = 86400.0
# Tests put another one here.
clock = time.monotonic


def daly_interval(save_seconds: float, mtbf: float) -> float:
    """Return the seconds of work between two saves that lose the least time.

    Daly's formula (doi:10.1016/j.future.2004.11.016), which for short saves is Young's (doi:10.1145/361147.361115): the
    root of twice the save's time by the time between failures. The time of a restart does not change it.

    Args:
        save_seconds: How long work stands still for a save.
        mtbf: Mean seconds between two failures of the job.

    >>> round(daly_interval(30.0, 24 * 3600.0)), round(math.sqrt(2 * 30 * 24 * 3600))
    (2257, 2277)
    """
    if save_seconds >= 2 * mtbf:
        return mtbf
    ratio = save_seconds / (2 * mtbf)
    return math.sqrt(2 * save_seconds * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


class Pace:
    """The pace of a program: seconds for a step and a save.

    Args:
        node_mtbf: Mean seconds between two failures of one node; None for ``MPIDIST_NODE_MTBF_DAYS``.
    """

    def __init__(self, node_mtbf: float | None) -> None:
        self._node_mtbf = _SECONDS_PER_DAY * settings.NODE_MTBF_DAYS.read() if node_mtbf is None else node_mtbf
        self._save_seconds: float | None = None
        self._began = 0.0
        # When the last save ended, and with which step.
        self._last: tuple[float, int] | None = None

    def begin(self, step: int) -> int:
        """Begin a save after ``step``; return the steps to the next one, by this clock."""
        self._began = clock()
        if self._save_seconds is None or self._last is None or step <= self._last[1]:
            return FIRST_STEPS
        step_seconds = (self._began - self._last[0]) / (step - self._last[1])
        # Of the nodes that there are now: an elastic job loses and gains some.
        nodes = world_topology().num_nodes if has_world() else 1
        # A clock that has not moved between steps would ask for endless ones.
        return max(1, round(daly_interval(self._save_seconds, self._node_mtbf / nodes) / max(step_seconds, 1e-6)))

    def end(self, step: int) -> None:
        """End the save that was begun after ``step``."""
        now = clock()
        self._save_seconds, self._last = now - self._began, (now, step)
