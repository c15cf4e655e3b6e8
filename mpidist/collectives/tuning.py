"""Tuning: measures the algorithms of an all-reduce and makes a table of the fastest."""

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

# 1 KiB to 64 MiB. Larger ones are left out where time is short.
SIZES = tuple(KiB << k for k in range(17))
_LARGEST_ALWAYS_MEASURED = 1 << 20
_LEAST_ROUNDS = 5
_MOST_ROUNDS = 101
# A call shorter than this is timed in groups, so that the meeting before it and the clock do not count.
_SHORT_CALL_SECONDS = 100e-6
_CALLS_IN_GROUP = 20
_FIRST_LOOKS = 2
# A candidate so many times as slow as the best at first sight is not looked at again at that size, if it is large.
_HOPELESS = 3.0
# The least gain of one more entry in a row, as a part of the time of one size or summed over several: less is noise.
_LEAST_GAIN = 0.1


class Timing(NamedTuple):
    """The times that were measured at one size."""

    nbytes: int
    seconds: dict[str, float]
    """By algorithm: the median time of a call on the slowest rank."""


class Tuned(NamedTuple):
    """The outcome of tuning, the same on every rank."""

    setup: Setup
    """Where it was measured."""
    place: str
    """The row of the table that counts there."""
    table: Table
    """The table; rows that do not count there are as they were before."""
    timings: list[Timing]
    """The times behind the table; sizes that time did not suffice for are missing."""
    path: str | None
    """The file that has the table now, if any."""


Report = Callable[[str], object]
"""The function that is told on rank 0 how far the measuring is."""


def _ignore(_: str) -> None:
    """Ignore a report."""


def tune(path: str | os.PathLike[str] | None = None, *, seconds: float = 10.0, device: str = "cpu") -> Table:
    """Measure the fastest algorithm of each size here, and keep it in a file.

    Collective: call it on every rank, in the same order. It compares the algorithms of an all-reduce on all ranks of
    the job, in the layout that they have now, and takes about ``seconds`` (on slow networks it goes less far up).
    Communicators and strategies that are made later, in this program or another, take the table from the file that
    ``MPIDIST_TUNING_FILE`` names; ``Communicator(table=...)`` takes one straight.

    A file holds tables for several kinds of host, MPI libraries and layouts; the one for these ranks is put in.

    Args:
        path: The file. By default the one that ``MPIDIST_TUNING_FILE`` names; where that is not set either, the table
            is only returned. The argument of rank 0 counts.
        seconds: About how long it may take; the argument of rank 0 counts.
        device: ``"cpu"`` for arrays in host memory, ``"gpu"`` for arrays on this rank's GPU or ``"gpu:1"`` for those on
            another; of the same kind on every rank.

    Returns:
        The table. One rank alone has nothing to compare: it gets the shipped one, and no file is written.

    Raises:
        ValueError: The file is there and is not a tuning file, or it cannot be written; on all ranks.
        DeviceError: There is no GPU on some rank; on all ranks.

    >>> table = tune()
    >>> table.several_nodes[-1]
    (None, 'hierarchical')
    """
    return run(path, seconds, device=device).table


def run(path: str | os.PathLike[str] | None, seconds: float, report: Report = _ignore, *, device: str = "cpu") -> Tuned:
    """Tune like :func:`tune`, and return the whole outcome (collective)."""
    if not seconds > 0:
        raise ValueError(f"seconds is {seconds!r}; expected more than 0")
    kind, number, _, _ = parse_device(device)
    with Communicator(table=SHIPPED) as comm:
        outcome = _unusable(comm, kind) or _run(comm, path, seconds, ops_for(kind), number, report)
    # Every rank has the same error, and the communicator is closed.
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _unusable(comm: Communicator, kind: str) -> DeviceError | None:
    """Return the error of the first rank without devices of a kind, or None (collective)."""
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
    table, channel, told = goal.before, _channel_of(comm), report if comm.rank == 0 else _ignore
    place = place_of(channel.node, ops.kind)
    if not channel.node.is_alone:
        told("messages between nodes")
        measuring = describe("measuring the messages between nodes")
        network: Network = channel.run(Operation(measure_network(channel.comm, channel.node), measuring))
        table = table._replace(between_nodes=network)
    if comm.size > 1:
        # The ways between nodes are those that the costs make the fastest.
        with Communicator(table=table) as tuned:
            timings = _Measuring(tuned, candidates_at(place), goal.seconds, ops, device, told).timings()
    outcome: Tuned | ValueError
    # One rank decides: on hosts of different kinds the last bit of a logarithm may differ.
    outcome = comm.broadcast_object(_kept(comm, goal, decide(table, place, timings), place, timings))
    return outcome


