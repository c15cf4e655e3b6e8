"""The checks of doctor: functions from the facts of a job to findings. They call neither MPI nor the system."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import groupby
from statistics import median

from mpidist.cli.doctor import commands
from mpidist.cli.doctor.burn import check_burn
from mpidist.cli.doctor.facts import (
    ERROR,
    WARNING,
    CoreFacts,
    Finding,
    GpuFacts,
    Interface,
    JobFacts,
    Pair,
)
from mpidist.cluster_resolver.cluster_spec import deal_tasks
from mpidist.collectives.node import native
from mpidist.collectives.reduce.registry import size_text
from mpidist.core.settings import JOBS, NATIVE, SETTINGS, TUNING_FILE
from mpidist.core.text import groups_of, names_text, numbered_ranks, ranks_text
from mpidist.topology.launchers import BATCH_SYSTEMS
from mpidist.topology.topology import devices_of_each

_NEEDED_LEVEL = "MPI_THREAD_MULTIPLE"
# Room for a large bucket of gradients, its result, MPI and NCCL.
_ENOUGH_BYTES, _SUGGESTED = 256 << 20, "8g"
_NAMES_GPUS = re.compile(r"\d|GPU-|MIG-")
# The end of a slice's name.
_SLICE = re.compile(r" MIG (\S+)$")
_MOST_GPU_PROBLEMS, _MOST_HOST_PAIRS = 4, 8
_LEAST_LINKS, _MUCH_SLOWER = 3, 0.5


def findings(job: JobFacts) -> list[Finding]:
    """Return the findings of all checks, the errors first."""
    found = [finding for check in CHECKS for finding in check(job)]
    return sorted(found, key=lambda finding: finding.level != ERROR)


def _hosts(job: JobFacts, ranks: Sequence[int]) -> str:
    return names_text(dict.fromkeys(job.known[rank].host for rank in ranks))


# The world, and its software ------------------------------------------------------------------------------------


def check_mpi(job: JobFacts) -> Iterator[Finding]:
    """Check thread support, and that the launcher's barriers hold all nodes."""
    mpi = job.first.mpi
    if mpi.thread_level != _NEEDED_LEVEL:
        command = {
            "Cray MPICH": "export MPICH_MAX_THREAD_SAFETY=multiple",
            "Intel MPI": "export I_MPI_THREAD_SPLIT=0 I_MPI_THREAD_MAX=2",
        }.get(mpi.vendor, "module avail mpi   # and load one that is built with thread support")
        text = (
            f"{mpi.name} gives {mpi.thread_level}. mpidist needs {_NEEDED_LEVEL} to advance collectives while the "
            "program computes."
        )
        yield Finding(WARNING, "threads", text, command)
    if len(job.machines) > 1 and job.first.loose_barriers:
        text = (
            "Slurm's PMIx lets ranks leave MPI_Init while ranks of other nodes are still in it. A rank that receives a "
            "message there can end with a segmentation fault."
        )
        yield Finding(WARNING, "start", text, "export SLURM_PMIX_FENCE=ring   # before srun")


def check_software(job: JobFacts) -> Iterator[Finding]:
    """Check that versions are equal. Pickles and the order of messages depend on them."""
    first = job.first
    for name, version in first.software.items():
        others: dict[str, list[str]] = {}
        for facts in job.known.values():
            if facts.software[name] != version:
                others.setdefault(facts.software[name], []).append(facts.host)
        for other, hosts in others.items():
            command = f"python -m pip install '{name.lower()}=={version}'   # on {hosts[0]}"
            if name == "Python":
                command = (
                    f"/path/to/bin/python train.py   # one path for all ranks; compare: ssh {hosts[0]} which python"
                )
            text = f"{name} is {version} on {first.host} and {other} on {names_text(dict.fromkeys(hosts))}."
            yield Finding(ERROR, "software", text, command)
    odd = next((facts for facts in job.known.values() if facts.mpi.name != first.mpi.name), None)
    if odd is not None:
        text = f"mpi4py loaded {first.mpi.name} on {first.host} and {odd.mpi.name} on {odd.host}."
        path = first.mpi.path or "/path/to/libmpi.so"
        yield Finding(ERROR, "software", text, f"export MPI4PY_LIBMPI={path}   # for all ranks")


