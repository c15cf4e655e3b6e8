"""Batches of a memory-mapped array: by mpidist, NumPy and torch's DataLoader; and a consumer that waits for them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring.inputs import Array
from benchmarks.measuring.rows import OURS, Figure
from benchmarks.measuring.session import Session
from benchmarks.measuring.sizes import MIB, size_text
from benchmarks.measuring.timing import LEAST_REPETITIONS, Case
from mpidist import Dataset

NUMPY, TORCH = "numpy", "torch"
IN_ORDER, SHUFFLED = "in order", "shuffled"
ROWS_IN_BATCH = 64
COMPUTED_SECONDS = 0.005
_PREFETCHED = 2
_SIDE = 128
_WRITTEN_AT_ONCE = 16 << 20


def write(path: Path, nbytes: int) -> None:
    """Write a file of random bytes, which no file system can store as holes."""
    generator = np.random.default_rng(0)
    with path.open("wb") as file:
        for start in range(0, nbytes, _WRITTEN_AT_ONCE):
            file.write(generator.bytes(min(_WRITTEN_AT_ONCE, nbytes - start)))


def table_of(data: Array, size: int) -> Array:
    """Return the rows of whole batches of ``size`` bytes."""
    whole = data[: data.size // size * size]
    return whole.reshape(-1, size // ROWS_IN_BATCH)


def run_batches(session: Session, data: Array, size: int, with_torch: bool) -> None:
    """Measure batches of one size; each case goes round and round in the same file, whose pages are in memory."""
    table = table_of(data, size)
    table.max()  # brings the pages
    for variant in (IN_ORDER, SHUFFLED):
        cases = [_case(OURS, variant, iter(_batches(table, variant)), table), _numpy(table, variant)]
        if with_torch:
            try:
                cases += _torch(table, variant)
            except ImportError as error:
                session.skipped.append(f"torch: it cannot be imported: {error}")
                with_torch = False
        session.measure("read", cases, size=size, count=ROWS_IN_BATCH, dtype="uint8")


def _case(by: str, variant: str, batches: Iterator[Any], table: Array) -> Case:
    def wrong(batch: Any) -> int:
        return int(np.shape(batch) != (ROWS_IN_BATCH, table.shape[1]))

    return Case(by, variant, batches.__next__, wrong)


def _batches(table: Array, variant: str) -> Dataset:
    rows = Dataset.from_tensor_slices(table)
    rows = rows.shuffle(seed=0) if variant == SHUFFLED else rows
    return rows.repeat().batch(ROWS_IN_BATCH)


def _numpy(table: Array, variant: str) -> Case:
    """Return what one writes by hand; slices of np.memmap itself would take longer than those of a plain view."""
    view = np.asarray(table)
    if variant == IN_ORDER:
        starts = range(0, len(view), ROWS_IN_BATCH)
        batches = (view[start : start + ROWS_IN_BATCH].copy() for start in cycle(starts))
    else:
        orders = np.random.default_rng(0).permutation(len(view)).reshape(-1, ROWS_IN_BATCH)
        batches = (view[order] for order in cycle(orders))
    return _case(NUMPY, variant, batches, table)


def _torch(table: Array, variant: str) -> list[Case]:
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    view = np.asarray(table)

    class Rows(torch.utils.data.Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return len(view)

        def __getitem__(self, index: int) -> Any:
            return torch.from_numpy(view[index].copy())

    class Batches(Rows):
        def __getitems__(self, indices: list[int]) -> Any:
            return torch.from_numpy(view[indices])

    def endless(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader

    # In this process: workers would be forked, which a process with MPI in it does not bear.
    shuffles = variant == SHUFFLED
    by_row = DataLoader(Rows(), ROWS_IN_BATCH, shuffle=shuffles)
    by_batch = DataLoader(Batches(), ROWS_IN_BATCH, shuffle=shuffles, collate_fn=_same)
    return [
        _case(TORCH, f"{variant}, by row", endless(by_row), table),
        _case(TORCH, f"{variant}, by batch", endless(by_batch), table),
    ]


def _same(batch: Any) -> Any:
    return batch


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


def run_consumer(session: Session, data: Array, count: int) -> None:
    """Measure the share of waiting, with and without a thread that reads ahead, in turn; the median of 11."""
    for size in (MIB // 4, MIB, 4 * MIB):
        for order in (IN_ORDER, SHUFFLED):
            batches = _batches(table_of(data, size), order)
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


def run_memory(session: Session, data: Array) -> None:
    """Measure what is held at most while batches are read ahead, in batches beyond those that were asked for.

    One more is in the consumer's hand, and one is just being read.
    """
    # So large that an array that is dropped goes back to the system at once.
    size = min(40 * MIB, data.size // 4)
    factors = np.ones((_SIDE, _SIDE), np.float32)
    for depth in (1, 4):
        iterator = iter(_batches(table_of(data, size), IN_ORDER).prefetch(depth))
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
