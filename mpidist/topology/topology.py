"""The map of the job: ranks, nodes, their communicators, and GPUs."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, cast
from weakref import WeakValueDictionary

from mpidist.core import settings
from mpidist.topology.exit import revoking
from mpidist.topology.roll_call import absent_ranks, arrive, stop_answering
from mpidist.topology.same_program import check_same_everywhere
from mpidist.topology.start import check_world, duplicate, import_mpi, limited

if TYPE_CHECKING:
    from mpi4py import MPI

# First rank of a rank's node, and the name of its host, which has at most 64 bytes on Linux.
PLACE = struct.Struct("i64s")
_JOB_BYTES = 6


class Topology:
    """The ranks of ``comm`` and their nodes (collective over ``comm``).

    A node is a set of ranks that share memory (``MPI_Comm_split_type`` with ``MPI_COMM_TYPE_SHARED``), regardless of
    host names. ``MPIDIST_RANKS_PER_NODE=k`` divides each node into virtual nodes of at most k ranks, for tests. Nodes
    are numbered by their lowest rank.

    Args:
        comm: Private communicator of mpidist. It is not freed.
        ranks_per_node: Largest size of virtual nodes. The setting by default.
        like: Topology of a communicator with the same ranks, to be copied. Saves messages.

    Attributes:
        world: ``comm``.
        node: Communicator of the ranks of ``world`` on this node.
        rank, size: Rank and size of ``world``.
        local_rank, local_size: Rank and size of ``node``.
        node_of_rank: Node number of every rank of ``world``.
        ranks_of_node: Ranks of every node.
        host_of_rank: Host name of every rank of ``world``, for messages.
        node_index: Number of this rank's node.
        num_nodes: Number of nodes.
        job: Random text that is the same on all ranks, and differs from other jobs.
    """

    def __init__(self, comm: MPI.Intracomm, ranks_per_node: int | None = None, like: Topology | None = None) -> None:
        self.world = comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.ranks_per_node = ranks_per_node or settings.RANKS_PER_NODE.read()
        if like is not None and like.ranks_per_node == self.ranks_per_node:
            node = like.node.Dup()
            found = like.rank_map, like.job
        else:
            node = _node_of(comm, self.ranks_per_node)
            found = _gathered_map(comm, node)
        self.node: MPI.Intracomm = node
        self.rank_map: _Map = found[0]
        self.job: str = found[1]
        self.local_rank, self.local_size = self.node.Get_rank(), self.node.Get_size()
        self.node_of_rank = self.rank_map.node_of_rank
        self.ranks_of_node = self.rank_map.ranks_of_node
        self.host_of_rank = self.rank_map.host_of_rank
        self.node_index = self.node_of_rank[self.rank]
        self.num_nodes = len(self.ranks_of_node)

    def close(self) -> None:
        """Free the communicator of the node (collective)."""
        self.node.Free()


def _node_of(comm: MPI.Intracomm, ranks_per_node: int | None) -> MPI.Intracomm:
    machine = cast("MPI.Intracomm", comm.Split_type(import_mpi().COMM_TYPE_SHARED, key=comm.Get_rank()))
    if ranks_per_node is None:
        return machine
    node = cast("MPI.Intracomm", machine.Split(machine.Get_rank() // ranks_per_node, key=comm.Get_rank()))
    machine.Free()
    return node


def _gathered_map(comm: MPI.Intracomm, node: MPI.Intracomm) -> tuple[_Map, str]:
    """Return the map of all ranks, and rank 0's random text (collective). One call, so all notice a lost rank."""
    mine = PLACE.pack(_first_rank(node, comm), os.uname().nodename.encode()) + os.urandom(_JOB_BYTES)
    everyone = bytearray(comm.Get_size() * len(mine))
    comm.Allgather([mine, import_mpi().BYTE], [everyone, import_mpi().BYTE])
    places = b"".join(everyone[start : start + PLACE.size] for start in range(0, len(everyone), len(mine)))
    return map_of_ranks(places), everyone[PLACE.size : len(mine)].hex()


@dataclass(frozen=True)
class _Map:
    """The attributes of ``Topology`` that grow with the ranks. Communicators of the same ranks share one map."""

    node_of_rank: tuple[int, ...]
    ranks_of_node: tuple[Sequence[int], ...]
    host_of_rank: tuple[str, ...]


_maps: WeakValueDictionary[bytes, _Map] = WeakValueDictionary()


def map_of_ranks(places: bytes) -> _Map:
    """Return the map of ranks, given the packed place of each."""
    key = sha256(places).digest()
    found = _maps.get(key)
    if found is None:
        found = _maps[key] = _new_map(places)
    return found


def _new_map(places: bytes) -> _Map:
    firsts, names = zip(*PLACE.iter_unpack(places), strict=True)
    nodes = {first: index for index, first in enumerate(sorted(set(firsts)))}
    ranks_of_node: list[list[int]] = [[] for _ in nodes]
    for rank, first in enumerate(firsts):
        ranks_of_node[nodes[first]].append(rank)
    # One string per host, because there are many more ranks.
    hosts = {name: name.rstrip(b"\0").decode(errors="replace") for name in set(names)}
    return _Map(
        tuple([nodes[first] for first in firsts]),
        tuple(map(_compact, ranks_of_node)),
        tuple([hosts[name] for name in names]),
    )


