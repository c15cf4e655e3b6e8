"""Small Python objects between ranks, pickled; for descriptions and other metadata, never for data."""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

import numpy as np

from mpidist.collectives.mpi.gathering import all_gather_bytes, broadcast_flat, gather_bytes_once
from mpidist.collectives.mpi.waiting import Comm, Steps

T = TypeVar("T")


def gather_objects(comm: Comm, value: T) -> Steps[list[T]]:
    """Return the objects of all ranks, in rank order, on every rank (collective; MPI_Iallgatherv)."""
    parts = yield from all_gather_bytes(comm, pickle.dumps(value))
    return [*map(pickle.loads, parts)]


def gather_equal_objects(comm: Comm, value: T) -> Steps[list[T]]:
    """Return the objects of all ranks; equal ones travel once, and are one (collective)."""
    parts = yield from gather_bytes_once(comm, pickle.dumps(value))
    objects = {part: pickle.loads(part) for part in dict.fromkeys(parts)}
    return [objects[part] for part in parts]


def broadcast_pickle(comm: Comm, pickled: bytes, root: int) -> Steps[Any]:
    """Return the object that rank ``root`` has pickled on every rank (collective; MPI_Ibcast)."""
    length = np.array([len(pickled)])
    yield from broadcast_flat(comm, length, root)
    data = np.frombuffer(pickled, np.uint8).copy() if comm.Get_rank() == root else np.empty(length[0], np.uint8)
    yield from broadcast_flat(comm, data, root)
    return pickle.loads(data.data)
