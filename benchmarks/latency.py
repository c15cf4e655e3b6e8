"""Latency of what happens at every step: an empty ``strategy.run``, and an all-reduce of one number.

Start it under the launcher of your cluster, with any number of ranks::

    mpirun -n 2 python benchmarks/latency.py

The all-reduce is timed beside the same reduction by a bare mpi4py call on a duplicate communicator, in turn with
it in the same process. Times are medians over the calls of rank 0, in microseconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

import mpidist

ROUNDS = 21
CALLS = 200


def seconds_per_call(fn: Callable[[], object], calls: int) -> float:
    """Return the mean time of one call out of ``calls``."""
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    return (time.perf_counter() - start) / calls


def medians_in_turn(functions: dict[str, Callable[[], object]], calls: int = CALLS) -> dict[str, float]:
    """Return the median time of each function in microseconds; the functions are timed in turn."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS):
        for name, fn in functions.items():
            times[name].append(seconds_per_call(fn, calls))
    return {name: 1e6 * statistics.median(values) for name, values in times.items()}


def main() -> None:
    strategy = mpidist.MultiWorkerMirroredStrategy()
    from mpi4py import MPI

    bare = MPI.COMM_WORLD.Dup()
    send, receive = np.ones(()), np.empty(())

    def nothing() -> None:
        return None

    empty_run = medians_in_turn({"run": lambda: strategy.run(nothing)})["run"]

    def measure_all_reduce() -> dict[str, float]:
        context = mpidist.get_replica_context()
        return medians_in_turn(
            {
                "bare": lambda: bare.Allreduce(send, receive),
                "context": lambda: context.all_reduce("SUM", send),
            }
        )

    reduced = strategy.run(measure_all_reduce)
    if bare.rank == 0:
        print(f"{MPI.Get_library_version().splitlines()[0][:60]}, {bare.size} ranks; medians in microseconds")
        print(f"strategy.run of an empty function                {empty_run:6.2f}   (bar: at most 5)")
        print(f"bare mpi4py Allreduce of one float64             {reduced['bare']:6.2f}")
        over = reduced["context"] - reduced["bare"]
        print(f"ctx.all_reduce of one float64                    {reduced['context']:6.2f}")
        print(f"  over the bare call                             {over:6.2f}   (bar: at most 10)")
    bare.Free()
    strategy.close()


if __name__ == "__main__":
    main()
