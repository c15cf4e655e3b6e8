"""Which devices a strategy's local replicas run on."""

from __future__ import annotations

from collections.abc import Sequence

from mpidist.core.devices import parse_device


def default_devices() -> tuple[str, ...]:
    """Return the devices of a strategy that was given none: the CPU."""
    return ("cpu:0",)


def check_device(device: str) -> str:
    """Return the canonical form of a device of this process.

    Raises:
        ValueError: Not a device string, a device of another task, or a kind of device that is not served.
    """
    parsed = parse_device(device)
    if parsed.job is not None:
        raise ValueError(
            f"device is {device!r}, which names a task; expected a device of this process, such as 'cpu:0': "
            "every rank names its own devices"
        )
    if parsed.kind != "cpu":
        raise ValueError(f"device is {device!r}; this version of mpidist runs replicas on CPUs: 'cpu:0', 'cpu:1', ...")
    return str(parsed)


def check_devices(devices: Sequence[str] | None) -> tuple[str, ...]:
    """Return the canonical devices of the local replicas, the default ones for None.

    Raises:
        TypeError: Not a list or tuple of strings.
        ValueError: No devices, the same device twice, or errors of :func:`check_device`.
    """
    if devices is None:
        return default_devices()
    if isinstance(devices, str) or not isinstance(devices, (list, tuple)):
        raise TypeError(f"devices is {devices!r}; expected a list of device strings, such as ['cpu:0', 'cpu:1']")
    if not devices:
        raise ValueError("devices is empty; expected at least one device string, such as ['cpu:0']")
    canonical = tuple(check_device(device) for device in devices)
    if len(set(canonical)) < len(canonical):
        raise ValueError(f"devices are {list(devices)}; expected each device once")
    return canonical
