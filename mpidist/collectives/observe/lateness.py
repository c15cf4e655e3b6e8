"""Lateness: samples of each rank's time, and the verdict about all samples.

The core adds up how long each rank waits in handshakes. A late rank waits little while the others wait for it, so its
lateness is the wait of a typical rank less its own. Each rank samples its waits once a second. The samples of all ranks
are aligned by the second of the wall clock.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mpidist.collectives.channel.channel import open_channels
from mpidist.collectives.observe.link_probe import LinkTime, rate_of
from mpidist.core.phases import CHECKPOINT, INPUT, counts
from mpidist.core.text import names_text, numbered_ranks
from mpidist.topology import import_mpi

KEPT_SECONDS = 128
"""How many seconds of samples each rank keeps."""
WAIT, MOVE, READ, SAVE, STEPS = range(5)
_SHARES, _KINDS = 4, 5
_NOTHING = (0,) * _SHARES
# Shares of a second travel as integers. A wait counts in the second in which it ends, so a share may exceed one.
_FULL = 1000
# Weight of a sample halves in so many groups of samples. Groups hold some steps.
_HALF_LIFE, _STEPS_IN_GROUP = 10.0, 2
_FEWEST_GROUPS = 8
_RATE_SECONDS = 16
# A verdict needs a mean lateness of this share of the time and of so many standard errors, in most groups.
_LEAST_LATENESS, _STANDARD_ERRORS, _LEAST_FREQUENCY = 0.1, 4.0, 0.6
_MOSTLY = 0.8
# A rank with so much more data is late because of it.
_MORE_ROWS = 1.1
MUCH_MOVING = 0.3
"""Links are compared if data move for this share of the time."""
# A burst takes so many times as long on a slow link.
_SLOW_LINK = 3.0
INPUT_PHASE, CHECKPOINT_PHASE, COMPUTE_PHASE = "reading input", "checkpoints", "compute"


class Samples(NamedTuple):
    """The samples of one rank. ``numbers``: shares of time and steps, by second and kind."""

    rank: int  # of the job
    host: str
    second: int  # the last one, of the wall clock
    steps: int  # in all
    rows_per_step: float
    numbers: bytes


class LateRanks(NamedTuple):
    """The ranks that the others wait for.

    Attributes:
        ranks: Their numbers in the job.
        hosts: Names of their hosts.
        is_host: Whether they are all ranks of their host, and other hosts are not late.
        phase: ``"reading input"``, ``"compute"`` or ``"checkpoints"``.
        share: Share of the job's time that the others wait for them.
        frequency: Share of the time in which they are late.
        milliseconds: Lateness in each step; 0 if the program counts no steps.
        since: Step since which they are late; seconds ago if the program counts no steps.
        more_rows: Share of rows that they process more than other ranks.
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    is_host: bool
    phase: str
    share: float
    frequency: float
    milliseconds: float
    since: float
    more_rows: float

    def __str__(self) -> str:
        who = f"{numbered_ranks(self.ranks)} ({names_text(self.hosts)})"
        who = f"host {self.hosts[0]} ({numbered_ranks(self.ranks)})" if self.is_host else who
        are = "are" if len(self.ranks) > 1 and not self.is_host else "is"
        if self.milliseconds:
            late = f"{are} {self.milliseconds:.3g} ms late in {self.frequency:.0%} of steps, in {self.phase}"
            since = f"since step {self.since:,.0f}"
        else:
            late = f"{are} late in {self.frequency:.0%} of the time, in {self.phase}"
            since = f"for {self.since:.0f} s"
        rows = f" (with {self.more_rows:.0%} more rows than other ranks)" if self.more_rows else ""
        burn = f"`python -m mpidist doctor --burn 30` on {names_text(self.hosts)}"
        advice = {
            INPUT_PHASE: f"the input pipeline of {names_text(self.hosts)}: its storage, and the threads that read",
            CHECKPOINT_PHASE: f"the storage of {names_text(self.hosts)}",
        }.get(self.phase, "give all ranks equally many rows" if rows else burn)
        return f"{who} {late}{rows}, {since}: {self.share:.0%} of the job's time. Next: {advice}"


