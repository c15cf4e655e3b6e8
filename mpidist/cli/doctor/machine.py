"""The facts that one rank finds without messages: MPI, cores, /dev/shm, interfaces, GPUs, NCCL's network."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import platform
import socket
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import mpi4py
import numpy as np

from mpidist.arrays.streams import find_cupy, gpus_may_be_present
from mpidist.cli.doctor.facts import (
    CoreFacts,
    GpuFacts,
    Interface,
    MpiFacts,
    NcclNet,
    RankFacts,
    SharedMemoryFacts,
)
from mpidist.collectives.gpu import probes
from mpidist.collectives.gpu.nccl import nccl_binding, nccl_problem, nccl_version
from mpidist.collectives.node import native
from mpidist.core import __version__
from mpidist.core.settings import SETTINGS
from mpidist.topology import allowed_cores, import_mpi
from mpidist.topology.launchers import expand_hostlist, has_loose_barriers, read_batch_system, read_launcher
from mpidist.topology.mpi_library import library_of, loaded_library
from mpidist.topology.topology import visible_devices

_SOCKETS = "TCP sockets"
_GET_PLUGIN = (
    "module load aws-ofi-nccl   # or build github.com/aws/aws-ofi-nccl and add its lib to LD_LIBRARY_PATH; then "
    "NCCL_DEBUG=INFO shows NET/OFI"
)
_GET_VERBS = "apt-get install libibverbs1 ibverbs-providers   # or: dnf install libibverbs"
_GET_DEVICES = (
    "docker run --device=/dev/infiniband --ulimit memlock=-1 ...   # outside of containers: ls -l /dev/infiniband"
)
THREAD_SETTINGS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
_SHARED_MEMORY = "/dev/shm"
_NETWORK = Path("/sys/class/net")
_INFINIBAND = Path("/sys/class/infiniband")
_PCI = Path("/sys/bus/pci/devices")
# Counters of InfiniBand count words of four bytes.
_WORD = 4
# linux/sockios.h: the address and the mask of an interface.
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B
_PREFIX = "MPIDIST_"


def nccl_net() -> NcclNet:
    """Return the network that NCCL uses between nodes. The choice of all-reduces on GPUs depends on it, too."""
    fabric, wanted = probes.rdma_fabric(), probes.setting("NCCL_NET")
    if fabric is not None:
        return NcclNet(fabric.name)
    if wanted.lower() not in ("", "ib", "ibext", "socket"):
        return NcclNet()  # NCCL itself reports an unknown network
    plugin = None if wanted else probes.net_plugin()
    if plugin is not None:
        return NcclNet(f"plugin {plugin}")
    verbs, others = probes.behind_verbs(), probes.behind_plugins()
    if not (verbs or others):
        return NcclNet(_SOCKETS)
    disabled = probes.setting("NCCL_IB_DISABLE")
    if wanted.lower() == "socket":
        cause, command = f"and NCCL_NET={wanted}", "unset NCCL_NET"
    elif verbs and disabled not in ("", "0"):
        cause, command = f"and NCCL_IB_DISABLE={disabled}", "unset NCCL_IB_DISABLE"
    elif verbs and not probes.has_verbs():
        cause, command = "and libibverbs.so.1 does not load", _GET_VERBS
    elif verbs:
        cause, command = "and this process may not open /dev/infiniband/uverbs*", _GET_DEVICES
    else:
        names = probes.setting("NCCL_NET_PLUGIN") or "libnccl-net.so"
        cause, command = f"for which NCCL needs a plugin, and {names} does not load", _GET_PLUGIN
    return NcclNet(_SOCKETS, f"{(verbs or others)[0].name} is there, {cause}", command)


def identity() -> str:
    """Return a text that is equal for processes with one host name, kernel and /dev/shm."""
    parts = [socket.gethostname(), _read(Path("/proc/sys/kernel/random/boot_id"))]
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    with contextlib.suppress(OSError):
        parts.append(str(os.stat(_SHARED_MEMORY).st_dev))
    return " ".join(parts)


def cores() -> CoreFacts:
    """Return the cores that this process may run on, and the limit of its threads."""
    settings = {name: os.environ[name] for name in THREAD_SETTINGS if os.environ.get(name)}
    return CoreFacts(allowed_cores(), os.cpu_count() or 1, _quota(), settings)


def _quota() -> float | None:
    """Return the container's limit of CPU time in cores (cgroup v2 or v1)."""
    groups = Path("/sys/fs/cgroup")
    limit, period = (_read(groups / "cpu.max") or "max 1").split()
    if limit == "max":
        limit = _read(groups / "cpu/cpu.cfs_quota_us") or "-1"
        period = _read(groups / "cpu/cpu.cfs_period_us") or "1"
    return int(limit) / int(period) if int(limit) > 0 else None


