"""What tests of NCCL have in common: a communicator of all ranks, and arrays on this rank's pretended GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from mpidist.arrays.device_ops import ops_for
from mpidist.collectives.gpu.nccl import NcclComm, make_nccl
from mpidist.collectives.mpi.waiting import Steps, drive
from mpidist.core.concurrency import Deadline
from tests.support.fake_cupy import nccl as fake_nccl
from tests.support.fake_cupy.devices import CUDARuntimeError
from tests.support.speed import scaled

T = TypeVar("T")
_LEAVING_SECONDS = scaled(5.0)


def finished(steps: Steps[T]) -> T:
    """Run ``steps`` to the end, and fail where that takes too long."""
    return drive(steps, lambda: Deadline(None, lambda waited: TimeoutError(f"not done after {waited:.0f} s"), 30.0))


@contextmanager
def private_world() -> Iterator[Any]:
    """Duplicate the world for a while."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    try:
        yield comm
    finally:
        comm.Free()


class Rank:
    """This rank's end of a communicator, its GPU and a stream there."""

    def __init__(self, comm: NcclComm) -> None:
        self.comm = comm
        self.ops = ops_for("gpu")
        self.stream = self.ops.stream(comm.device)

    def array(self, values: Any) -> Any:
        """Put values on this rank's GPU, there for the stream."""
        array = self.ops.from_host(np.asarray(values), self.comm.device)
        self.stream.wait(self.ops.current_stream(self.comm.device).record())
        return array

    def empty(self, size: int, dtype: Any) -> Any:
        """Return an array of NaN or the like."""
        return self.array(np.full(size, 0xFF, f"V{np.dtype(dtype).itemsize}").view(dtype))

    def seen(self, array: Any) -> np.ndarray:
        """Return what an array holds once the stream is done."""
        self.stream.synchronize()
        return self.ops.to_host(array)

    def leave(self) -> None:
        """Close the communicator, or abort it where the stream does not get to its end: some rank has failed."""
        if self._gets_to_its_end():
            self.comm.close()
        else:
            self.comm.abort()

    def _gets_to_its_end(self) -> bool:
        give_up = time.monotonic() + _LEAVING_SECONDS
        try:
            done = self.stream.record()
            while not done.is_done and time.monotonic() < give_up:
                time.sleep(0.001)
        except CUDARuntimeError:
            return False
        return done.is_done


@contextmanager
def nccl_rank(device: int | None = None) -> Iterator[Rank]:
    """Make a communicator of all ranks, each on a GPU of its own; close it afterwards."""
    with private_world() as world:
        comm = finished(make_nccl(world, world.rank if device is None else device))
        assert isinstance(comm, NcclComm), comm
        rank = Rank(comm)
        try:
            yield rank
        finally:
            rank.leave()
        assert fake_nccl.open_communicators() == []
