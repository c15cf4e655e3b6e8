"""The GPUs that a process can see, and their division among a node's processes."""

from __future__ import annotations

from collections.abc import Sequence

from mpidist.arrays.cupy_module import find_cupy, gpus_may_be_present


def visible_devices() -> tuple[str, ...]:
    """Return the PCI bus ids of the visible GPUs, in CuPy's order; local.

    Empty where CuPy cannot be used, and imports it only where the machine has a driver.
    """
    cupy = find_cupy().module if gpus_may_be_present() else None
    if cupy is None:
        return ()
    runtime = cupy.cuda.runtime
    names = map(runtime.deviceGetPCIBusId, range(runtime.getDeviceCount()))
    return tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names)


def devices_of_each(devices_seen: Sequence[Sequence[str]]) -> list[tuple[int, ...]]:
    """Return the devices that each process of one node uses, by its own numbers.

    Processes that see the same devices share them out, by local rank, and the first ones get the rest; where there
    are more processes than devices each has one, in turn. Processes that see different devices, because the launcher
    gave each its own, have all they see.

    Args:
        devices_seen: For each process of the node, by local rank, the bus ids that it sees.

    >>> devices_of_each([["a", "b", "c"], ["a", "b", "c"]]), devices_of_each([["a", "b"], ["c", "d"]])
    ([(0, 1), (2,)], [(0, 1), (0, 1)])
    >>> devices_of_each([["a", "b"]] * 3)
    [(0,), (1,), (0,)]
    """
    groups = [frozenset(seen) for seen in devices_seen]
    devices = []
    for rank, (seen, group) in enumerate(zip(devices_seen, groups, strict=True)):
        # Where processes see the same devices in different orders, that of the first one deals them.
        dealt = devices_seen[groups.index(group)]
        processes, place = groups.count(group), groups[:rank].count(group)
        if processes >= len(dealt):
            mine = dealt[place % len(dealt) : place % len(dealt) + 1] if dealt else ()
        else:
            each, rest = divmod(len(dealt), processes)
            start = place * each + min(place, rest)
            mine = dealt[start : start + each + (place < rest)]
        devices.append(tuple(list(seen).index(device) for device in mine))
    return devices


def share_of_each(devices_seen: Sequence[Sequence[str]]) -> list[int]:
    """Return how many devices each process of one node may use; see ``devices_of_each``.

    >>> share_of_each([["a", "b", "c"], ["a", "b", "c"]]), share_of_each([["a", "b"], ["c", "d"]])
    ([2, 1], [2, 2])
    """
    return [len(devices) for devices in devices_of_each(devices_seen)]