def shared_memory() -> SharedMemoryFacts | None:
    """Return the size of /dev/shm. None if it is missing."""
    try:
        info = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return SharedMemoryFacts(info.f_blocks * info.f_frsize, info.f_bavail * info.f_frsize)


# Network --------------------------------------------------------------------------------------------------------------


def interfaces() -> tuple[Interface, ...]:
    """Return the network interfaces that are up, without the loopback interface."""
    # The state of virtual interfaces, such as tunnels, is "unknown".
    up = [path for path in _listed(_NETWORK) if path.name != "lo" and _read(path / "operstate") in ("up", "unknown")]
    found = []
    for path in up:
        speed = _read(path / "speed")
        known = speed.isdigit() and int(speed) > 0
        found.append(Interface(path.name, _network_of(path.name), int(speed) if known else None))
    for device in _listed(_INFINIBAND):
        if ports := _active_ports(device):
            rates = [_read(port / "rate").split() for port in ports]
            gigabits = max((float(rate[0]) for rate in rates if rate), default=0.0)
            found.append(Interface(device.name, "", round(gigabits * 1000) or None, is_infiniband=True))
    return tuple(found)


def _listed(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # missing, or an interface that cannot answer
        return ""


def _network_of(name: str) -> str:
    """Return the IPv4 address and prefix length of an interface, or an empty text."""
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, contextlib.suppress(OSError):
        address = socket.inet_ntoa(fcntl.ioctl(asked, _SIOCGIFADDR, request)[20:24])
        mask = socket.inet_ntoa(fcntl.ioctl(asked, _SIOCGIFNETMASK, request)[20:24])
        return ipaddress.ip_interface(f"{address}/{mask}").with_prefixlen
    return ""


def _active_ports(device: Path) -> list[Path]:
    return [port for port in _listed(device / "ports") if "ACTIVE" in _read(port / "state")]


def traffic() -> dict[str, int]:
    """Return the bytes that each network interface has sent and received so far."""
    moved = {
        path.name: _counted(path / "statistics" / name for name in ("rx_bytes", "tx_bytes"))
        for path in _listed(_NETWORK)
        if path.name != "lo"
    }
    for device in _listed(_INFINIBAND):
        counters = [port / "counters" for port in _active_ports(device)]
        words = _counted(folder / name for folder in counters for name in ("port_rcv_data", "port_xmit_data"))
        moved[device.name] = words * _WORD
    return moved


def _counted(counters: Iterable[Path]) -> int:
    return sum(int(_read(counter) or 0) for counter in counters)


# GPUs -----------------------------------------------------------------------------------------------------------------


def gpus() -> GpuFacts:
    """Return the GPUs that this process sees. CuPy is imported only if there may be GPUs."""
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not gpus_may_be_present():
        return GpuFacts(variable=variable)
    state = find_cupy()
    if state.module is None:
        return GpuFacts(has_driver=True, problem=state.problem, variable=variable)
    problem = nccl_problem() or ""
    devices = visible_devices()
    properties = state.module.cuda.runtime.getDeviceProperties

    def name(device: int) -> str:
        found = properties(device)["name"]
        return found.decode() if isinstance(found, bytes) else str(found)

    return GpuFacts(
        has_driver=True,
        visible=devices,
        names=tuple(map(name, range(len(devices)))),
        # CUDA writes bus ids in capitals.
        cores=tuple(cores_of_list(_read(_PCI / bus_id.lower() / "local_cpulist")) for bus_id in devices),
        nccl="" if problem else nccl_version(nccl_binding()),
        nccl_problem=problem,
        variable=variable,
        net=NcclNet() if problem else nccl_net(),
    )


def cores_of_list(text: str) -> tuple[int, ...]:
    """Return the cores in a list of the kernel.

    >>> cores_of_list("0-2,8"), cores_of_list("")
    ((0, 1, 2, 8), ())
    """
    ends = [part.partition("-")[::2] for part in text.split(",") if part]
    return tuple(core for first, last in ends for core in range(int(first), int(last or first) + 1))


def facts_of_this_rank() -> RankFacts:
    """Return the facts of this rank without its GPUs. Local."""
    system = read_batch_system()
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIX)}
    wrong = {}
    for name, setting in SETTINGS.items():
        try:
            setting.read()
        except ValueError as error:
            wrong[name] = str(error)
    try:
        without_core = native.why_not() or ""
    except (RuntimeError, ValueError) as error:
        without_core = str(error)
    return RankFacts(
        host=socket.gethostname(),
        machine=identity(),
        launcher=read_launcher(),
        mpi=_mpi(),
        software={
            "Python": platform.python_version(),
            "NumPy": np.__version__,
            "mpi4py": mpi4py.__version__,
            "mpidist": __version__,
        },
        cores=cores(),
        shared_memory=shared_memory(),
        interfaces=interfaces(),
        settings=settings,
        wrong_settings=wrong,
        unknown_settings=tuple(name for name in settings if name not in SETTINGS),
        batch_system=None if system is None else system.name,
        job_hosts=hosts_of_job(os.environ),
        without_core=without_core,
        without_core_between_nodes=native.why_not_between_nodes() or "",
        loose_barriers=has_loose_barriers(os.environ),
    )


