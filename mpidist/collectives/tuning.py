"""Tuning: measures the algorithms of an all-reduce, and builds a table of the fastest."""

from __future__ import annotations

import logging
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpidist.arrays.device_ops import DeviceOps, ops_for
from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.channel.operation import Operation, describe
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.reduce import tuning_file
from mpidist.collectives.reduce.choice import place_of
from mpidist.collectives.reduce.cost_model import Network, measure_network
from mpidist.collectives.reduce.registry import SHIPPED, KiB, Row, Table, candidates_at, host_algorithms, size_text
from mpidist.collectives.reduce.tuning_file import Setup
from mpidist.core.errors import AlgorithmError, DeviceError
from mpidist.core.options import CommunicationOptions, ReduceOp
from mpidist.core.settings import TUNING_FILE
from mpidist.core.text import parse_device

_log = logging.getLogger("mpidist")

# 1 KiB to 64 MiB. The largest sizes are skipped if time is short.
SIZES = tuple(KiB << k for k in range(17))
_LARGEST_ALWAYS_MEASURED = 1 << 20
_LEAST_ROUNDS = 5
_MOST_ROUNDS = 101
# Shorter calls are timed in groups, because of the barrier before them and the resolution of the clock.
_SHORT_CALL_SECONDS = 100e-6
_CALLS_IN_GROUP = 20
_FIRST_CALLS = 2
# At large sizes, drop candidates that are this many times slower than the best in the first calls.
_HOPELESS = 3.0
# Minimum gain of one more entry in a row, as a fraction of the time of one size, or summed over several. Less is noise.
_LEAST_GAIN = 0.1


class Timing(NamedTuple):
    """The times measured at one size."""

    nbytes: int
    seconds: dict[str, float]
    """Median time of a call on the slowest rank, by algorithm."""


class Tuned(NamedTuple):
    """The outcome of tuning, the same on every rank."""

    setup: Setup
    """The hosts, MPI library and layout that were measured."""
    place: str
    """The measured row of the table."""
    table: Table
    """The table. Rows of other places are unchanged."""
    timings: list[Timing]
    """The times behind the table, without skipped sizes."""
    path: str | None
    """The file of the table, if any."""


Report = Callable[[str], object]
"""A function that reports progress on rank 0."""


def _ignore(_: str) -> None:
    pass


def tune(path: str | os.PathLike[str] | None = None, *, seconds: float = 10.0, device: str = "cpu") -> Table:
    """Measure the fastest all-reduce algorithm of each size, and save the table to a file.

    Collective: call it on every rank, in the same order. It compares the algorithms on all ranks of the job, in their
    present layout, and takes about ``seconds``. On slow networks it skips the largest sizes. Communicators and
    strategies that you create later, in this program or another, read the table from the file that
    ``MPIDIST_TUNING_FILE`` names. To use a table without a file, pass it as ``Communicator(table=...)``.

    A file holds tables for several kinds of host, MPI libraries and layouts. Only the table for these ranks is
    replaced.

    Args:
        path: File to write. Defaults to the file that ``MPIDIST_TUNING_FILE`` names. If that is not set either, the
            table is only returned. The argument of rank 0 counts.
        seconds: Approximate duration. The argument of rank 0 counts.
        device: ``"cpu"`` for arrays in host memory, ``"gpu"`` for arrays on this rank's GPU, or ``"gpu:1"`` for arrays
            on GPU 1. Pass the same kind on every rank.

    Returns:
        The table. A job of one rank gets the shipped table and writes no file.

    Raises:
        ValueError: The file is not a tuning file, or cannot be written. Raised on all ranks.
        DeviceError: A rank has no GPU. Raised on all ranks.

    >>> table = tune()
    >>> table.several_nodes[-1]
    (None, 'hierarchical')
    """
    return run(path, seconds, device=device).table


def run(path: str | os.PathLike[str] | None, seconds: float, report: Report = _ignore, *, device: str = "cpu") -> Tuned:
    """Tune like :func:`tune`, and return the timings too (collective)."""
    if not seconds > 0:
        raise ValueError(f"seconds is {seconds!r}. Pass a number above 0")
    kind, number, _, _ = parse_device(device)
    with Communicator(table=SHIPPED) as comm:
        outcome = _unusable(comm, kind) or _run(comm, path, seconds, ops_for(kind), number, report)
    # Raise after the communicator is closed. Every rank has the same error.
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _unusable(comm: Communicator, kind: str) -> DeviceError | None:
    """Return the error of the first rank without devices of a kind, if any (collective)."""
    try:
        ops_for(kind)
        problem = None
    except DeviceError as error:
        problem = f"rank {comm.rank}: {error}"
    problems = comm.all_gather_object(problem)
    return next((DeviceError(text) for text in problems if text is not None), None)


