"""Which network NCCL takes between nodes, and what keeps it from a faster one that is there."""

from __future__ import annotations

from mpidist.cli.doctor_facts.facts import NcclNet
from mpidist.collectives.gpu import network_probes

SOCKETS = "TCP sockets"
_GET_PLUGIN = (
    "module load aws-ofi-nccl   # or build github.com/aws/aws-ofi-nccl and add its lib to LD_LIBRARY_PATH; then "
    "NCCL_DEBUG=INFO shows NET/OFI"
)
_GET_VERBS = "apt-get install libibverbs1 ibverbs-providers   # or: dnf install libibverbs"
_GET_DEVICES = (
    "docker run --device=/dev/infiniband --ulimit memlock=-1 ...   # outside of containers: ls -l /dev/infiniband"
)


def nccl_net() -> NcclNet:
    """Return which network NCCL takes on this machine, as all-reduces choose their way by it, too."""
    fabric, wanted = network_probes.rdma_fabric(), network_probes.setting("NCCL_NET")
    if fabric is not None:
        return NcclNet(fabric.name)
    if wanted.lower() not in ("", "ib", "ibext", "socket"):
        return NcclNet()  # NCCL itself says loudly that it has no such network
    plugin = None if wanted else network_probes.net_plugin()
    if plugin is not None:
        return NcclNet(f"plugin {plugin}")
    verbs, others = network_probes.behind_verbs(), network_probes.behind_plugins()
    if not (verbs or others):
        return NcclNet(SOCKETS)
    is_there = f"{(verbs or others)[0].name} is there,"
    disabled = network_probes.setting("NCCL_IB_DISABLE")
    if wanted.lower() == "socket":
        return NcclNet(SOCKETS, f"{is_there} and NCCL_NET={wanted}", "unset NCCL_NET")
    if verbs and disabled not in ("", "0"):
        return NcclNet(SOCKETS, f"{is_there} and NCCL_IB_DISABLE={disabled}", "unset NCCL_IB_DISABLE")
    if verbs and not network_probes.has_verbs():
        return NcclNet(SOCKETS, f"{is_there} and libibverbs.so.1 does not load", _GET_VERBS)
    if verbs:
        return NcclNet(SOCKETS, f"{is_there} and this process may not open /dev/infiniband/uverbs*", _GET_DEVICES)
    names = network_probes.setting("NCCL_NET_PLUGIN") or "libnccl-net.so"
    return NcclNet(SOCKETS, f"{is_there} for which NCCL needs a plugin, and {names} does not load", _GET_PLUGIN)
