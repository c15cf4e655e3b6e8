"""A job: epochs over a file larger than what a rank may hold; `python -m benchmarks input --large 5` starts it."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mpidist
from benchmarks.bars.reading import verdicts
from benchmarks.cases.reading import own_memory
from benchmarks.measuring.machine import describe
from benchmarks.measuring.rows import Figure
from benchmarks.reports.files import Results, save

NAME = "input-large"
_ROW = np.dtype([("number", np.int64), ("values", np.uint8, 4088)])
_ROWS_AT_ONCE = 4096
_BATCH = 1024
_ROOM = 1.1


def no_room(nbytes: int, folder: Path) -> str:
    """Return why a file of this size should not be written here, nothing where it may."""
    free = shutil.disk_usage(folder).free
    return "" if free > _ROOM * nbytes else f"{folder} has {free >> 20} MiB free, and the file takes {nbytes >> 20}"


def write(path: Path, nbytes: int) -> None:
    """Write rows of 4 KiB, each with its number and random bytes.

    Raises:
        OSError: The file system stored fewer bytes than were written: the file would be no test.
    """
    count = nbytes // _ROW.itemsize
    generator = np.random.default_rng(0)
    block = np.empty(_ROWS_AT_ONCE, _ROW)
    with path.open("wb") as file:
        for start in range(0, count, _ROWS_AT_ONCE):
            part = block[: min(_ROWS_AT_ONCE, count - start)]
            part["number"] = np.arange(start, start + len(part))
            part["values"] = np.frombuffer(generator.bytes(part["values"].size), np.uint8).reshape(part["values"].shape)
            part.tofile(file)
    stored = path.stat().st_blocks * 512
    if stored < count * _ROW.itemsize:
        raise OSError(f"{path} takes {stored} bytes on the disk and has {count * _ROW.itemsize}; it must not be sparse")


def _orders(rows: mpidist.Dataset) -> dict[str, mpidist.Dataset]:
    return {
        "in order": rows,
        "shuffled in windows": rows.shuffle(64 * 1024, seed=1, block_size=256),
        "shuffled": rows.shuffle(seed=1),
    }


def epoch(steps: Iterable[Sequence[Any]], comm: Any, count: int) -> tuple[float, int, int]:
    """Return the seconds of an epoch, the most memory that a rank held in it, and how many rows were lost or doubled.

    Args:
        steps: In each the batches of this rank's replicas.
        comm: All ranks.
        count: Rows of the file.
    """
    from mpi4py import MPI

    seen = np.zeros(count, np.uint8)
    most = own_memory()
    comm.Barrier()
    begin = time.perf_counter()
    for parts in steps:
        for part in parts:
            np.add.at(seen, part["number"], 1)
        most = max(most, own_memory())
    seconds = time.perf_counter() - begin
    total = np.empty_like(seen) if comm.rank == 0 else None
    comm.Reduce(seen, total, MPI.SUM)
    wrong = comm.bcast(0 if total is None else int(np.count_nonzero(total != 1)))
    return comm.allreduce(seconds, MPI.MAX), comm.allreduce(most, MPI.MAX), wrong


def main(path: Path, out: Path) -> int:
    """Read the file once in each order; the status is 1 if a row was lost or seen twice."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    data = np.memmap(path, _ROW, "r")
    figures = [Figure("large", "file", data.nbytes / 1e9, "GB")]
    wrong = 0
    strategy = mpidist.MultiWorkerMirroredStrategy()
    for order, rows in _orders(mpidist.Dataset.from_tensor_slices(data)).items():
        distributed = strategy.experimental_distribute_dataset(rows.batch(_BATCH).prefetch(2))
        steps = map(strategy.experimental_local_results, distributed)
        seconds, most, lost = epoch(steps, comm, len(data))
        wrong += lost
        figures.append(Figure("large", f"own memory of a rank, {order}", most / 1e6, "MB"))
        figures.append(Figure("large", f"speed of all ranks, {order}", data.nbytes / seconds / 1e9, "GB/s"))
        figures.append(Figure("large", f"rows lost or seen twice, {order}", lost, "rows"))
    strategy.close()
    machine = describe(comm, "")
    if comm.rank == 0:
        save(Results(machine, [], figures, verdicts([], figures)), out, NAME)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