def check_native_core(job: JobFacts) -> Iterator[Finding]:
    """Check that every rank has the native core. If one lacks it, no rank uses it."""
    several = len(job.machines) > 1
    found = (
        (rank, facts.without_core or several * facts.without_core_between_nodes) for rank, facts in job.known.items()
    )
    reasons = {rank: reason for rank, reason in found if reason}
    if not reasons:
        return
    rank, reason = next(iter(reasons.items()))
    first = job.known[rank]
    if NATIVE.name in first.settings:
        command = f"unset {NATIVE.name}"
    else:
        reinstall = "python -m pip install --force-reinstall --no-binary=mpi4py mpi4py"
        command = f"{native.build_command() if first.without_core else reinstall}   # on {first.host}; docs/install.md"
    text = (
        f"{numbered_ranks(reasons).capitalize()} on {_hosts(job, list(reasons))} cannot use the native core: {reason}. "
        "The ranks of a node exchange messages instead of sharing memory."
    )
    yield Finding(WARNING, "native core", text, command)


# Settings -------------------------------------------------------------------------------------------------------


def check_settings(job: JobFacts) -> Iterator[Finding]:
    """Check names and values of settings, and that the ranks agree."""
    wrong = {name: text for facts in job.known.values() for name, text in facts.wrong_settings.items()}
    for name, text in sorted(wrong.items()):
        yield Finding(ERROR, "settings", text, f"unset {name}")
    for name in sorted({name for facts in job.known.values() for name in facts.unknown_settings}):
        close = get_close_matches(name, SETTINGS, n=1)
        meant = f" Did you mean {close[0]}?" if close else ""
        command = f'export {close[0]}="${name}"; unset {name}' if close else f"unset {name}"
        yield Finding(WARNING, "settings", f"{name} is no setting of mpidist.{meant}", command)
    yield from _roles(job)
    first = job.first.settings
    names = {name for facts in job.known.values() for name in facts.settings} - {TUNING_FILE.name}  # read by rank 0
    differing = sorted(
        name for name in names if any(facts.settings.get(name) != first.get(name) for facts in job.known.values())
    )
    if differing:
        others = [rank for rank, facts in job.known.items() if facts.settings != first]
        text = f"{' and '.join(differing)} on rank 0 and on {numbered_ranks(others)} differ. They must be equal."
        yield Finding(ERROR, "settings", text, commands.with_settings(job.first, differing))


def _roles(job: JobFacts) -> Iterator[Finding]:
    """Check that the tasks of ``MPIDIST_JOBS`` are as many as the ranks."""
    text, first = job.first.settings.get(JOBS.name), job.first
    jobs = JOBS.parse(text) if text and JOBS.name not in first.wrong_settings else None
    if jobs is None:
        return
    # A process without a launcher may check the environment of a job that it is no rank of.
    size = sum(jobs.values()) if first.launcher is None and first.mpi.size == 1 else len(job.ranks)
    try:
        deal_tasks(jobs, size, JOBS.name)
    except ValueError as error:
        yield Finding(ERROR, "settings", f"{error}.", f"unset {JOBS.name}")


def check_table(job: JobFacts) -> Iterator[Finding]:
    """Check that the tuning file is valid, and measured on such ranks."""
    collectives = job.collectives
    # A single rank uses no table.
    if collectives is None or not collectives.table_error or len(job.ranks) == 1:
        return
    text = f"{TUNING_FILE.name}: {collectives.table_error}"
    if collectives.table_origin == "the shipped table":
        program = f'python -m mpidist tune --out "${TUNING_FILE.name}"'
        command = commands.start(job, len(job.ranks), program=program)
        yield Finding(WARNING, "table", f"{text}. mpidist uses the shipped table.", command)
    else:
        yield Finding(ERROR, "table", text, f"unset {TUNING_FILE.name}")


# Cores and /dev/shm ---------------------------------------------------------------------------------------------


def check_cores(job: JobFacts) -> list[Finding]:
    """Check the number of cores, then how ranks are bound, then the threads of BLAS."""
    return _crowded(job) or _doubled(job) or _pinned(job) or _threads(job)


def _of_machine(cores: CoreFacts) -> int:
    """Return the number of cores of the machine, or the container's limit."""
    return min(cores.machine, math.ceil(cores.quota)) if cores.quota else cores.machine