class SlowLink(NamedTuple):
    """The slowest way between two nodes, which slows down the collectives of all ranks.

    Attributes:
        source: Host that sends.
        target: Host that receives.
        rate: Bytes per second.
        usual_rate: Bytes per second of a typical way.
        share: Share of the job's time in which data move in collectives.
    """

    source: str
    target: str
    rate: float
    usual_rate: float
    share: float

    def __str__(self) -> str:
        return (
            f"data travel from {self.source} to {self.target} at {self.rate / 1e6:.3g} MB/s, and at "
            f"{self.usual_rate / 1e6:.3g} MB/s on other links: moving data takes {self.share:.0%} of the job's "
            f"time. Next: `python -m mpidist doctor` on {self.source} and {self.target}"
        )


Verdict = LateRanks | SlowLink


def find_straggler(found: Mapping[int, Samples]) -> LateRanks | None:
    """Return the verdict about the samples of ranks, or None if nobody is late."""
    ranks = sorted(found)
    if len(ranks) < 2:
        return None
    numbers = _aligned([found[rank] for rank in ranks])
    shares, steps = numbers[:, :, :_SHARES] / _FULL, np.median(numbers[:, :, STEPS], axis=0)
    # The recent ones, because a job may have begun without steps.
    steps_per_second = float(steps[-_RATE_SECONDS:].mean()) if len(steps) else 0.0
    group = max(1, math.ceil(_STEPS_IN_GROUP / steps_per_second)) if steps_per_second else 1
    groups = shares.shape[1] // group
    if groups < _FEWEST_GROUPS:
        return None
    shares = shares[:, -groups * group :].reshape(len(ranks), groups, group, _SHARES).mean(axis=2)
    waits = shares[:, :, WAIT]
    # The upper median, so that one of two ranks can be late.
    lateness = np.sort(waits, axis=0)[len(ranks) // 2] - waits
    weights = 0.5 ** (np.arange(groups)[::-1] / _HALF_LIFE)
    weights /= weights.sum()
    mean = lateness @ weights
    error = np.sqrt(((lateness - mean[:, None]) ** 2) @ weights * (weights @ weights))
    is_late_in = lateness >= mean[:, None] / 2
    frequency = is_late_in @ weights
    is_late = (mean >= _LEAST_LATENESS) & (mean >= _STANDARD_ERRORS * error) & (frequency >= _LEAST_FREQUENCY)
    if not is_late.any() or 2 * is_late.sum() > len(ranks):
        return None
    worst = int(np.argmax(np.where(is_late, mean, -1.0)))
    late = np.flatnonzero(is_late & (mean >= mean[worst] / 2))
    others = np.flatnonzero(~is_late)
    rows = np.array([found[rank].rows_per_step for rank in ranks])
    phase, more_rows = _phase(shares, weights, late, others, float(mean[worst]), rows)
    hosts = [found[ranks[index]].host for index in late]
    of_host = [rank for rank in ranks if found[rank].host == hosts[0]]
    is_host = len(set(hosts)) == 1 and len(late) == len(of_host) > 1
    # The longest time until now in which it was late mostly.
    backwards = is_late_in[worst, ::-1]
    mostly = np.flatnonzero(backwards & (np.cumsum(backwards) >= _MOSTLY * np.arange(1, groups + 1)))
    seconds = (int(mostly[-1]) + 1) * group if len(mostly) else 0
    return LateRanks(
        ranks=tuple(found[ranks[index]].rank for index in late),
        hosts=tuple(dict.fromkeys(hosts)),
        is_host=is_host,
        phase=phase,
        share=float(mean[worst]),
        frequency=float(frequency[worst]),
        milliseconds=1e3 * float(mean[worst]) / steps_per_second if steps_per_second else 0.0,
        since=found[ranks[worst]].steps - float(steps[-seconds:].sum()) if steps_per_second else float(seconds),
        more_rows=more_rows,
    )


def moving_share(found: Mapping[int, Samples]) -> float:
    """Return the share of the last seconds in which data moved in collectives."""
    if not found:
        return 0.0
    numbers = _aligned(list(found.values()))[:, -_FEWEST_GROUPS:, MOVE]
    return float(numbers.mean()) / _FULL if numbers.size else 0.0


def slow_link(times: Sequence[LinkTime], hosts: Mapping[int, str], moving: float) -> SlowLink | None:
    """Return the verdict about links to rank 0, or None if their rates are similar."""
    ways = sorted(times)
    if not ways:
        return None
    usual, worst = ways[(len(ways) - 1) // 2], ways[-1]
    if worst.seconds < _SLOW_LINK * usual.seconds:
        return None
    ends = hosts.get(0, "?"), hosts.get(worst.rank, "?")
    source, target = reversed(ends) if worst.is_back else ends
    return SlowLink(source, target, rate_of(worst.seconds), rate_of(usual.seconds), moving)


def _phase(
    shares: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64],
    late: npt.NDArray[np.intp],
    others: npt.NDArray[np.intp],
    lateness: float,
    rows: npt.NDArray[np.float64],
) -> tuple[str, float]:
    """Return the phase in which ranks are late, and their share of additional rows."""
    means = np.einsum("rgs,g->rs", shares, weights)
    excess = means[late].mean(axis=0) - np.median(means[others], axis=0)
    for kind, name in ((READ, INPUT_PHASE), (SAVE, CHECKPOINT_PHASE)):
        if excess[kind] >= lateness / 2:
            return name, 0.0
    usual = float(np.median(rows[others]))
    more = float(rows[late].mean()) / usual if usual else 1.0
    return COMPUTE_PHASE, more - 1 if more >= _MORE_ROWS else 0.0


def _aligned(samples: list[Samples]) -> npt.NDArray[np.float64]:
    """Return the numbers by rank, second and kind, of the seconds that all ranks have."""
    last = min(each.second for each in samples)
    arrays = [np.frombuffer(each.numbers, np.uint16).reshape(-1, _KINDS) for each in samples]
    # A clock may be wrong by more than all samples.
    ends = [max(0, len(array) - (each.second - last)) for array, each in zip(arrays, samples, strict=True)]
    arrays = [array[:end] for array, end in zip(arrays, ends, strict=True)]
    length = min(map(len, arrays))
    return np.stack([array[len(array) - length :] for array in arrays]).astype(np.float64)


class Sampler:
    """Samples of this rank, once a second."""

    def __init__(self) -> None:
        self._rank, self._host = import_mpi().COMM_WORLD.Get_rank(), os.uname().nodename
        self._numbers: deque[bytes] = deque(maxlen=KEPT_SECONDS)
        self._second, self._time = int(time.time()), time.perf_counter_ns()
        self._before, self._steps = self._totals(), counts.steps

    def sample(self) -> bool:
        """Add a sample if a second is over. Call this a few times a second. Return whether it did."""
        second, now = int(time.time()), time.perf_counter_ns()
        passed = second - self._second
        if not 0 <= passed <= KEPT_SECONDS:  # the clock was set, or the job was suspended
            self._numbers.clear()
            self._second, self._time = second, now
            self._before, self._steps = self._totals(), counts.steps
            return False
        if passed == 0:
            return False
        before, self._before = self._before, self._totals()
        length, self._second, self._time = now - self._time, second, now
        steps, self._steps = counts.steps - self._steps, counts.steps
        spent = [np.subtract(total, before.get(name, _NOTHING)) for name, total in self._before.items()]
        shares = np.round(_FULL / length * np.sum(spent, axis=0))
        numbers = np.clip([*shares, steps / passed], 0, np.iinfo(np.uint16).max).astype(np.uint16).tobytes()
        self._numbers.extend([numbers] * passed)
        return True

    def _totals(self) -> dict[int, tuple[int, ...]]:
        """Return nanoseconds by communicator and kind. Closed communicators drop out."""
        found: dict[int, tuple[int, ...]] = {0: (0, 0, INPUT.nanoseconds, CHECKPOINT.nanoseconds)}
        for channel in list(open_channels):
            found[id(channel)] = (channel.handshake.waited, channel.executor.moved, 0, 0)
        return found

    def samples(self) -> Samples:
        """Return what the other ranks need."""
        rows = counts.rows / counts.steps if counts.steps else 0.0
        return Samples(self._rank, self._host, self._second, counts.steps, rows, b"".join(self._numbers))


@cache
def sampler() -> Sampler:
    """Return the sampler of this process."""
    return Sampler()
