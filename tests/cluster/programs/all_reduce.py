"""All-reduces against NumPy; arguments: sizes in elements, dtypes and operations, each such as 1,1000."""

from __future__ import annotations

import hashlib
import socket
import sys
from typing import Any

import numpy as np
from result import leave

import mpidist
from mpidist.topology import Topology

Array = np.ndarray[Any, Any]
OPERATIONS = {"SUM": np.sum, "MAX": np.max, "MEAN": np.mean}
# Inputs repeat themselves, so that what comes out is known from little work; a prime, so that no chunk begins alike.
PERIOD = 4099


def period_of(rank: int, dtype: str) -> Array:
    return np.random.default_rng(rank).normal(0, 100, PERIOD).astype(dtype)


def wrong(result: Array, operation: str, ranks: int, count: int, dtype: str) -> int:
    """Return how many elements differ from the float64 result by more than the rounding of as many additions."""
    if result.shape != (count,):
        return max(1, count)
    values = np.stack([period_of(rank, dtype).astype(np.float64) for rank in range(ranks)])
    expected = OPERATIONS[operation](values, axis=0)
    kind = np.dtype(dtype)
    # Half precision is summed in single precision, so that only the result is rounded to it.
    rounding = ranks * np.finfo(np.float32 if dtype == "float16" else kind).eps if kind.kind == "f" else 0.0
    allowed = rounding * np.abs(values).sum(axis=0)
    if dtype == "float16":
        allowed += np.finfo(np.float16).eps * np.abs(expected)
    low, high = np.resize(expected - allowed, count), np.resize(expected + allowed, count)
    return int(np.count_nonzero(~((result >= low) & (result <= high))))


def main(sizes: list[int], dtypes: list[str], operations: list[str]) -> None:
    from mpi4py import MPI

    topology = Topology(MPI.COMM_WORLD)
    found: dict[str, Any] = {"host": socket.gethostname(), "node_of_rank": topology.node_of_rank}
    found |= {"wrong": [], "digests": [], "algorithms": []}
    topology.close()
    with mpidist.Communicator() as comm:
        for count in sizes:
            for dtype in dtypes:
                value = np.resize(period_of(comm.rank, dtype), count)
                for operation in operations:
                    result = np.asarray(comm.all_reduce(operation, value))
                    bad = wrong(result, operation, comm.size, count, dtype)
                    if bad:
                        found["wrong"].append(f"{operation} of {count} {dtype}: {bad} wrong")
                    found["digests"].append(hashlib.blake2b(result.tobytes()).hexdigest())
                    found["algorithms"].append(comm.last_algorithm)
        leave(comm.rank, found)


sizes, dtypes, operations = (argument.split(",") for argument in sys.argv[1:])
main([int(size) for size in sizes], dtypes, operations)
