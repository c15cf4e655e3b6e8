"""Tuning: measures the algorithms of an all-reduce, and builds a table of the fastest."""

from __future__ import annotations

import logging
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from mpidist.arrays.device_ops import DeviceOps, ops_for
from mpidist.collectives.channel.operation import Operation, describe
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.mpi.exchange import all_do, first_does
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.reduce import tuning_file
from mpidist.collectives.reduce.choice import place_of
from mpidist.collectives.reduce.cost_model import measure_network
from mpidist.collectives.reduce.registry import SHIPPED, KiB, Row, Table, candidates_at, size_text
from mpidist.collectives.reduce.tuning_file import Setup
from mpidist.core.errors import AlgorithmError, DeviceError
from mpidist.core.options import CommunicationOptions, ReduceOp
from mpidist.core.settings import TUNING_FILE
from mpidist.core.text import parse_device

T = TypeVar("T")

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
    seconds: dict[str, float]  # median time of a call on the slowest rank, by algorithm


class Tuned(NamedTuple):
    """The outcome of tuning, the same on every rank."""

    setup: Setup  # the hosts, MPI library and layout that were measured
    place: str  # the measured row of the table
    table: Table  # rows of other places are unchanged
    timings: list[Timing]  # the times behind the table, without skipped sizes
    path: str | None  # the file of the table, if any


# Reports progress on rank 0.
Report = Callable[[str], object]


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
        try:
            outcome: Tuned | Exception = _run(comm, path, seconds, kind, number, report if comm.rank == 0 else _ignore)
        except (ValueError, DeviceError) as error:  # the same on every rank, so close the communicator first
            outcome = error
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _run(
    comm: Communicator, path: str | os.PathLike[str] | None, seconds: float, kind: str, device: int, report: Report
) -> Tuned:
    channel = comm._channel
    place, setup = place_of(channel.node, kind), tuning_file.setup_of(channel.node)

    def agree(steps: Steps[T], text: str) -> T:
        return channel.run(Operation(steps, describe(text)))

    ops = agree(all_do(channel.comm, lambda: ops_for(kind), _device_error), "finding the devices to tune for")
    reading = first_does(channel.comm, lambda: (*_table_before(comm, setup, path), seconds))
    table, target, seconds = agree(reading, "reading the table to tune")
    timings: list[Timing] = []
    if not channel.node.is_alone:
        report("messages between nodes")
        network = agree(measure_network(channel.comm, channel.node), "measuring the messages between nodes")
        table = table._replace(between_nodes=network)
    if comm.size > 1:
        # Measure with the inter-node algorithms that the new costs select.
        with Communicator(table=table) as tuned:
            timings = _Measuring(tuned, place, seconds, ops, device, report).timings()

    def keep() -> Tuned:
        decided = Table(**{**table._asdict(), place: best_row(timings)}) if timings else table
        if target is not None:
            tuning_file.merge(target, setup, decided)
        return Tuned(setup, place, decided, timings, target)

    # One rank decides, because the last bit of a logarithm may differ between hosts.
    return agree(first_does(channel.comm, keep), "writing the tuned table")


def _device_error(rank: int, text: str) -> DeviceError:
    return DeviceError(f"rank {rank}: {text.removeprefix('DeviceError: ')}")


def _table_before(comm: Communicator, setup: Setup, path: str | os.PathLike[str] | None) -> tuple[Table, str | None]:
    """Return the table so far, and the file to write, if any."""
    target = TUNING_FILE.read() if path is None else os.fspath(path)
    if comm.size == 1:
        _log.warning("mpidist: tune() measured nothing, because the job has one rank. Run it under mpirun")
    if comm.size == 1 or target is None:
        return SHIPPED, None
    return tuning_file.read_if_there(target).get(setup, SHIPPED), str(Path(target).absolute())


# Measuring ------------------------------------------------------------------------------------------------------------


class _Point:
    """One size while it is measured. ``first`` has the seconds of the first calls by candidate."""

    def __init__(self, nbytes: int, first: dict[str, float]) -> None:
        self.nbytes, self.first = nbytes, first
        worst = _HOPELESS * min(first.values()) if nbytes > _LARGEST_ALWAYS_MEASURED else math.inf
        self.times: dict[str, list[float]] = {name: [] for name, seconds in first.items() if seconds <= worst}
        # Number of calls that are timed together.
        self.calls = {name: _CALLS_IN_GROUP if first[name] < _SHORT_CALL_SECONDS else 1 for name in self.times}
        self.round_seconds = sum(first[name] * calls for name, calls in self.calls.items())


class _Measuring:
    """Times candidates in turn (collective)."""

    def __init__(
        self, comm: Communicator, place: str, seconds: float, ops: DeviceOps, device: int, report: Report
    ) -> None:
        self._comm, self._place, self._seconds, self._report = comm, place, seconds, report
        self._broken: set[str] = set()
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
        medians = [{name: statistics.median(self._agree(times)) for name, times in at.times.items()} for at in points]
        return [Timing(at.nbytes, {**at.first, **slowest}) for at, slowest in zip(points, medians, strict=True)]

    def _needed(self, points: Sequence[_Point]) -> float:
        """Predict the total seconds with one more size, twice as slow as the last."""
        one_more = 2 * ((1 + _FIRST_CALLS) * sum(points[-1].first.values()) + _LEAST_ROUNDS * points[-1].round_seconds)
        return self._elapsed() + _LEAST_ROUNDS * sum(point.round_seconds for point in points) + one_more

    def _repeat(self, points: Sequence[_Point]) -> None:
        """Repeat all sizes in rounds, so that a disturbance of the machine affects all equally."""
        draw = random.Random(0)
        for number in range(1, _MOST_ROUNDS + 1):
            for point in points:
                # In random order, so that caches do not favor the successor of one candidate.
                for name in draw.sample(list(point.times), len(point.times)):
                    point.times[name].append(self._seconds_per_call(point.nbytes, name, point.calls[name]))
            elapsed = self._elapsed()
            self._report(f"round {number}, {elapsed:.1f} of {self._seconds:g} s")
            if number >= _LEAST_ROUNDS and elapsed * (number + 1) > self._seconds * number:
                return

    def _first_seconds(self, nbytes: int) -> dict[str, float]:
        """Return the seconds of the first calls, and drop candidates that do not work."""
        first = {}
        for name in [name for name in candidates_at(self._place, nbytes) if name not in self._broken]:
            try:
                # Warm up: create plans and touch pages.
                self._seconds_per_call(nbytes, name, 1)
            except AlgorithmError as error:
                self._broken.add(name)
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


def best_row(timings: Sequence[Timing]) -> Row:
    """Return the fastest row over all sizes, which must rise, without entries of little gain."""
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