def _run(
    comm: Communicator, path: str | os.PathLike[str] | None, seconds: float, ops: DeviceOps, device: int, report: Report
) -> Tuned | ValueError:
    goal = comm.broadcast_object(_goal(comm, path, seconds) if comm.rank == 0 else None)
    if isinstance(goal, ValueError):
        return goal
    timings: list[Timing] = []
    table, channel, report = goal.before, _channel_of(comm), report if comm.rank == 0 else _ignore
    place = place_of(channel.node, ops.kind)
    if not channel.node.is_alone:
        report("messages between nodes")
        measuring = describe("measuring the messages between nodes")
        network: Network = channel.run(Operation(measure_network(channel.comm, channel.node), measuring))
        table = table._replace(between_nodes=network)
    if comm.size > 1:
        # Measure with the inter-node algorithms that the new costs select.
        with Communicator(table=table) as tuned:
            timings = _Measuring(tuned, candidates_at(place), goal.seconds, ops, device, report).timings()
    outcome: Tuned | ValueError
    # One rank decides, because the last bit of a logarithm may differ between hosts.
    outcome = comm.broadcast_object(_kept(comm, goal, decide(table, place, timings), place, timings))
    return outcome


@dataclass(frozen=True)
class _Goal:
    """The arguments of rank 0, with the table so far."""

    before: Table
    path: str | None
    seconds: float


def _goal(comm: Communicator, path: str | os.PathLike[str] | None, seconds: float) -> _Goal | ValueError:
    target = TUNING_FILE.read() if path is None else os.fspath(path)
    if comm.size == 1:
        _log.warning("mpidist: tune() measured nothing, because the job has one rank. Run it under mpirun")
    if comm.size == 1 or target is None:
        return _Goal(SHIPPED, None, seconds)
    try:
        tables = tuning_file.read_if_there(target)
    except ValueError as error:
        return error
    setup = tuning_file.setup_of(_channel_of(comm).node)
    return _Goal(tables.get(setup, SHIPPED), str(Path(target).absolute()), seconds)


def _channel_of(comm: Communicator) -> Channel:
    return comm._channel


def _kept(
    comm: Communicator, goal: _Goal, table: Table, place: str, timings: Sequence[Timing]
) -> Tuned | ValueError | None:
    """Write the file on rank 0, and return the outcome there."""
    if comm.rank > 0:
        return None
    setup = tuning_file.setup_of(_channel_of(comm).node)
    if goal.path is not None:
        try:
            tuning_file.merge(goal.path, setup, table)
        except ValueError as error:
            return error
    return Tuned(setup, place, table, list(timings), goal.path)


# Measuring ------------------------------------------------------------------------------------------------------------


@dataclass
class _Point:
    """One size while it is measured."""

    nbytes: int
    first: dict[str, float]
    """Seconds of the first calls, by candidate."""

    def __post_init__(self) -> None:
        worst = _HOPELESS * min(self.first.values()) if self.nbytes > _LARGEST_ALWAYS_MEASURED else math.inf
        self.times: dict[str, list[float]] = {name: [] for name, first in self.first.items() if first <= worst}

    def calls(self, name: str) -> int:
        """Return the number of calls that are timed together."""
        return _CALLS_IN_GROUP if self.first[name] < _SHORT_CALL_SECONDS else 1

    @property
    def round_seconds(self) -> float:
        """The approximate seconds of one round over the candidates."""
        return sum(self.first[name] * self.calls(name) for name in self.times)


