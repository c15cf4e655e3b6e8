"""A consumer that computes: how long it waits for batches, and what is held for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bars import MIB, size_text
from benchmarks.inputs import Array
from benchmarks.reading_cases import ROWS_IN_BATCH, table_of
from benchmarks.rows import Figure
from benchmarks.session import Session
from benchmarks.timing import LEAST_REPETITIONS
from mpidist import Dataset

COMPUTED_SECONDS = 0.005
_PREFETCHED = 2
_SIDE = 128


def own_memory() -> int:
    """Return the bytes of memory that is this process's own; pages of mapped files are not."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def _compute(seconds: float, factors: Array) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        factors @ factors


def waiting(batches: Iterator[Any], count: int) -> float:
    """Return in percent which part of its time a consumer waits for ``count`` batches."""
    factors = np.ones((_SIDE, _SIDE), np.float32)
    waited = 0.0
    begin = time.perf_counter()
    for _ in range(count):
        _compute(COMPUTED_SECONDS, factors)
        asked = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - asked
    return 100 * waited / (time.perf_counter() - begin)


def run(session: Session, data: Array, count: int) -> None:
    """Measure the share of waiting, with and without a thread that reads ahead, in turn; the median of 11."""
    for size in (MIB // 4, MIB, 4 * MIB):
        for order in ("in order", "shuffled"):
            rows = Dataset.from_tensor_slices(table_of(data, size))
            rows = rows.shuffle(seed=0) if order == "shuffled" else rows
            batches = rows.repeat().batch(ROWS_IN_BATCH)
            where = f"{size_text(size)}, {order}"
            passes = {"with": iter(batches.prefetch(_PREFETCHED)), "without": iter(batches)}
            shares: dict[str, list[float]] = {name: [] for name in passes}
            for iterator in passes.values():
                next(iterator)
            for _ in range(LEAST_REPETITIONS):
                for name, iterator in passes.items():
                    shares[name].append(waiting(iterator, max(1, count // LEAST_REPETITIONS)))
            for name, iterator in passes.items():
                iterator.close()
                share = statistics.median(shares[name])
                session.figures.append(Figure("consumer", f"waits {name} prefetch, {where}", share, "%"))


def memory(session: Session, data: Array) -> None:
    """Measure what is held at most while batches are read ahead, in batches beyond those that were asked for.

    One more is in the consumer's hand, and one is just being read.
    """
    # So large that an array that is dropped goes back to the system at once.
    size = min(40 * MIB, data.size // 4)
    factors = np.ones((_SIDE, _SIDE), np.float32)
    for depth in (1, 4):
        iterator = iter(Dataset.from_tensor_slices(table_of(data, size)).repeat().batch(ROWS_IN_BATCH).prefetch(depth))
        before = own_memory()
        most = 0
        batch = None
        for _ in range(12):
            batch = None
            batch = next(iterator)
            _compute(20 * COMPUTED_SECONDS, factors)  # long enough to read all that may be read
            most = max(most, own_memory())
        del batch
        iterator.close()
        beyond = (most - before) / size - depth
        session.figures.append(Figure("prefetch", f"batches beyond its depth of {depth}", beyond, "batches"))
