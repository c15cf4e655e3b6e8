"""What the guard adds to an all-reduce: communicators with and without it, one at a time, by turns."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import mpidist
from benchmarks.measuring.inputs import input_of
from benchmarks.measuring.points import Point
from benchmarks.measuring.rows import OURS, Figure
from benchmarks.measuring.session import Session
from benchmarks.measuring.timing import measure
from mpidist.core.settings import GUARD

SIZES = {"4_KiB": 4 << 10, "1_MiB": 1 << 20}
_ROUNDS = 15


def run(session: Session, advance: Callable[[str], None]) -> None:
    """Measure both sizes (collective)."""
    # The guard's thread is there as long as any communicator has a guard.
    session.comm.close()
    for name, size in SIZES.items():
        advance(f"guard {name}")
        medians: dict[bool, list[float]] = {True: [], False: []}
        fastest: dict[bool, list[float]] = {True: [], False: []}
        for number in range(_ROUNDS):
            for is_on in (True, False) if number % 2 else (False, True):
                times = _times(session, size, is_on)
                medians[is_on].append(statistics.median(times))
                fastest[is_on].append(min(times))
        added = [on - off for on, off in zip(medians[True], medians[False], strict=True)]
        low, middle, high = statistics.quantiles(added, n=4)
        off = statistics.median(medians[False])
        found = {"without": off, "added": middle, "added_first_quartile": low, "added_third_quartile": high}
        # Where other programs keep the machine busy, the fastest calls still say something.
        found |= {"without_fastest": min(fastest[False]), "added_to_fastest": min(fastest[True]) - min(fastest[False])}
        session.figures += [Figure("guard", f"{what}_{name}", value, "us") for what, value in found.items()]
        session.figures.append(Figure("guard", f"ratio_{name}", 1 + middle / off, "x"))
    session.renew()


def _times(session: Session, size: int, is_on: bool) -> list[float]:
    """Return what all-reduces of ``size`` bytes took, in microseconds."""
    with _guard(is_on), mpidist.Communicator(session.bare, options=session.options) as comm:
        value = input_of(session.rank, size // 4)
        point = Point(value, value)
        case = point.case(OURS, "out=", lambda value: partial(comm.all_reduce, "SUM", value, out=point.out))
        (found,) = measure(session.bare, [case], session.seconds / _ROUNDS)
    return [1e6 * seconds for seconds in found.times]


@contextmanager
def _guard(is_on: bool) -> Iterator[None]:
    before = os.environ.get(GUARD.name)
    os.environ[GUARD.name] = str(int(is_on))
    try:
        yield
    finally:
        if before is None:
            del os.environ[GUARD.name]
        else:
            os.environ[GUARD.name] = before
