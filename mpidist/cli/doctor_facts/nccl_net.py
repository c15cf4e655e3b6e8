"""Which network NCCL takes between nodes, by its own rules: a plugin that loads, else InfiniBand, else TCP sockets."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path

from mpidist.cli.doctor_facts.facts import NcclNet

_PLUGIN = "libnccl-net.so"
_VERBS = "libibverbs.so.1"
SOCKETS = "TCP sockets"
_GET_PLUGIN = (
    "module load aws-ofi-nccl   # or build github.com/aws/aws-ofi-nccl and add its lib to LD_LIBRARY_PATH; then "
    "NCCL_DEBUG=INFO shows NET/OFI"
)
_GET_VERBS = "apt-get install libibverbs1 ibverbs-providers   # or: dnf install libibverbs"


def loads(library: str) -> bool:
    """Whether the dynamic linker finds a library, and what that needs."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def nccl_net(
    environ: Mapping[str, str], system: Path = Path("/sys/class"), loads: Callable[[str], bool] = loads
) -> NcclNet:
    """Return which network NCCL takes on this machine, and what keeps it from a faster one.

    Args:
        environ: The environment of NCCL.
        system: Where the kernel lists its devices.
        loads: Whether a library can be loaded.
    """
    verbs, others = _devices(system)
    asked, disabled = environ.get("NCCL_NET", "").lower(), environ.get("NCCL_IB_DISABLE", "0") not in ("", "0")
    plugin = None if asked in ("ib", "socket") else _plugin(environ, loads)
    if plugin is not None:
        return NcclNet(f"plugin {plugin}")
    if asked not in ("", "ib", "socket"):
        return NcclNet()  # NCCL itself says loudly that it has no such network
    has_verbs = loads(_VERBS)
    if verbs and has_verbs and not disabled and asked in ("", "ib"):
        return NcclNet("InfiniBand")
    if not (verbs or others):
        return NcclNet(SOCKETS)
    device = (verbs or others)[0]
    if asked == "socket" or (disabled and verbs):
        name = "NCCL_NET" if asked == "socket" else "NCCL_IB_DISABLE"
        return NcclNet(SOCKETS, f"{device} is there, and {name}={environ[name]}", f"unset {name}")
    if verbs:
        return NcclNet(SOCKETS, f"{device} is there, and {_VERBS} does not load", _GET_VERBS)
    names = environ.get("NCCL_NET_PLUGIN", _PLUGIN)
    return NcclNet(SOCKETS, f"{device} is there, for which NCCL needs a plugin, and {names} does not load", _GET_PLUGIN)


def _plugin(environ: Mapping[str, str], loads: Callable[[str], bool]) -> str | None:
    """Return the first library that NCCL would load as its network, None where there is none."""
    names = environ.get("NCCL_NET_PLUGIN", _PLUGIN)
    for name in [] if names.lower() == "none" else filter(None, names.split(",")):
        is_file = "/" in name or (name.startswith("lib") and name.endswith(".so"))
        for library in (name,) if is_file else (name, f"libnccl-net-{name}.so"):
            if loads(library):
                return library
    return None


def _devices(system: Path) -> tuple[list[str], list[str]]:
    """Return the active devices that NCCL drives by itself, and those that it needs a plugin for: EFA, Slingshot."""
    verbs, others = [], []
    for device in sorted(system.glob("infiniband/*")):
        ports = [port for port in device.glob("ports/*") if "ACTIVE" in _read(port / "state")]
        if any(_read(port / "link_layer") in ("InfiniBand", "Ethernet") for port in ports):
            verbs.append(device.name)
        elif ports:
            others.append(device.name)
    return verbs, others + sorted(path.name for path in system.glob("cxi/*"))


def _read(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""
