"""The CUDA devices that a process can see, and how the processes of one node share them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def visible_devices() -> tuple[str, ...]:
    """Return the PCI bus ids of the CUDA devices that CuPy sees in this process; local, imports CuPy.

    Empty where CuPy is not installed or finds no usable driver: that is what a CPU machine looks like.
    """
    try:
        import cupy
    except ImportError:
        return ()
    try:
        usable = cupy.cuda.is_available()
    except RuntimeError:  # CuPy before 14 raises CUDARuntimeError where there is no driver
        usable = False
    if not usable:
        return ()
    runtime: Any = cupy.cuda.runtime
    return tuple(_bus_id(runtime, device) for device in range(runtime.getDeviceCount()))


def _bus_id(runtime: Any, device: int) -> str:
    name = runtime.deviceGetPCIBusId(device)
    return name.decode() if isinstance(name, bytes) else str(name)


def share_of_each(devices_seen: Sequence[Sequence[str]]) -> list[int]:
    """Return how many devices each process of one node may use.

    Processes that see the same devices share them out, the first ones get the rest; where there are more
    processes than devices each has one, together with others. Processes that see different devices, because
    the launcher gave each its own, have all they see.

    Args:
        devices_seen: For each process of the node, by local rank, the bus ids that it sees.

    >>> share_of_each([["a", "b", "c"], ["a", "b", "c"]]), share_of_each([["a", "b"], ["c", "d"]])
    ([2, 1], [2, 2])
    """
    shares = []
    groups = [frozenset(seen) for seen in devices_seen]
    for position, seen in enumerate(groups):
        each, rest = divmod(len(seen), groups.count(seen))
        mine = each + (groups[:position].count(seen) < rest)
        shares.append(max(mine, 1) if seen else 0)
    return shares