def _compact(ranks: list[int]) -> Sequence[int]:
    """Return the ranks, as a range if they are evenly spaced.

    >>> _compact([4, 5, 6]), _compact([1, 3]), _compact([1, 2, 4])
    (range(4, 7), range(1, 5, 2), [1, 2, 4])
    """
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    spaced = range(ranks[0], ranks[-1] + step, step)
    return spaced if len(spaced) == len(ranks) and [*spaced] == ranks else ranks


def _first_rank(node: MPI.Intracomm, world: MPI.Intracomm) -> int:
    """Return the rank in ``world`` of the first rank of ``node``. Local."""
    group, everyone = node.Get_group(), world.Get_group()
    (first,) = group.Translate_ranks([0], everyone)
    group.Free()
    everyone.Free()
    return int(first)


# The world ------------------------------------------------------------------------------------------------------

_world: list[Topology] = []


def has_world() -> bool:
    """Return whether the topology of all ranks exists."""
    return bool(_world)


def same_as_world(comm: MPI.Intracomm) -> Topology | None:
    """Return the topology of all ranks if ``comm`` has the same ranks. Local."""
    mpi = import_mpi()
    is_same = _world and mpi.Comm.Compare(comm, _world[0].world) in (mpi.IDENT, mpi.CONGRUENT)
    return _world[0] if is_same else None


def replace_world(comm: MPI.Intracomm) -> None:
    """Replace the world by ``comm``, a communicator of the surviving ranks (collective)."""
    _world[:] = [Topology(comm)]


def world_topology() -> Topology:
    """Return the topology of all surviving ranks. The first call creates it (collective), and starts MPI.

    Raises:
        LaunchError: The MPI library is missing, the launcher started more ranks than this world has, or ranks have
            different builds of mpidist or different settings.
    """
    if not _world:
        mpi = import_mpi()
        check_world(mpi.COMM_WORLD.Get_size())
        arrive()
        comm = duplicate(mpi.COMM_WORLD, "making the first strategy or communicator", absent_ranks)
        check_same_everywhere(comm)
        with revoking(comm), limited("finding out which ranks share a node"):
            _world.append(Topology(comm))
        stop_answering()
    return _world[0]


def rank() -> int:
    """Return this process's rank among the surviving ranks, from 0.

    Local, and the same in every collective and strategy of all ranks. The first use of MPI starts it.

    Raises:
        LaunchError: The MPI library is missing, or the launcher started more ranks than this world has.

    >>> rank() in range(size())
    True
    """
    return _all_ranks().Get_rank()


def size() -> int:
    """Return the number of surviving ranks. Local, as :func:`rank` is.

    Raises:
        LaunchError: The MPI library is missing, or the launcher started more ranks than this world has.
    """
    return _all_ranks().Get_size()


def _all_ranks() -> MPI.Intracomm:
    if _world:
        return _world[0].world
    world: MPI.Intracomm = import_mpi().COMM_WORLD
    check_world(world.Get_size())
    return world


# GPUs -----------------------------------------------------------------------------------------------------------


def visible_devices() -> tuple[str, ...]:
    """Return the PCI bus ids of the visible GPUs, in CuPy's order. Empty without CuPy or driver. Local."""
    # Here, because `import mpidist` loads no NumPy.
    from mpidist.arrays.streams import find_cupy, gpus_may_be_present

    cupy = find_cupy().module if gpus_may_be_present() else None
    if cupy is None:
        return ()
    runtime = cupy.cuda.runtime
    names = map(runtime.deviceGetPCIBusId, range(runtime.getDeviceCount()))
    return tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names)


def devices_of_each(devices_seen: Sequence[Sequence[str]]) -> list[tuple[int, ...]]:
    """Return the devices of each process of one node, by the process's own numbers.

    Processes that see the same devices share them by local rank, and the first processes get the rest. If there are
    more processes than devices, each gets one, in turn. Processes that see different devices, assigned by the
    launcher, use all they see.

    >>> devices_of_each([["a", "b", "c"], ["a", "b", "c"]])
    [(0, 1), (2,)]
    """
    groups = [frozenset(seen) for seen in devices_seen]
    devices = []
    for rank, (seen, group) in enumerate(zip(devices_seen, groups, strict=True)):
        # Processes may see the same devices in different orders. The order of the first one counts.
        shared = devices_seen[groups.index(group)]
        processes, place = groups.count(group), groups[:rank].count(group)
        if processes >= len(shared):
            mine = shared[place % len(shared) : place % len(shared) + 1] if shared else ()
        else:
            each, rest = divmod(len(shared), processes)
            start = place * each + min(place, rest)
            mine = shared[start : start + each + (place < rest)]
        devices.append(tuple(list(seen).index(device) for device in mine))
    return devices