def _usable(job: JobFacts, ranks: Sequence[int]) -> int:
    """Return the number of cores for the ranks of one machine."""
    seen = [job.known[rank].cores for rank in ranks]
    if all(len(cores.allowed) == 1 for cores in seen):
        # Each rank is bound to one core, which says nothing about the number of cores.
        return _of_machine(seen[0])
    return min(_of_machine(seen[0]), len({core for cores in seen for core in cores.allowed}))


def _crowded(job: JobFacts) -> list[Finding]:
    machines = [ranks for ranks in job.machines.values() if _usable(job, ranks) < len(ranks)]
    if not machines:
        return []
    cores, hosts = _usable(job, machines[0]), names_text(job.known[ranks[0]].host for ranks in machines)
    text = (
        f"{len(machines[0])} ranks share {cores} core{'s' * (cores > 1)} on {hosts}. A rank that computes delays the "
        "ranks that wait for it."
    )
    fitting = sum(min(len(ranks), _usable(job, ranks)) for ranks in job.machines.values())
    return [Finding(WARNING, "cores", text, commands.start_unbound(job, fitting, threads=1))]


def _doubled(job: JobFacts) -> list[Finding]:
    for ranks in job.machines.values():
        by_core: dict[tuple[int, ...], list[int]] = {}
        for rank in ranks:
            by_core.setdefault(job.known[rank].cores.allowed, []).append(rank)
        for allowed, several in by_core.items():
            if len(allowed) < len(several):
                cores = f"{', '.join(map(str, allowed))} of {_of_machine(job.known[several[0]].cores)}"
                who = f"{numbered_ranks(several).capitalize()} on {job.host(several[0])}"
                text = f"{who} are bound to core {cores}, which they share while others are idle."
                return [Finding(WARNING, "binding", text, _unbound(job))]
    return []


def _pinned(job: JobFacts) -> list[Finding]:
    cores = {rank: facts.cores for rank, facts in job.known.items()}
    pinned = [rank for rank, seen in cores.items() if len(seen.allowed) == 1 and _of_machine(seen) > 1]
    if not pinned:
        return []
    text = (
        f"{numbered_ranks(pinned).capitalize()} may run on one core only, of {_of_machine(cores[pinned[0]])}. The "
        "threads of BLAS, and the thread that advances collectives in the background, share it with the program."
    )
    return [Finding(WARNING, "binding", text, _unbound(job))]


