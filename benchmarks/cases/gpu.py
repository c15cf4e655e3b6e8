"""GPU cases: staging compared with one large copy, calls of NCCL, and sums between nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.measuring.inputs import count_wrong, input_of, sum_of_inputs
from benchmarks.measuring.rows import ALONE, COPY, OURS
from benchmarks.measuring.session import Session
from benchmarks.measuring.timing import Case
from mpidist.arrays.device_ops import gpu_ops
from mpidist.arrays.streams import require_cupy
from mpidist.collectives.gpu.device_streams import DeviceStreams
from mpidist.collectives.gpu.nccl import make_nccl
from mpidist.collectives.gpu.probes import staging_bytes
from mpidist.collectives.gpu.reduce import SLOTS, StagingSlot
from mpidist.collectives.mpi.waiting import drive
from mpidist.core.concurrency import Deadline
from mpidist.core.options import ReduceOp
from mpidist.experimental import CommunicationOptions

COUNT_OF_A_CALL = 1024
_LIMIT_SECONDS = 120.0
# Whatever the network is: its stages are those that are timed by themselves.
_HIERARCHICAL = CommunicationOptions(algorithm="hierarchical")


def run_staging(session: Session, nbytes: int) -> None:
    """Time copies to and from the host, whole and through the slots that collectives take (collective)."""
    cupy: Any = require_cupy()
    ops, device = gpu_ops(), int(cupy.cuda.Device().id)
    streams = DeviceStreams(device)
    slots = [StagingSlot(streams, staging_bytes()) for _ in range(SLOTS)]
    array = cupy.zeros(nbytes, np.uint8)
    whole = ops.pinned(nbytes)
    cupy.cuda.Device().synchronize()

    def whole_to_host() -> None:
        ops.copy_to_host(whole, array, streams.to_host)
        streams.to_host.synchronize()

    def whole_to_device() -> None:
        ops.copy_to_device(array, whole, streams.to_device)
        streams.to_device.synchronize()

    def staged_to_host() -> None:
        _through(slots, array, streams.to_host, lambda slot, part: ops.copy_to_host(slot, part, streams.to_host))

    def staged_to_device() -> None:
        _through(slots, array, streams.to_device, lambda slot, part: ops.copy_to_device(part, slot, streams.to_device))

    cases = [
        Case(COPY, "device to host", whole_to_host),
        Case(OURS, "device to host", staged_to_host),
        Case(COPY, "host to device", whole_to_device),
        Case(OURS, "host to device", staged_to_device),
    ]
    session.measure("gpu_staging", cases, size=nbytes, count=nbytes, dtype="uint8")
    streams.close()


def _through(slots: list[StagingSlot], array: Any, stream: Any, copy: Callable[[Any, Any], None]) -> None:
    """Copy all of ``array`` in chunks that take turns in the slots."""
    nbytes = staging_bytes()
    for number, start in enumerate(range(0, array.size, nbytes)):
        part, slot = array[start : start + nbytes], slots[number % SLOTS]
        while not slot.free_after.is_done:
            pass
        copy(slot.array(part.size, part.dtype), part)
        slot.free_after = stream.record()
    stream.synchronize()


def run_nccl_call(session: Session) -> None:
    """Time the host's part of an all-reduce of 1024 numbers, as mpidist and as CuPy call it (one rank)."""
    from mpi4py import MPI

    cupy: Any = require_cupy()
    ops, device = gpu_ops(), int(cupy.cuda.Device().id)
    base = MPI.COMM_SELF.Dup()
    made = drive(make_nccl(base, device), lambda: Deadline(None, _failure, _LIMIT_SECONDS))
    if isinstance(made, str):
        session.skipped.append(f"calls of NCCL: {made}")
        base.Free()
        return
    nccl = cupy.cuda.nccl
    bare = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    source, target = cupy.ones(COUNT_OF_A_CALL, np.float32), cupy.zeros(COUNT_OF_A_CALL, np.float32)
    stream = ops.stream(device)
    stream.wait(ops.current_stream(device).record())

    def call_bare() -> None:
        bare.allReduce(
            source.data.ptr, target.data.ptr, COUNT_OF_A_CALL, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.handle
        )

    def call_ours() -> None:
        made.all_reduce(source, target, ReduceOp.SUM, stream)

    def wrong(_: object) -> int:
        stream.synchronize()
        return int((target != 1).sum())

    cases = [Case(ALONE, "CuPy", call_bare, wrong), Case(OURS, "NcclComm", call_ours, wrong)]
    session.measure("gpu_nccl_call", cases, size=4 * COUNT_OF_A_CALL, count=COUNT_OF_A_CALL, op="sum")
    stream.synchronize()
    made.close()
    bare.destroy()
    base.Free()


def _failure(waited: float) -> TimeoutError:
    return TimeoutError(f"NCCL did not start within {waited:.0f} s")


def run_between_nodes(session: Session, nbytes: int) -> None:
    """Time a sum of ``nbytes`` of float32 on the GPU, and its stages on as much page-locked memory (collective)."""
    cupy: Any = require_cupy()
    ops, device = gpu_ops(), int(cupy.cuda.Device().id)
    count = nbytes // 4
    pinned = ops.pinned(nbytes).view(np.float32)[:count]
    pinned[...] = input_of(session.rank, count)
    source, target = ops.from_host(pinned, device), cupy.zeros(count, np.float32)
    stream = ops.stream(device)
    cupy.cuda.Device().synchronize()

    def all_reduce() -> None:
        session.comm.all_reduce("SUM", source, out=target, options=_HIERARCHICAL)
        cupy.cuda.Device().synchronize()

    def wrong(_: object) -> int:
        return count_wrong(ops.to_host(target), sum_of_inputs(session.ranks, count))

    def to_host() -> None:
        ops.copy_to_host(pinned, source, stream)
        stream.synchronize()

    def to_device() -> None:
        ops.copy_to_device(target, pinned, stream)
        stream.synchronize()

    def between_nodes() -> None:
        session.comm.all_reduce("SUM", pinned, out=pinned)

    cases = [
        Case(OURS, "whole", all_reduce, wrong, session.last_algorithm, lambda: target.fill(0)),
        Case(ALONE, "device to host", to_host),
        Case(ALONE, "between nodes", between_nodes),
        Case(ALONE, "host to device", to_device),
    ]
    session.measure("gpu_all_reduce", cases, size=nbytes, count=count, op="sum")