@dataclass(frozen=True)
class _Goal:
    """The wish of rank 0.

    Attributes:
        before: The table so far.
        path: Where the new one goes, if anywhere.
        seconds: About how long to measure.
    """

    before: Table
    path: str | None
    seconds: float


def _goal(comm: Communicator, path: str | os.PathLike[str] | None, seconds: float) -> _Goal | ValueError:
    target = TUNING_FILE.read() if path is None else os.fspath(path)
    if comm.size == 1:
        _log.warning("mpidist: tune() compares ways between ranks, and this is one rank: nothing was measured")
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
    """One size while it is measured.

    Attributes:
        nbytes: The size.
        looks: Seconds of each candidate at first sight.
    """

    nbytes: int
    looks: dict[str, float]

    def __post_init__(self) -> None:
        worst = _HOPELESS * min(self.looks.values()) if self.nbytes > _LARGEST_ALWAYS_MEASURED else math.inf
        self.times: dict[str, list[float]] = {name: [] for name, look in self.looks.items() if look <= worst}

    def calls(self, name: str) -> int:
        """Return how many calls are timed together."""
        return _CALLS_IN_GROUP if self.looks[name] < _SHORT_CALL_SECONDS else 1

    @property
    def round_seconds(self) -> float:
        """The approximate seconds of one round over the candidates."""
        return sum(self.looks[name] * self.calls(name) for name in self.times)