def _unbound(job: JobFacts) -> str:
    if job.first.launcher is None:
        return f"taskset --cpu-list 0-{job.first.cores.machine - 1} python train.py"
    share = min(_of_machine(job.known[ranks[0]].cores) // len(ranks) for ranks in job.machines.values())
    return commands.start_unbound(job, len(job.ranks), threads=max(1, share))


def _threads(job: JobFacts) -> list[Finding]:
    for ranks in job.machines.values():
        cores, seen = _usable(job, ranks), [job.known[rank].cores for rank in ranks]
        # Without a limit, a library starts a thread for each core that it may run on.
        threads = sum(len(each.allowed) for each in seen if not each.thread_settings)
        if len(ranks) > 1 and threads > cores:
            text = (
                f"{len(ranks)} ranks on {job.host(ranks[0])} share {cores} cores, and nothing limits the threads of "
                f"BLAS: all together start {threads}."
            )
            each_rank = max(1, cores // len(ranks))
            if all(len(facts.cores.allowed) == facts.cores.machine for facts in job.known.values()):
                command = commands.start_unbound(job, len(job.ranks), threads=each_rank)
            else:
                command = commands.start(job, len(job.ranks), settings={"OMP_NUM_THREADS": str(each_rank)})
            return [Finding(WARNING, "threads", text, command)]
    return []


def check_shared_memory(job: JobFacts) -> Iterator[Finding]:
    """Check the free space of /dev/shm. Docker gives 64 MiB."""
    first = [job.known[ranks[0]] for ranks in job.machines.values()]
    free = {facts.host: facts.shared_memory.free if facts.shared_memory else 0 for facts in first}
    short = {host: nbytes for host, nbytes in free.items() if nbytes < _ENOUGH_BYTES}
    if short:
        text = (
            f"/dev/shm has {size_text(min(short.values()))} free on {names_text(short)}, less than "
            f"{size_text(_ENOUGH_BYTES)}. Ranks of one node that find no room in it reduce by messages, which is "
            "slower, and NCCL fails."
        )
        resize = f"mount -o remount,size={_SUGGESTED} /dev/shm   # as root; in a container: docker run --shm-size="
        yield Finding(WARNING, "/dev/shm", text, f"{resize}{_SUGGESTED}")


# GPUs -----------------------------------------------------------------------------------------------------------


def check_gpus(job: JobFacts) -> list[Finding]:
    """Check driver, CuPy, NCCL, the GPUs and cores of each rank, and NCCL's network."""
    of_ranks = _some_without(job) or _several(job)
    return [*_unusable(job), *_without_driver(job), *of_ranks, *_shared(job), *_far(job), *_slow_net(job)]


def devices(job: JobFacts) -> dict[int, tuple[str, ...]]:
    """Return the bus ids of the GPUs that each rank shall use."""
    numbers = _numbers(job)
    return {rank: tuple(job.known[rank].gpus.visible[number] for number in numbers[rank]) for rank in numbers}


def labels(job: JobFacts) -> dict[int, list[str]]:
    """Return the labels of the GPUs that each rank uses. Slices (MIG) are marked."""
    return {
        rank: [_label(job.known[rank].gpus, number) for number in numbers] for rank, numbers in _numbers(job).items()
    }


def _label(seen: GpuFacts, number: int) -> str:
    part = _SLICE.search(seen.names[number])
    return f"{f'MIG {part[1]} of ' if part else ''}GPU {seen.visible[number]}"


def _numbers(job: JobFacts) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for ranks in job.machines.values():
        found.update(zip(ranks, devices_of_each([job.known[rank].gpus.visible for rank in ranks]), strict=True))
    return found


def _unusable(job: JobFacts) -> Iterator[Finding]:
    problems = {rank: facts.gpus.problem or facts.gpus.nccl_problem for rank, facts in job.known.items()}
    groups = groups_of((rank, problem) for rank, problem in problems.items() if problem)
    for problem, ranks in groups[:_MOST_GPU_PROBLEMS]:
        # The text of the problem names the command.
        named = re.search(r"pip install (?:-e )?('[^']+'|[\w.-]+)", problem)
        command = f"python -m {named[0]}" if named else "nvidia-smi && python -c 'import cupy; cupy.show_config()'"
        text = f"{numbered_ranks(ranks).capitalize()} on {_hosts(job, ranks)}: {problem}"
        yield Finding(WARNING, "GPU", text, command)


def _without_driver(job: JobFacts) -> list[Finding]:
    for rank, facts in job.known.items():
        variable = facts.gpus.variable or ""
        if not facts.gpus.has_driver and _NAMES_GPUS.match(variable):
            text = f"Rank {rank} has CUDA_VISIBLE_DEVICES={variable}, but {facts.host} has no NVIDIA driver."
            return [Finding(WARNING, "GPU", text, f"nvidia-smi   # on {facts.host}")]
    return []


def _some_without(job: JobFacts) -> list[Finding]:
    with_gpus = [rank for rank, facts in job.known.items() if facts.gpus.visible]
    without = [rank for rank, facts in job.known.items() if not facts.gpus.visible]
    if not with_gpus or not without:
        return []
    who = f"{numbered_ranks(with_gpus).capitalize()} see{'s' * (len(with_gpus) == 1)} GPUs"
    others = f"{numbered_ranks(without)} (on {job.host(without[0])})"
    text = f"{who}, but {others} none. They cannot reduce arrays on GPUs together."
    most = max(len(facts.gpus.visible) for facts in job.known.values())
    unset = f"unset CUDA_VISIBLE_DEVICES; {commands.start(job, len(job.ranks))}"
    return [Finding(ERROR, "GPU", text, commands.with_all_gpus(job, most) or unset)]


def _shared(job: JobFacts) -> list[Finding]:
    owned = devices(job)
    for ranks in job.machines.values():
        users: dict[str, list[int]] = {}
        for rank in ranks:
            for device in owned[rank]:
                users.setdefault(device, []).append(rank)
        for device, several in users.items():
            if len(several) > 1:
                have = "have slices (MIG) of" if _SLICE.search(job.known[several[0]].gpus.names[0]) else "share"
                who = f"{numbered_ranks(several).capitalize()} on {job.host(several[0])}"
                effect = "NCCL refuses that, so their arrays are copied through host memory, which is slow."
                text = f"{who} {have} GPU {device}. {effect}"
                return [Finding(WARNING, "GPU", text, commands.start(job, _one_each(job)))]
    return []


def _several(job: JobFacts) -> list[Finding]:
    for rank, mine in devices(job).items():
        if len(mine) > 1 and len(job.machines) > 1:
            text = (
                f"Rank {rank} on {job.host(rank)} has {len(mine)} GPUs. Between nodes the first GPU carries the data "
                "of all of them, through one network card. With a rank for each GPU, each carries its own."
            )
            return [Finding(WARNING, "GPU", text, commands.start(job, _one_each(job)))]
    return []


def _one_each(job: JobFacts) -> int:
    """Return the number of ranks with which each rank has its own GPU."""
    return sum(
        len({device for rank in ranks for device in job.known[rank].gpus.visible}) for ranks in job.machines.values()
    )


def _far(job: JobFacts) -> list[Finding]:
    """Report a rank whose cores are all next to other GPUs than its own."""
    for rank, numbers in _numbers(job).items():
        facts = job.known[rank]
        for number in numbers:
            near = facts.gpus.cores[number]
            if near and not set(near) & set(facts.cores.allowed):
                text = (
                    f"Rank {rank} on {facts.host} runs on cores {ranks_text(facts.cores.allowed)}, but its "
                    f"{_label(facts.gpus, number)} is next to cores {ranks_text(near)}. Its copies to the GPU, and its "
                    "messages from there, cross between sockets."
                )
                return [Finding(WARNING, "GPU", text, commands.near_gpus(job))]
    return []


def _slow_net(job: JobFacts) -> list[Finding]:
    for facts in job.known.values() if len(job.machines) > 1 else ():
        net = facts.gpus.net
        if net.lacks:
            text = f"NCCL uses {net.name} between nodes, without an error: on {facts.host} {net.lacks}."
            return [Finding(WARNING, "NCCL", text, net.command)]
    return []


# Reach ----------------------------------------------------------------------------------------------------------


def check_reach(job: JobFacts) -> list[Finding]:
    """Check that every pair exchanged a message. Pairs of the same two hosts are one finding."""
    reach = job.reach
    if reach is None or not reach.failed:
        return []
    within, found = f"within {reach.seconds:g} s", []
    lonely = [rank for rank in reach.silent if rank not in reach.hosts]
    if lonely:
        who = f"{numbered_ranks(lonely)}{_on(job, lonely[0])}"
        text = f"No rank heard from {who} {within}. Rank 0 is on {job.first.host}."
        found.append(Finding(ERROR, "reach", text, _reaching(job, 0, lonely[0])))

    def hosts(pair: Pair) -> tuple[str, str]:
        return str(job.host(pair[0])), str(job.host(pair[1]))

    pairs = [pair for pair in reach.failed if not set(pair) & set(lonely)]
    for _, group in groupby(sorted(pairs, key=lambda pair: (hosts(pair), pair)), hosts):
        (one, other), *more = group
        also = f" and {len(more)} more pair{'s' * (len(more) > 1)} of these hosts" if more else ""
        who = f"Rank {one}{_on(job, one)} and rank {other}{_on(job, other)}{also}"
        found.append(Finding(ERROR, "reach", f"{who} exchanged no message {within}.", _reaching(job, one, other)))
    rest = len(found) - _MOST_HOST_PAIRS
    if rest > 0:
        command = "ssh HOST python -m mpidist doctor   # host by host; --json lists all pairs"
        found[_MOST_HOST_PAIRS:] = [
            Finding(ERROR, "reach", f"{rest} more pairs of hosts exchanged no message.", command)
        ]
    return found


def _on(job: JobFacts, rank: int) -> str:
    host = job.host(rank)
    return "" if host is None else f" on {host}"


def _reaching(job: JobFacts, one: int, other: int) -> str:
    """Return the command that examines, or chooses, the network between two ranks."""
    first, second = job.ranks[one], job.ranks[other]
    here, there = job.host(one), job.host(other)
    if here is None or there is None:
        return f"{commands.show_hosts(job)}   # shows the host of rank {other}; then ping it"

    def ping(target: str) -> str:
        return f"ping -c 3 {target}   # on {here}; if it answers, let firewalls pass all TCP ports between the hosts"

    if first is None or second is None:
        return ping(there)
    common = _common_network(first.interfaces, second.interfaces)
    if common is None:
        return f"{ping(there)}. They have no IP network in common."
    name, network, address = common
    if sum(bool(interface.network) for interface in (*first.interfaces, *second.interfaces)) == 2:
        return ping(address)
    choice = {
        "Open MPI": f"OMPI_MCA_btl_tcp_if_include={network} PRTE_MCA_prte_if_include={network}",
        "Intel MPI": f"FI_TCP_IFACE={name} I_MPI_HYDRA_IFACE={name}",
    }.get(first.mpi.vendor, f"UCX_NET_DEVICES={name} FI_TCP_IFACE={name} HYDRA_IFACE={name}")
    return f"export {choice}   # the network they share; to test it: {ping(address)}"


def _common_network(first: Sequence[Interface], second: Sequence[Interface]) -> tuple[str, str, str] | None:
    """Return the interface, the network and the second host's address of a shared network."""
    for here in first:
        for there in second:
            # With the same address on both, each host has a network of its own, such as docker0.
            if here.network and there.network and here.network != there.network:
                network = ipaddress.ip_interface(here.network).network
                if network == ipaddress.ip_interface(there.network).network:
                    return here.name, str(network), there.network.partition("/")[0]
    return None


# Network and links ----------------------------------------------------------------------------------------------


def _infiniband(job: JobFacts, host: str) -> list[str]:
    facts = next(facts for facts in job.known.values() if facts.host == host)
    return [interface.name for interface in facts.interfaces if interface.is_infiniband]


def check_network(job: JobFacts) -> list[Finding]:
    """Check that active InfiniBand is used."""
    mpi = job.first.mpi
    for host, names in job.in_use.items():
        fast = _infiniband(job, host)
        if fast and not set(fast) & set(names):
            text = (
                f"Messages between nodes use {names_text(names)} although InfiniBand ({names_text(fast)}) is active "
                f"on {host}. {mpi.name} does not use it."
            )
            command = {
                "Open MPI": f"export OMPI_MCA_pml=ucx UCX_NET_DEVICES={fast[0]}:1",
                "Intel MPI": "export I_MPI_FABRICS=shm:ofi FI_PROVIDER=mlx",
            }.get(mpi.vendor, f"export UCX_NET_DEVICES={fast[0]}:1")
            own = "" if mpi.vendor == "Intel MPI" else "   # or load the cluster's own MPI: module avail mpi"
            return [Finding(WARNING, "network", text, f"{command}{own}")]
    return []


def check_links(job: JobFacts) -> list[Finding]:
    """Compare the slowest link between nodes with the median. Every collective waits for it."""
    between = [link for link in job.links if link.between_nodes]
    if len(between) < _LEAST_LINKS:
        return []
    usual = median(link.bytes_per_second for link in between)
    slowest = min(between, key=lambda link: link.bytes_per_second)
    if slowest.bytes_per_second >= _MUCH_SLOWER * usual:
        return []
    one, other = slowest.hosts
    text = (
        f"The link between {one} and {other} carries {slowest.bytes_per_second / 1e6:.0f} MB/s, others "
        f"{usual / 1e6:.0f} MB/s. Every collective over all nodes waits for it."
    )
    here, there = _examination(job, one), _examination(job, other)
    command = f"{here}   # on {one} and on {other}" if here == there else f"{here}   # on {one}; on {other}: {there}"
    system = next((system for system in BATCH_SYSTEMS if system.name == job.first.batch_system), None)
    if system is not None and system.without:
        command += f"; or run without one of them: {system.without.format(host=other)}"
    return [Finding(WARNING, "links", text, command)]


def _examination(job: JobFacts, host: str) -> str:
    """Return the command that shows a host's interfaces, if known only those in use."""
    fast = _infiniband(job, host)
    used = job.in_use.get(host, ())
    shown = [f"ibstat {name}" if name in fast else f"ethtool {name}; ip -s link show {name}" for name in used]
    return "; ".join(shown) or "ip -s link"


CHECKS = (
    check_mpi,
    check_reach,
    check_settings,
    check_software,
    check_native_core,
    check_cores,
    check_shared_memory,
    check_gpus,
    check_network,
    check_links,
    check_table,
    check_burn,
)
