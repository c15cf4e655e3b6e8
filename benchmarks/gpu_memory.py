"""Memory of a GPU: packing beside a plain copy, and staging through page-locked memory beside one large copy."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from benchmarks.models import MODELS
from benchmarks.rows import COPY, OURS
from benchmarks.session import Session
from benchmarks.timing import Case
from mpidist.arrays.cupy_module import require_cupy
from mpidist.arrays.device_ops import ops_for
from mpidist.arrays.dtypes import as_dtype
from mpidist.collectives.gpu.device_streams import DeviceStreams
from mpidist.collectives.gpu.staging import StagingRing, staging_bytes

# Launches of one repetition, so that starting them hides behind the GPU's work.
ROUNDS = 10
# Dtypes of the arrays and of the flat buffer, and whether it is spread and divided instead of packed.
WAYS = (
    ("float32", "float32", False),
    ("float16", "float32", False),
    ("bfloat16", "float32", False),
    ("float32", "bfloat16", False),
    ("float32", "float32", True),
    ("float16", "float32", True),
)


def way_name(array: str, flat: str, unpacks: bool) -> str:
    """Return the variant of a row, such as ``"pack float16 to float32"``."""
    return f"unpack {flat} to {array}, divided" if unpacks else f"pack {array} to {flat}"


def run_packing(session: Session, model: str) -> None:
    """Time each way of packing the gradients of ``model``, and a copy as large as they are in float32 (collective).

    Sizes are bytes read and written.
    """
    cupy: Any = require_cupy()
    ops, device = ops_for("gpu"), int(cupy.cuda.Device().id)
    stream = ops.stream(device)
    shapes = MODELS[model]()
    count = sum(int(np.prod(shape)) for shape in shapes)
    nbytes = 4 * count
    source, target = (cupy.zeros(count, np.float32) for _ in range(2))

    def copy() -> None:
        for _ in range(ROUNDS):
            target.data.copy_from_device_async(source.data, nbytes, stream.raw)
        stream.synchronize()

    cases = [(COPY, "copy", copy, 2 * nbytes, None)]
    for array_name, flat_name, unpacks in WAYS:
        if "bfloat16" in (array_name, flat_name) and find_spec("ml_dtypes") is None:
            session.skipped.append(f"{way_name(array_name, flat_name, unpacks)}: bfloat16 needs ml_dtypes")
            continue
        arrays = [cupy.ones(shape, as_dtype(array_name)) for shape in shapes]
        flat = cupy.full(count, 2, as_dtype(flat_name))
        moved = count * (arrays[0].itemsize + flat.itemsize)
        call, check = _packing(ops, stream, arrays, flat, unpacks)
        cases.append((OURS, way_name(array_name, flat_name, unpacks), call, moved, check))
    cupy.cuda.Device().synchronize()
    for by, variant, call, moved, check in cases:
        session.measure(
            "gpu_pack", [Case(by, f"{model}, {variant}", call, check)], size=ROUNDS * moved, count=ROUNDS * count
        )


def _packing(
    ops: Any, stream: Any, arrays: list[Any], flat: Any, unpacks: bool
) -> tuple[Callable[[], object], Callable[[object], int]]:
    def pack() -> None:
        for _ in range(ROUNDS):
            ops.pack(arrays, flat, stream)
        stream.synchronize()

    def unpack() -> None:
        for _ in range(ROUNDS):
            ops.unpack(flat, arrays, 2, stream)
        stream.synchronize()

    def wrong(_: object) -> int:
        return sum(int((array.astype(np.float32) != 1).sum()) for array in (arrays if unpacks else [flat]))

    return (unpack if unpacks else pack), wrong


def run_staging(session: Session, nbytes: int) -> None:
    """Time copies to and from the host, whole and through the slots that collectives take (collective)."""
    cupy: Any = require_cupy()
    ops, device = ops_for("gpu"), int(cupy.cuda.Device().id)
    streams = DeviceStreams(ops, device)
    ring = StagingRing(streams, staging_bytes())
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
        _through(ring, array, streams.to_host, lambda slot, part: ops.copy_to_host(slot, part, streams.to_host))

    def staged_to_device() -> None:
        _through(ring, array, streams.to_device, lambda slot, part: ops.copy_to_device(part, slot, streams.to_device))

    cases = [
        Case(COPY, "device to host", whole_to_host),
        Case(OURS, "device to host", staged_to_host),
        Case(COPY, "host to device", whole_to_device),
        Case(OURS, "host to device", staged_to_device),
    ]
    session.measure("gpu_staging", cases, size=nbytes, count=nbytes, dtype="uint8")
    streams.close()


def _through(ring: StagingRing, array: Any, stream: Any, copy: Callable[[Any, Any], None]) -> None:
    """Copy all of ``array`` in chunks that take turns in the slots."""
    for start in range(0, array.size, ring.nbytes):
        part = array[start : start + ring.nbytes]
        slot = ring.take()
        while slot is None:
            slot = ring.take()
        copy(slot.array(part.size, part.dtype), part)
        ring.give_back(slot, stream.record())
    stream.synchronize()
