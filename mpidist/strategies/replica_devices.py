"""The devices of local replicas, and the distribution of a machine's GPUs over its ranks."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mpidist.arrays.device_ops import ops_for
from mpidist.arrays.streams import find_cupy, gpus_may_be_present
from mpidist.collectives import Communicator
from mpidist.core.errors import DeviceError
from mpidist.core.text import group_lines, groups_of, names_text, numbered_ranks, parse_device
from mpidist.topology.launchers import read_launcher
from mpidist.topology.topology import devices_of_each, visible_devices

# Equal in containers and virtual nodes of one machine.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def check_device(device: str) -> str:
    """Return the canonical form of a device of this process. Raise ValueError or DeviceError if it is missing."""
    parsed = parse_device(device)
    if parsed.job is not None:
        raise ValueError(
            f"device is {device!r}, which names a task; expected a device of this process, such as 'cpu:0': "
            "every rank names its own devices"
        )
    if parsed.kind == "gpu":
        ops_for("gpu")
        count = len(visible_devices())
        if parsed.number >= count:
            raise ValueError(
                f"device is {device!r}, and this process sees {count} GPU(s); expected one of "
                f"{[f'gpu:{number}' for number in range(count)]}, numbered among those that CUDA_VISIBLE_DEVICES "
                "leaves visible"
            )
    return str(parsed)


def check_devices(devices: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the canonical devices of the local replicas, or None. Raise TypeError, ValueError or DeviceError."""
    if devices is None:
        return None
    if isinstance(devices, str) or not isinstance(devices, (list, tuple)):
        raise TypeError(f"devices is {devices!r}; expected a list of device strings, such as ['gpu:0', 'gpu:1']")
    if not devices:
        raise ValueError("devices is empty; expected at least one device string, such as ['cpu:0']")
    canonical = tuple(check_device(device) for device in devices)
    if len(set(canonical)) < len(canonical):
        raise ValueError(f"devices are {list(devices)}; expected each device once")
    return canonical


class _Rank(NamedTuple):
    """The message of a rank about its devices."""

    named: tuple[str, ...] | None
    seen: tuple[str, ...]
    machine: str
    host: str
    why_none: str


def agreed_devices(
    devices: tuple[str, ...] | None, comm: Communicator | None
) -> tuple[tuple[str, ...], tuple[int, ...], bool]:
    """Return this rank's devices, each rank's number, and whether all have GPUs (collective).

    Ranks of one machine that name no devices and see the same GPUs divide these. A process without other ranks divides
    them with the processes that the launcher has started on the machine. Without GPUs, the device is the CPU.

    Raises DeviceError on every rank if some ranks have GPUs, and others name no devices and see no GPUs.
    """
    mine = visible_devices() if devices is None else ()
    if comm is None:
        chosen = _names(_share_alone(mine)) if devices is None else devices
        return chosen, (len(chosen),), _are_gpus(chosen)
    machine = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else platform.node()
    why_none = "" if devices is not None or mine else _why_no_gpu()
    ranks: list[_Rank] = comm.all_gather_object(_Rank(devices, mine, machine, platform.node(), why_none))
    everyone = []
    for rank, own in enumerate(ranks):
        if own.named is not None:
            everyone.append(own.named)
            continue
        sharing = [k for k, other in enumerate(ranks) if other.named is None and other.machine == own.machine]
        everyone.append(_names(devices_of_each([ranks[k].seen for k in sharing])[sharing.index(rank)]))
    _check_kinds(ranks, everyone)
    return everyone[comm.rank], tuple(map(len, everyone)), all(map(_are_gpus, everyone))


def _check_kinds(ranks: Sequence[_Rank], devices: Sequence[tuple[str, ...]]) -> None:
    """Raise DeviceError if some ranks would use GPUs and others, by default, the CPU."""
    without = [rank for rank, own in enumerate(ranks) if own.named is None and not own.seen]
    with_gpus = [rank for rank, own in enumerate(devices) if _are_gpus(own)]
    if not without or not with_gpus:
        return

    def on_hosts(some: Sequence[int]) -> str:
        return f"{numbered_ranks(some)} on {names_text(dict.fromkeys(ranks[rank].host for rank in some))}"

    groups = groups_of((rank, ranks[rank].why_none) for rank in without)
    shown = "; ".join(group_lines(groups, lambda reason, some: (f"{on_hosts(some)}: ", reason, "")))
    raise DeviceError(
        f"{on_hosts(with_gpus)} would compute on GPUs, and others see none. {shown}. A strategy reduces "
        "arrays of one kind; expected: GPUs for every rank (srun --gpus-per-task=1 gives each its own), or the job "
        "started without those ranks, or devices=['cpu:0'] on all ranks to leave the GPUs alone"
    )


def _why_no_gpu() -> str:
    if gpus_may_be_present():
        return find_cupy().problem
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        "no NVIDIA driver to be seen" if hidden is None else f"none to be seen, CUDA_VISIBLE_DEVICES being {hidden!r}"
    )


def _are_gpus(devices: tuple[str, ...]) -> bool:
    return parse_device(devices[0]).kind == "gpu"


def _names(gpus: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"gpu:{number}" for number in gpus) or ("cpu:0",)


def _share_alone(seen: tuple[str, ...]) -> tuple[int, ...]:
    launcher = read_launcher()
    if launcher is None or launcher.local_rank is None or launcher.local_size is None:
        return tuple(range(len(seen)))
    return devices_of_each([seen] * launcher.local_size)[launcher.local_rank]
