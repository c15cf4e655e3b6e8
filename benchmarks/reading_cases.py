"""Batches of a memory-mapped array: by mpidist, by NumPy alone, and by torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.inputs import Array
from benchmarks.reading_bars import IN_ORDER, NUMPY, TORCH
from benchmarks.rows import OURS
from benchmarks.session import Session
from benchmarks.timing import Case
from mpidist import Dataset

ROWS_IN_BATCH = 64
SHUFFLED = "shuffled"
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


def run(session: Session, data: Array, size: int, with_torch: bool) -> None:
    """Measure batches of one size; each case goes round and round in the same file, whose pages are in memory."""
    table = table_of(data, size)
    table.max()  # brings the pages
    for variant in (IN_ORDER, SHUFFLED):
        cases = [_ours(table, variant), _numpy(table, variant)]
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


def _ours(table: Array, variant: str) -> Case:
    rows = Dataset.from_tensor_slices(table)
    rows = rows.shuffle(seed=0) if variant == SHUFFLED else rows
    return _case(OURS, variant, iter(rows.repeat().batch(ROWS_IN_BATCH)), table)


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
