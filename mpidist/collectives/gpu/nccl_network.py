"""Whether NCCL reaches other nodes past the kernel (RDMA): it does not tell, so this looks where it looks.

That is, in this order: at a plugin (``libnccl-net*.so``), such as the one for libfabric, at InfiniBand and RoCE, and
then it takes sockets without a word.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mpidist.collectives.mpi.gathering import agreed_minimum
from mpidist.collectives.mpi.waiting import Steps

if TYPE_CHECKING:
    from mpi4py import MPI

_PORTS = "class/infiniband/*/ports/*"
_SLINGSHOT = "class/cxi/*"
_SLINGSHOT_GIGABITS = 200.0
_VERBS = ("libibverbs.so", "libibverbs.so.1")
_SYS, _VERBS_DEVICES = Path("/sys"), Path("/dev/infiniband")
# What NCCL takes for its environment, too.
_FILES = (Path("~/.nccl.conf"), Path("/etc/nccl.conf"))


class Fabric(NamedTuple):
    """A network that NCCL takes without the kernel."""

    name: str
    gigabits: float
    """Of its fastest port, in a second."""


def rdma_fabric() -> Fabric | None:
    """Return what NCCL takes between nodes without the kernel; None where it takes sockets, and in doubt."""
    wanted = setting("NCCL_NET").lower()
    if wanted == "socket":
        return None
    if not wanted.startswith("ib"):
        fabrics = behind_plugins()
        plugin = net_plugin() if fabrics else None
        if plugin is not None:
            return Fabric(f"{fabrics[0].name} by {plugin}", max(fabric.gigabits for fabric in fabrics))
    if wanted not in ("", "ib", "ibext") or setting("NCCL_IB_DISABLE") not in ("", "0"):
        return None
    fabrics = behind_verbs()
    if not fabrics or not has_verbs() or not may_use_verbs():
        return None
    return Fabric(fabrics[0].name, max(fabric.gigabits for fabric in fabrics))


def rdma_everywhere(comm: MPI.Intracomm) -> Steps[bool]:
    """Return whether all ranks have such a network (collective)."""
    return bool((yield from agreed_minimum(comm, int(rdma_fabric() is not None))))


def behind_verbs() -> list[Fabric]:
    """Return the ports in use that NCCL drives by itself: InfiniBand and RoCE."""
    return _ports("InfiniBand", "Ethernet")


def behind_plugins() -> list[Fabric]:
    """Return the ports in use for which NCCL needs a plugin."""
    # Amazon's EFA is listed among the devices of InfiniBand, and has neither of its link layers.
    slingshot = [Fabric(path.name, _SLINGSHOT_GIGABITS) for path in sorted(_SYS.glob(_SLINGSHOT))]
    return slingshot + _ports("Unknown", "Unspecified")


def net_plugin() -> str | None:
    """Return the first library that NCCL would load as its network, None where there is none."""
    return next((name for name in _plugins() if _loads(name)), None)


def has_verbs() -> bool:
    """Whether the library for InfiniBand loads."""
    return any(map(_loads, _VERBS))


def setting(name: str) -> str:
    """Return what a variable of NCCL is set to, by the environment or its files; empty where it is not."""
    if name in os.environ:
        return os.environ[name].strip()
    for path in _FILES:
        for line in _read(Path(os.path.expanduser(path))).splitlines():
            key, _, value = line.partition("=")
            if key.strip() == name:
                return value.strip()
    return ""


def _ports(*link_layers: str) -> list[Fabric]:
    """Return the ports in use that have one of these link layers."""
    found = []
    for port in sorted(_SYS.glob(_PORTS)):
        # As in "4: ACTIVE" and "400 Gb/sec (4X NDR)".
        if "ACTIVE" in _read(port / "state") and _read(port / "link_layer") in link_layers:
            found.append(Fabric(port.parents[1].name, float(_read(port / "rate").partition(" ")[0] or 0)))
    return found


def _read(path: Path) -> str:
    # Some are not there, or not for everybody, and ports come and go.
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


def _plugins() -> Iterator[str]:
    """Yield the file names under which NCCL looks for plugins."""
    given = setting("NCCL_NET_PLUGIN") or "libnccl-net.so"
    for name in given.split(",") if given.lower() != "none" else ():
        yield name
        if "/" not in name and not (name.startswith("lib") and name.endswith(".so")):
            yield f"libnccl-net-{name}.so"


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def may_use_verbs() -> bool:
    """Whether this process may use any device of InfiniBand: in a container there may be none."""
    return any(os.access(path, os.R_OK | os.W_OK) for path in _VERBS_DEVICES.glob("uverbs*"))
