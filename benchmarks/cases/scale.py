"""What grows with the number of ranks: start, memory, descriptors, connections, /dev/shm, the handshake, sums."""

from __future__ import annotations

import os
import statistics
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import mpidist
from benchmarks.cases.memory import own_memory
from benchmarks.measuring.inputs import input_of, sum_of_inputs
from benchmarks.measuring.points import Point
from benchmarks.measuring.rows import MPI as BARE
from benchmarks.measuring.rows import OURS, Figure, Row, make_row
from benchmarks.measuring.timing import Case, measure

if TYPE_CHECKING:
    from mpi4py import MPI

# Communicators of all ranks, of which one more is the mean.
_COMMUNICATORS = 4
_MISMATCHES = 5
_ESTABLISHED = "01"
_ITEM = np.dtype(np.float32).itemsize


def since_start() -> float:
    """Return the seconds since this process was started, as the kernel counts them."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class Held(NamedTuple):
    """What a process holds.

    Attributes:
        memory: Bytes; of memory that k processes share the k-th part.
        shared: Of these, in files of /dev/shm and the like.
        descriptors: Open files, sockets and others.
        connections: Established ones over TCP.
    """

    memory: int
    shared: int
    descriptors: int
    connections: int


def held() -> Held:
    """Return what this process holds now."""
    targets = [_target(name) for name in os.listdir("/proc/self/fd")]
    inodes = {target[8:-1] for target in targets if target.startswith("socket:[")}
    lines = [line.split() for table in ("tcp", "tcp6") for line in _table(table)]
    connections = sum(columns[3] == _ESTABLISHED and columns[9] in inodes for columns in lines)
    return Held(own_memory(), own_memory("Pss_Shmem"), len([target for target in targets if target]), connections)


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # that of the listing itself
        return ""


def _table(name: str) -> list[str]:
    path = Path("/proc/self/net", name)
    return path.read_text().splitlines()[1:] if path.exists() else []


def run(world: MPI.Intracomm, sizes: list[int], seconds: float) -> tuple[list[Row], list[Figure]]:
    """Measure on the ranks of ``world`` (collective).

    Args:
        world: All ranks.
        sizes: Bytes of the all-reduces.
        seconds: About how long one is measured.
    """
    started, imported = since_start(), held()
    comm = mpidist.Communicator(world)
    figures = _figures(world, "start", {"to a communicator": (since_start(), "s"), "to MPI": (started, "s")})
    figures += _of(world, "after MPI", imported)
    comm.barrier()
    figures += _of(world, "with a communicator", held())
    figures += _one_more(world)
    rows = [row for size in sizes for row in _all_reduce(world, comm, size, seconds)]
    figures += _of(world, "after sums", held())
    figures.append(_barrier(world, comm, seconds))
    figures += _mismatch(world, comm)
    comm.close()
    return rows, figures


def _figures(world: MPI.Intracomm, what: str, found: dict[str, tuple[float, str]]) -> list[Figure]:
    """Return the largest of each over all ranks (collective)."""
    from mpi4py.MPI import MAX

    return [
        Figure("scale", f"{what} {name}", world.allreduce(value, MAX), unit) for name, (value, unit) in found.items()
    ]


def _of(world: MPI.Intracomm, when: str, now: Held) -> list[Figure]:
    found = {
        f"memory, {when}": (now.memory / 2**20, "MiB"),
        f"descriptors, {when}": (float(now.descriptors), ""),
        f"TCP connections, {when}": (float(now.connections), ""),
    }
    shared = world.allreduce(now.shared) / world.size
    return [*_figures(world, "most", found), Figure("scale", f"/dev/shm for a rank, {when}", shared / 2**20, "MiB")]


def _one_more(world: MPI.Intracomm) -> list[Figure]:
    """Return what one more communicator of all ranks takes (collective)."""
    before, begin = held(), time.perf_counter()
    several = [mpidist.Communicator(world) for _ in range(_COMMUNICATORS)]
    took, after = time.perf_counter() - begin, held()
    tracemalloc.start()
    several.append(mpidist.Communicator(world))
    objects, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    found = {
        "time": (took / _COMMUNICATORS, "s"),
        "Python objects": (objects / 2**10, "KiB"),
        "memory": ((after.memory - before.memory) / _COMMUNICATORS / 2**10, "KiB"),
        "descriptors": ((after.descriptors - before.descriptors) / _COMMUNICATORS, ""),
    }
    figures = _figures(world, "one more communicator:", found)
    for comm in several:
        comm.close()
    return figures


def _all_reduce(world: MPI.Intracomm, comm: mpidist.Communicator, size: int, seconds: float) -> list[Row]:
    """Return the rows of an all-reduce of ``size`` bytes, mpidist's and MPI's (collective)."""
    count = max(1, size // _ITEM)
    point = Point(input_of(world.rank, count), sum_of_inputs(world.size, count))

    def ours(value: object) -> Callable[[], object]:
        return partial(comm.all_reduce, "SUM", value, out=point.out)

    cases: list[Case] = [
        point.case(OURS, "out=", ours, point.check_out),
        point.case(BARE, "private", lambda value: partial(world.Allreduce, value, point.out), point.check_out),
    ]
    return [
        make_row(
            "all_reduce",
            one.case.variant,
            one.case.by,
            one.times,
            ranks=world.size,
            size=size,
            count=count,
            op="SUM",
            calls=one.calls,
            wrong=one.wrong,
        )
        for one in measure(world, cases, seconds, least=5)
    ]


def _barrier(world: MPI.Intracomm, comm: mpidist.Communicator, seconds: float) -> Figure:
    """Return how long a handshake takes that nothing follows (collective)."""
    (found,) = measure(world, [Case(OURS, "barrier", comm.barrier)], seconds, least=5)
    return Figure("scale", "handshake", statistics.median(found.times) * 1e6, "us")


def _mismatch(world: MPI.Intracomm, comm: mpidist.Communicator) -> list[Figure]:
    """Return how long it takes to see that the last rank passes another shape, and the message (collective)."""
    times, text = [], ""
    for _ in range(_MISMATCHES):
        world.Barrier()
        begin = time.perf_counter()
        try:
            comm.all_reduce("SUM", np.ones(2 + (world.rank == world.size - 1)))
        except mpidist.MismatchError as error:
            text = str(error)
        times.append(time.perf_counter() - begin)
    found = {"time": (statistics.median(times) * 1e3, "ms"), "lines": (float(text.count("\n") + 1), "")}
    return _figures(world, "mismatch:", found)
