"""Benchmarks of parameter servers: `mpirun -n 2 python -m benchmarks parameter-server`, -n 3 with a coordinator.

Rank 0 is the server, rank 1 a worker. Pulls and pushes through the strategy, and the same requests and replies written
with bare mpi4py, are measured in turn, some rounds of each. With a third rank, rank 0 then coordinates functions that
rank 2 carries out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import mpidist
from benchmarks.bars import KIB, Verdict, size_text
from benchmarks.machine import describe
from benchmarks.report import results_text
from benchmarks.results import Results, save
from benchmarks.rows import MPI, OURS, Figure, Row, make_row
from benchmarks.sizes import sizes_of_text
from mpidist.cluster_resolver import MPIClusterResolver

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_RESULTS = Path(__file__).with_name("results")
_HEADER, _VALUE, _REPLY = 1, 2, 3
PULL, PUSH, ADD = "pull", "push", "push and add"
_STOP = -1
_MOST_CALLS = 200
_SMALL_BAR_US, _LARGE_BAR = 20.0, 0.8
_SCHEDULING_BAR_US = 200.0

# Seconds per call, by what was done, by whom and the size.
Times = dict[tuple[str, str, int], list[float]]


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks parameter-server", description=__doc__)
    top.add_argument("--sizes", type=sizes_of_text, default=sizes_of_text("1K,16K,64K,256K,1M,16M,64M"))
    top.add_argument("--rounds", type=int, default=11, help="how often both ways are measured (11)")
    top.add_argument("--functions", type=int, default=2000, help="functions that are scheduled in a round (2000)")
    top.add_argument("--out", type=Path, default=_RESULTS, help="folder of the result files (benchmarks/results)")
    return top


def main(arguments: list[str]) -> int:
    """Measure and, on rank 0, print and write; the status is 2 where there are not enough ranks."""
    import mpi4py.MPI

    options = parser().parse_args(arguments)
    comm = mpi4py.MPI.COMM_WORLD.Dup()
    if comm.size not in (2, 3):
        print("python -m benchmarks parameter-server: expected 2 or 3 ranks; type: mpirun -n 2 ...", file=sys.stderr)
        return 2
    times = _pulls_and_pushes(comm, options)
    scheduling = _scheduling(comm, options) if comm.size == 3 else []
    times, scheduling = comm.bcast(times, 1), comm.bcast(scheduling, 0)
    rows = [
        make_row(what, "-", by, seconds, ranks=2, size=size, count=size // 4)
        for (what, by, size), seconds in times.items()
    ]
    figures = _figures(times, scheduling)
    results = Results(describe(comm, ""), rows, figures, _verdicts(rows, figures))
    if comm.rank == 0:
        print(results_text(results))
        print(f"# written: {', '.join(map(str, save(results, options.out, 'parameter_server')))}")
    return 0


# Pulls and pushes ---------------------------------------------------------------------------------------------------


def _pulls_and_pushes(comm: Intracomm, options: argparse.Namespace) -> Times | None:
    """Measure both ways in turn; the worker returns the times."""
    pair = comm.Split(0 if comm.rank < 2 else 1, comm.rank)
    if comm.rank == 2:
        return None
    times: Times = {}
    for _ in range(options.rounds):
        if comm.rank == 0:
            _bare_server(pair, options.sizes)
            mpidist.Server(_resolver(pair)).join()
        else:
            _bare_worker(pair, options.sizes, times)
            _our_worker(pair, options.sizes, times)
        pair.Barrier()
    return times


def _resolver(pair: Intracomm) -> MPIClusterResolver:
    return MPIClusterResolver(pair, jobs={"ps": 1, "worker": 1})


def _bare_server(comm: Intracomm, sizes: list[int]) -> None:
    """Serve an array of each size, without a thought for errors, deadlines or other workers."""
    # Written, as those of a server are: what has never been written is one page of zeros, which the cache has.
    values = [np.ones(size // 4, np.float32) for size in sizes]
    scratch = [np.ones_like(value) for value in values]
    header, done = np.empty(2, np.int64), np.zeros(1, np.int64)
    while True:
        comm.Recv(header, 1, _HEADER)
        what, index = header
        if what == _STOP:
            return
        if what == 0:
            comm.Send(values[index], 1, _VALUE)
            continue
        target = values[index] if what == 1 else scratch[index]
        comm.Recv(target, 1, _VALUE)
        if what == 2:
            np.add(values[index], target, out=values[index])
        comm.Send(done, 1, _REPLY)


def _bare_worker(comm: Intracomm, sizes: list[int], times: Times) -> None:
    done = np.empty(1, np.int64)
    for index, size in enumerate(sizes):
        buffer = np.ones(size // 4, np.float32)
        headers = [np.array([what, index], np.int64) for what in range(3)]

        def pull(header: Any = headers[0], buffer: Any = buffer) -> None:
            comm.Send(header, 0, _HEADER)
            comm.Recv(buffer, 0, _VALUE)

        def push(header: Any, buffer: Any = buffer) -> None:
            comm.Send(header, 0, _HEADER)
            comm.Send(buffer, 0, _VALUE)
            comm.Recv(done, 0, _REPLY)

        _time(times, (PULL, MPI, size), pull)
        _time(times, (PUSH, MPI, size), lambda push=push, header=headers[1]: push(header))
        _time(times, (ADD, MPI, size), lambda push=push, header=headers[2]: push(header))
    comm.Send(np.array([_STOP, 0], np.int64), 0, _HEADER)


def _our_worker(comm: Intracomm, sizes: list[int], times: Times) -> None:
    strategy = mpidist.v1.experimental.ParameterServerStrategy(_resolver(comm))
    with strategy.scope():
        variables = [mpidist.Variable(np.zeros(size // 4, np.float32), name=f"v{size}") for size in sizes]
    for size, variable in zip(sizes, variables, strict=True):
        buffer = np.ones(size // 4, np.float32)
        _time(times, (PULL, OURS, size), variable.value)
        _time(times, (PUSH, OURS, size), lambda variable=variable, buffer=buffer: variable.assign(buffer))
        _time(times, (ADD, OURS, size), lambda variable=variable, buffer=buffer: variable.assign_add(buffer))
    strategy.close()


def _time(times: Times, key: tuple[str, str, int], call: Callable[[], object]) -> None:
    # The memory that a push leaves behind is there again for the next but one: all of it has been touched after three.
    for _ in range(3):
        call()
    calls = max(2, min(_MOST_CALLS, int(2e7 // key[2])))
    start = time.perf_counter()
    for _ in range(calls):
        call()
    times.setdefault(key, []).append((time.perf_counter() - start) / calls)


# Functions ----------------------------------------------------------------------------------------------------------


def _scheduling(comm: Intracomm, options: argparse.Namespace) -> list[float]:
    """Return the seconds per function that does nothing, of each round; on the coordinator."""
    resolver = MPIClusterResolver(comm, jobs={"chief": 1, "ps": 1, "worker": 1})
    if resolver.task_type != "chief":
        mpidist.Server(resolver).join()
        return []
    strategy = mpidist.ParameterServerStrategy(resolver)
    coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
    found = []
    for _ in range(options.rounds):
        start = time.perf_counter()
        for _ in range(options.functions):
            coordinator.schedule(_nothing)
        coordinator.join()
        found.append((time.perf_counter() - start) / options.functions)
    strategy.close()
    return found


def _nothing() -> None:
    pass


# Verdicts -----------------------------------------------------------------------------------------------------------


def _figures(times: Times, scheduling: list[float]) -> list[Figure]:
    smallest = min(size for _, _, size in times)
    pulls = statistics.median(times[PULL, OURS, smallest])
    figures = [Figure("requests", f"pulls of {size_text(smallest)} per second, one worker", 1 / pulls, "1/s")]
    if scheduling:
        figures.append(Figure("schedule", "a function that does nothing", statistics.median(scheduling) * 1e6, "us"))
    return figures


def _verdicts(rows: list[Row], figures: list[Figure]) -> list[Verdict]:
    found = []
    for ours in (row for row in rows if row.by == OURS):
        bare = next(r for r in rows if r.by == MPI and (r.operation, r.size) == (ours.operation, ours.size))
        what = f"{ours.operation} of {size_text(ours.size)}"
        if ours.size >= 256 * KIB:
            found.append(Verdict(f"{what}: as fast as MPI", bare.median / ours.median, _LARGE_BAR, True, "x", "-"))
        else:
            found.append(Verdict(f"{what}: over MPI", ours.median - bare.median, _SMALL_BAR_US, False, "us", "-"))
    found += [
        Verdict(f"{figure.operation}: {figure.name}", figure.value, _SCHEDULING_BAR_US, False, figure.unit, "-")
        for figure in figures
        if figure.operation == "schedule"
    ]
    return found
