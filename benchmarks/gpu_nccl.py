"""What a call of NCCL costs through mpidist, beside the bare call of CuPy; on one rank, so that nothing travels."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.rows import ALONE, OURS
from benchmarks.session import Session
from benchmarks.timing import Case
from mpidist.arrays.cupy_module import require_cupy
from mpidist.arrays.device_ops import ops_for
from mpidist.collectives.gpu.nccl_comm import NcclComm
from mpidist.collectives.mpi.waiting import drive
from mpidist.collectives.reduce.nccl_types import nccl_reduction
from mpidist.core.deadline import Deadline
from mpidist.core.enums import ReduceOp

COUNT = 1024
_LIMIT_SECONDS = 120.0


def run(session: Session) -> None:
    """Time the host's part of an all-reduce of 1024 numbers, as mpidist and as CuPy call it (one rank)."""
    from mpi4py import MPI

    cupy: Any = require_cupy()
    ops, device = ops_for("gpu"), int(cupy.cuda.Device().id)
    base = MPI.COMM_SELF.Dup()
    made = drive(NcclComm.made(base, device), lambda: Deadline(None, _failure, _LIMIT_SECONDS))
    if isinstance(made, str):
        session.skipped.append(f"calls of NCCL: {made}")
        base.Free()
        return
    nccl = cupy.cuda.nccl
    bare = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    source, target = cupy.ones(COUNT, np.float32), cupy.zeros(COUNT, np.float32)
    stream = ops.stream(device)
    stream.wait(ops.current_stream(device).record())
    datatype, op, _ = nccl_reduction(source.dtype, ReduceOp.SUM)

    def call_bare() -> None:
        bare.allReduce(source.data.ptr, target.data.ptr, COUNT, datatype, op, stream.handle)

    def call_ours() -> None:
        made.all_reduce(source, target, ReduceOp.SUM, stream)

    def wrong(_: object) -> int:
        stream.synchronize()
        return int((target != 1).sum())

    cases = [Case(ALONE, "CuPy", call_bare, wrong), Case(OURS, "NcclComm", call_ours, wrong)]
    session.measure("gpu_nccl_call", cases, size=4 * COUNT, count=COUNT, op="sum")
    stream.synchronize()
    made.close()
    bare.destroy()
    base.Free()


def _failure(waited: float) -> TimeoutError:
    return TimeoutError(f"NCCL did not start within {waited:.0f} s")
