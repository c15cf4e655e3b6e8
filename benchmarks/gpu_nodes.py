"""All-reduce of arrays on GPUs between nodes, beside each of its stages by itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.inputs import count_wrong, input_of, sum_of_inputs
from benchmarks.rows import ALONE, OURS
from benchmarks.session import Session
from benchmarks.timing import Case
from mpidist.arrays.cupy_module import require_cupy
from mpidist.arrays.device_ops import ops_for
from mpidist.experimental import CommunicationOptions

# Whatever the network is: its stages are those that are timed by themselves.
_HIERARCHICAL = CommunicationOptions(algorithm="hierarchical")
STAGES = ("device to host", "between nodes", "host to device")


def run(session: Session, nbytes: int) -> None:
    """Time a sum of ``nbytes`` of float32 on the GPU, and its stages on as much page-locked memory (collective)."""
    cupy: Any = require_cupy()
    ops, device = ops_for("gpu"), int(cupy.cuda.Device().id)
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
        Case(ALONE, STAGES[0], to_host),
        Case(ALONE, STAGES[1], between_nodes),
        Case(ALONE, STAGES[2], to_device),
    ]
    session.measure("gpu_all_reduce", cases, size=nbytes, count=count, op="sum")