class _Measuring:
    """Times candidates beside each other (collective).

    Args:
        comm: The ranks.
        candidates: Names of algorithms.
        seconds: About how long it may take.
        ops, device: Where the arrays lie.
        report: Is told how far it is.
    """

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
        self._stream = ops.current_stream(device)
        self._value, self._result = [ops.from_host(np.ones(SIZES[-1] // 4, np.float32), device) for _ in range(2)]
        self._start = time.perf_counter()

    def timings(self) -> list[Timing]:
        """Measure as many sizes as time suffices for; the same on all ranks."""
        points: list[_Point] = []
        for nbytes in SIZES:
            if nbytes > _LARGEST_ALWAYS_MEASURED and self._needed(points) > self._seconds:
                break
            points.append(_Point(nbytes, self._look(nbytes)))
            self._report(f"first look at {size_text(nbytes)}")
        self._repeat(points)
        return [self._timing(point) for point in points]

    def _timing(self, point: _Point) -> Timing:
        slowest = {name: statistics.median(self._agree(times)) for name, times in point.times.items()}
        return Timing(point.nbytes, {**point.looks, **slowest})

    def _needed(self, points: Sequence[_Point]) -> float:
        """Return the seconds in all with one more size, which takes twice as long."""
        one_more = 2 * ((1 + _FIRST_LOOKS) * sum(points[-1].looks.values()) + _LEAST_ROUNDS * points[-1].round_seconds)
        return self._elapsed() + _LEAST_ROUNDS * sum(point.round_seconds for point in points) + one_more

    def _repeat(self, points: Sequence[_Point]) -> None:
        """Repeat all sizes in rounds, so that a disturbance of the machine hits all alike."""
        for number in range(1, _MOST_ROUNDS + 1):
            for point in points:
                # No candidate always finds the caches as the same other one has left them.
                for name in self._draw.sample(list(point.times), len(point.times)):
                    point.times[name].append(self._seconds_per_call(point.nbytes, name, point.calls(name)))
            elapsed = self._elapsed()
            self._report(f"round {number}, {elapsed:.1f} of {self._seconds:g} s")
            if number >= _LEAST_ROUNDS and elapsed * (number + 1) > self._seconds * number:
                return

    def _look(self, nbytes: int) -> dict[str, float]:
        """Return a first measure of the candidates, and leave out those that do not work."""
        looks = {}
        for name in [name for name in self._candidates if host_algorithms.is_tuned_to(name, nbytes)]:
            try:
                # Plans are made, and pages touched.
                self._seconds_per_call(nbytes, name, 1)
            except AlgorithmError as error:
                self._candidates.remove(name)
                if self._comm.rank == 0:
                    _log.info("mpidist: tune() leaves %s out: %s", name, error)
                continue
            (looks[name],) = self._agree([min(self._seconds_per_call(nbytes, name, 1) for _ in range(_FIRST_LOOKS))])
        return looks

    def _seconds_per_call(self, nbytes: int, name: str, calls: int) -> float:
        options = CommunicationOptions(algorithm=name)
        value, result = [self._value[: nbytes // 4]], [self._result[: nbytes // 4]]
        self._comm.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            self._comm.reduce_arrays(ReduceOp.SUM, value, 1, options=options, out=result)
        self._stream.synchronize()
        return (time.perf_counter() - start) / calls

    def _elapsed(self) -> float:
        (elapsed,) = self._agree([time.perf_counter() - self._start])
        return elapsed

    def _agree(self, values: Sequence[float]) -> list[float]:
        """Return the largest values of all ranks."""
        largest: list[float] = self._comm.all_reduce("MAX", np.array(values)).tolist()
        return largest


# Deciding -------------------------------------------------------------------------------------------------------------


def decide(before: Table, place: str, timings: Sequence[Timing]) -> Table:
    """Return ``before`` with the row of a place by its timings, whose sizes rise."""
    return Table(**{**before._asdict(), place: best_row(timings)}) if timings else before


def best_row(timings: Sequence[Timing]) -> Row:
    """Return the fastest row over all sizes, without entries that gain nothing.

    >>> best_row([Timing(1024, {"a": 1.0, "b": 3.0}), Timing(4096, {"a": 6.0, "b": 2.0})])
    ((2048, 'a'), (None, 'b'))
    >>> best_row([Timing(1024, {"a": 1.0, "b": 3.0}), Timing(4096, {"b": 5.0})])
    ((1024, 'a'), (None, 'b'))
    """
    # By the algorithm at the last size so far: the cost of the best way there, and that way.
    best: dict[str, tuple[float, tuple[str, ...]]] = dict.fromkeys(timings[0].seconds, (0.0, ()))
    for _, seconds in timings:
        fastest = min(seconds.values())
        cost, way = min(best.values())
        change = (cost + _LEAST_GAIN, way)
        came = {name: min(best[name], change) for name in best}
        # One that is not measured at a size is none for it.
        worse = {name: math.log(seconds.get(name, math.inf) / fastest) for name in best}
        best = {name: (came[name][0] + worse[name], (*came[name][1], name)) for name in best}
    _, names = min(best.values())
    row: list[tuple[int | None, str]] = [
        (_break_even_size(low, high, below, above), below)
        for (low, below), (high, above) in pairwise(zip(timings, names, strict=True))
        if below != above
    ]
    return (*row, (None, names[-1]))


def _break_even_size(low: Timing, high: Timing, below: str, above: str) -> int:
    """Return the size where two algorithms are equally fast, by lines on logarithmic scales."""
    ahead = math.log(low.seconds[above] / low.seconds[below])
    behind = math.log(high.seconds.get(below, math.inf) / high.seconds[above])
    part = ahead / (ahead + behind) if ahead + behind > 0 else 0.0
    crossing = min(int(low.nbytes * (high.nbytes / low.nbytes) ** part), high.nbytes - 1)
    return max(low.nbytes, crossing - crossing % KiB)
