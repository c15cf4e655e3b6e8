"""Small Python objects between ranks, pickled; for descriptions and other metadata, never for data."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpidist.collectives.mpi.waiting import Steps, until_done
from mpidist.topology import import_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


def gather_objects(comm: MPI.Intracomm, value: T) -> Steps[list[T]]:
    """Return the objects of all ranks, in rank order, on every rank (collective; MPI_Iallgatherv)."""
    return (yield from gather_pickles(comm, pickle.dumps(value)))


def gather_pickles(comm: MPI.Intracomm, pickled: bytes) -> Steps[list[Any]]:
    """Return the objects of all ranks as :func:`gather_objects`, given one that is pickled already."""
    mpi = import_mpi()
    mine = np.frombuffer(pickled, np.uint8)
    lengths = np.zeros(comm.Get_size(), np.int64)
    yield from until_done(comm.Iallgather([np.array([mine.size]), 1, mpi.INT64_T], [lengths, 1, mpi.INT64_T]))
    everything = np.empty(int(lengths.sum()), np.uint8)
    yield from until_done(comm.Iallgatherv([mine, mpi.BYTE], [everything, lengths.tolist(), mpi.BYTE]))
    borders = np.concatenate([[0], np.cumsum(lengths)])
    return [pickle.loads(everything[a:b].tobytes()) for a, b in pairwise(borders)]


def broadcast_pickle(comm: MPI.Intracomm, pickled: bytes, root: int) -> Steps[Any]:
    """Return the object that rank ``root`` has pickled on every rank (collective; MPI_Ibcast)."""
    mpi = import_mpi()
    is_root = comm.Get_rank() == root
    data = np.frombuffer(pickled, np.uint8).copy() if is_root else np.empty(0, np.uint8)
    length = np.array([data.size], np.int64)
    yield from until_done(comm.Ibcast([length, 1, mpi.INT64_T], root))
    if not is_root:
        data = np.empty(int(length[0]), np.uint8)
    yield from until_done(comm.Ibcast([data, mpi.BYTE], root))
    return pickle.loads(data.tobytes())
