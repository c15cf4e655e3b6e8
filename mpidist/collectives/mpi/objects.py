"""Small Python objects between ranks, pickled; for descriptions and other metadata, never for data."""

from __future__ import annotations

import pickle
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np

from mpidist.collectives.mpi.gathering import all_gather_flat, broadcast_flat, gather_lengths
from mpidist.collectives.mpi.waiting import Comm, Steps

T = TypeVar("T")


def gather_objects(comm: Comm, value: T) -> Steps[list[T]]:
    """Return the objects of all ranks, in rank order, on every rank (collective; MPI_Iallgatherv)."""
    pickled = pickle.dumps(value)
    rows = yield from gather_lengths(comm, [len(pickled)])
    lengths = [length for (length,) in rows]
    everything = np.empty(sum(lengths), np.uint8)
    yield from all_gather_flat(comm, np.frombuffer(pickled, np.uint8), everything, lengths)
    return [pickle.loads(everything[a:b].data) for a, b in pairwise(accumulate(lengths, initial=0))]


def broadcast_pickle(comm: Comm, pickled: bytes, root: int) -> Steps[Any]:
    """Return the object that rank ``root`` has pickled on every rank (collective; MPI_Ibcast)."""
    length = np.array([len(pickled)])
    yield from broadcast_flat(comm, length, root)
    data = np.frombuffer(pickled, np.uint8).copy() if comm.Get_rank() == root else np.empty(length[0], np.uint8)
    yield from broadcast_flat(comm, data, root)
    return pickle.loads(data.data)