def _mpi() -> MpiFacts:
    mpi = import_mpi()
    library = library_of(mpi.Get_library_version(), loaded_library())
    # Libraries number the levels differently.
    levels = {getattr(mpi, f"THREAD_{name}"): name for name in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
    world, path = mpi.COMM_WORLD, None if library.path is None else str(library.path)
    level = f"MPI_THREAD_{levels[mpi.Query_thread()]}"
    return MpiFacts(library.vendor, str(library), path, level, world.Get_size(), world.Get_rank())


def hosts_of_job(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts of the batch job. None of them if the system does not list them, or in an unknown form."""
    system = read_batch_system(environ)
    value = "" if system is None else environ.get(system.hosts, "")
    # The hosts only serve to name a silent one.
    with contextlib.suppress(ValueError, OSError):
        if system is None or not value:
            return ()
        if system.name == "Slurm":
            return tuple(expand_hostlist(value))
        if system.name == "PBS":
            return tuple(dict.fromkeys(Path(value).read_text().split()))
        if system.name == "LSF":  # each with its number of slots
            return tuple(value.split()[::2])
    return ()


def count_hosts_of_job(environ: Mapping[str, str]) -> int:
    """Return the number of hosts of the batch job. 0 if unknown.

    >>> count_hosts_of_job({"FLUX_URI": "local:///run/flux", "FLUX_JOB_NNODES": "2"})
    2
    """
    system = read_batch_system(environ)
    if system is not None and system.name == "Flux":
        count = environ.get(system.hosts, "")
        return int(count) if count.isdecimal() else 0
    return len(hosts_of_job(environ))