class _Measuring:
    """Times candidates in turn (collective)."""

    def __init__(
        self,
        comm: Communicator,
        candidates: Sequence[str],
        seconds: float,
        ops: DeviceOps,
        device: int,
        report: Report,
    ) -> None:
        self._comm = comm
        self._candidates = list(candidates)
        self._seconds = seconds
        self._report = report
        self._draw = random.Random(0)
        self._ops, self._device = ops, device
        self._value, self._result = [ops.from_host(np.ones(SIZES[-1] // 4, np.float32), device) for _ in range(2)]
        self._start = time.perf_counter()

    def timings(self) -> list[Timing]:
        """Measure the sizes for which there is time, the same on all ranks."""
        points: list[_Point] = []
        for nbytes in SIZES:
            if nbytes > _LARGEST_ALWAYS_MEASURED and self._needed(points) > self._seconds:
                break
            points.append(_Point(nbytes, self._first_seconds(nbytes)))
            self._report(f"first look at {size_text(nbytes)}")
        self._repeat(points)
        return [self._timing(point) for point in points]

    def _timing(self, point: _Point) -> Timing:
        slowest = {name: statistics.median(self._agree(times)) for name, times in point.times.items()}
        return Timing(point.nbytes, {**point.first, **slowest})

    def _needed(self, points: Sequence[_Point]) -> float:
        """Predict the total seconds with one more size, twice as slow as the last."""
        one_more = 2 * ((1 + _FIRST_CALLS) * sum(points[-1].first.values()) + _LEAST_ROUNDS * points[-1].round_seconds)
        return self._elapsed() + _LEAST_ROUNDS * sum(point.round_seconds for point in points) + one_more

    def _repeat(self, points: Sequence[_Point]) -> None:
        """Repeat all sizes in rounds, so that a disturbance of the machine affects all equally."""
        for number in range(1, _MOST_ROUNDS + 1):
            for point in points:
                # In random order, so that caches do not favor the successor of one candidate.
                for name in self._draw.sample(list(point.times), len(point.times)):
                    point.times[name].append(self._seconds_per_call(point.nbytes, name, point.calls(name)))
            elapsed = self._elapsed()
            self._report(f"round {number}, {elapsed:.1f} of {self._seconds:g} s")
            if number >= _LEAST_ROUNDS and elapsed * (number + 1) > self._seconds * number:
                return

    def _first_seconds(self, nbytes: int) -> dict[str, float]:
        """Return the seconds of the first calls, and drop candidates that do not work."""
        first = {}
        for name in [name for name in self._candidates if host_algorithms.is_tuned_to(name, nbytes)]:
            try:
                # Warm up: create plans and touch pages.
                self._seconds_per_call(nbytes, name, 1)
            except AlgorithmError as error:
                self._candidates.remove(name)
                if self._comm.rank == 0:
                    _log.info("mpidist: tune() skips %s: %s", name, error)
                continue
            (first[name],) = self._agree([min(self._seconds_per_call(nbytes, name, 1) for _ in range(_FIRST_CALLS))])
        return first

    def _seconds_per_call(self, nbytes: int, name: str, calls: int) -> float:
        options = CommunicationOptions(algorithm=name)
        value, result = [self._value[: nbytes // 4]], [self._result[: nbytes // 4]]
        self._comm.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            self._comm.reduce_arrays(ReduceOp.SUM, value, 1, options=options, out=result)
        self._ops.synchronize(self._device)
        return (time.perf_counter() - start) / calls

    def _elapsed(self) -> float:
        (elapsed,) = self._agree([time.perf_counter() - self._start])
        return elapsed

    def _agree(self, values: Sequence[float]) -> list[float]:
        """Return the maximum of each value over all ranks."""
        largest: list[float] = self._comm.all_reduce("MAX", np.array(values)).tolist()
        return largest


# Decision -------------------------------------------------------------------------------------------------------------


def decide(before: Table, place: str, timings: Sequence[Timing]) -> Table:
    """Return ``before`` with the best row for a place. Sizes of ``timings`` must rise."""
    return Table(**{**before._asdict(), place: best_row(timings)}) if timings else before


def best_row(timings: Sequence[Timing]) -> Row:
    """Return the fastest row over all sizes, without entries of little gain.

    >>> best_row([Timing(1024, {"a": 1.0, "b": 3.0}), Timing(4096, {"a": 6.0, "b": 2.0})])
    ((2048, 'a'), (None, 'b'))
    >>> best_row([Timing(1024, {"a": 1.0, "b": 3.0}), Timing(4096, {"b": 5.0})])
    ((1024, 'a'), (None, 'b'))
    """
    # Dynamic programming. By the algorithm at the last size so far: the least cost, and the algorithms up to there.
    best: dict[str, tuple[float, tuple[str, ...]]] = dict.fromkeys(timings[0].seconds, (0.0, ()))
    for _, seconds in timings:
        fastest = min(seconds.values())
        cost, path = min(best.values())
        change = (cost + _LEAST_GAIN, path)
        previous = {name: min(best[name], change) for name in best}
        # An algorithm without a time at a size has an infinite cost there.
        loss = {name: math.log(seconds.get(name, math.inf) / fastest) for name in best}
        best = {name: (previous[name][0] + loss[name], (*previous[name][1], name)) for name in best}
    _, names = min(best.values())
    row: list[tuple[int | None, str]] = [
        (_break_even_size(low, high, below, above), below)
        for (low, below), (high, above) in pairwise(zip(timings, names, strict=True))
        if below != above
    ]
    return (*row, (None, names[-1]))


def _break_even_size(low: Timing, high: Timing, below: str, above: str) -> int:
    """Interpolate the size at which two algorithms are equally fast, on logarithmic scales."""
    ahead = math.log(low.seconds[above] / low.seconds[below])
    behind = math.log(high.seconds.get(below, math.inf) / high.seconds[above])
    part = ahead / (ahead + behind) if ahead + behind > 0 else 0.0
    crossing = min(int(low.nbytes * (high.nbytes / low.nbytes) ** part), high.nbytes - 1)
    return max(low.nbytes, crossing - crossing % KiB)
