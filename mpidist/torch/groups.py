"""Process groups: the functions by which torch creates them, and their communicators."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from mpidist.collectives import Advice, Communicator
from mpidist.core.errors import LaunchError
from mpidist.core.options import CommunicationOptions
from mpidist.topology import import_mpi, trains_alone, world_topology
from mpidist.topology.start import check_world, create_group
from mpidist.torch.backend import HAS_BACKENDS, MpidistBackend, MpidistProcessGroup

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import _DistributedBackendOptions as GroupOptions

_ADVICE = Advice(
    "Make this call on every rank. Put only the printing under `if dist.get_rank() == 0:`. If ranks have different "
    "numbers of batches, use DistributedSampler, drop_last=True, or `with Join([model]):` of "
    "torch.distributed.algorithms.join.",
    "timeout=datetime.timedelta(...) in init_process_group or new_group, or MPIDIST_TIMEOUT=SECONDS",
)
_NAMES = {"mpidist", "mpi"}
# Key of the list of all members' ranks in the store of a group.
_LIST = "MPI ranks"
# The options of the newest default group, which are the defaults of other groups.
_default_options = [CommunicationOptions()]


def create(name: str, given: GroupOptions, pg_options: object) -> MpidistBackend | MpidistProcessGroup:
    """Create the backend or process group ``name`` (collective over its ranks)."""
    options = _options(given.timeout, pg_options)
    comm = _new_communicator(given, options)
    # Calls without options are the fastest. The communicator of the default group has them already.
    own = options if given.global_ranks_in_group and options != CommunicationOptions() else None
    return MpidistBackend(comm, name, own) if HAS_BACKENDS else MpidistProcessGroup(comm, name, given.store, own)


def _options(timeout: timedelta, given: object) -> CommunicationOptions:
    # torch passes the same options to all backends of a group.
    if given is None or (HAS_BACKENDS and isinstance(given, MpidistBackend.Options)):
        given = CommunicationOptions()
    if not isinstance(given, CommunicationOptions):
        raise TypeError(f"pg_options is {given!r}; expected None or mpidist.experimental.CommunicationOptions(...)")
    if given.timeout_seconds is not None or timeout == dist.default_pg_timeout:
        # If the program passes no timeout, MPIDIST_TIMEOUT applies.
        return given
    return given.merge(CommunicationOptions(timeout_seconds=timeout.total_seconds()))


def _new_communicator(given: GroupOptions, options: CommunicationOptions) -> Communicator:
    """Create the communicator of a new group (collective over the group)."""
    if not given.global_ranks_in_group:
        check_place(given.group_rank, given.group_size)
        comm = Communicator(options=options, advice=_ADVICE)
        _default_options[:] = [options]
        return comm
    members = _mpi_ranks(given)
    part = create_group(import_mpi().COMM_WORLD, members, f"the group of torch's ranks {given.global_ranks_in_group}")
    comm = Communicator(part, options=_default_options[0] if _default_is_mpidist() else None, advice=_ADVICE)
    part.Free()
    # All members have read these keys, because creating the communicator is collective. A program may make many groups.
    given.store.delete_key(_key(given.group_rank))
    if given.group_rank == 0:
        given.store.delete_key(_LIST)
    return comm


def _mpi_ranks(given: GroupOptions) -> list[int]:
    """Return the rank in MPI.COMM_WORLD of each member of a group (collective over the group).

    The default group may be another backend's, and its ranks in any order. Each member writes its own rank to the
    group's store. Only the first member reads them all, because with n members n * n reads would take too long.
    """
    store, timeout, size = given.store, given.timeout, given.group_size
    world = import_mpi().COMM_WORLD
    check_world(world.Get_size())
    store.set(_key(given.group_rank), json.dumps([world.Get_rank(), world.Get_size()]))
    if given.group_rank == 0:
        keys = [_key(rank) for rank in range(size)]
        store.wait(keys, timeout)
        store.set(_LIST, json.dumps([json.loads(store.get(key)) for key in keys]))
    store.wait([_LIST], timeout)
    ranks, sizes = zip(*json.loads(store.get(_LIST)), strict=True)
    if len(set(ranks)) == size and len(set(sizes)) == 1:
        return list(ranks)
    place = f"rank {dist.get_rank()} of {dist.get_world_size()} of torch.distributed"
    if set(sizes) == {1}:
        raise trains_alone(place, dist.get_world_size())
    raise LaunchError(
        f"{place} is rank {world.Get_rank()} of {world.Get_size()} of MPI, but the ranks of this group belong to "
        f"several MPI jobs: they are the ranks {list(ranks)} of worlds of {list(sizes)}. Start all ranks with one "
        "mpirun or srun."
    )


def _key(rank: int) -> str:
    return f"MPI rank of group rank {rank}"


def _default_is_mpidist() -> bool:
    backends = dist.get_backend_config().replace(",", ":").split(":")
    return not _NAMES.isdisjoint(backends)


def check_place(rank: int, size: int) -> None:
    """Raise LaunchError if the program passed another place than MPI has; -1 is none."""
    world = world_topology()
    if rank in (-1, world.rank) and size in (-1, world.size):
        return
    place = " and ".join(f"{name}={value}" for name, value in (("rank", rank), ("world_size", size)) if value != -1)
    if world.size == 1:
        raise trains_alone(place, "N" if size == -1 else size)
    raise LaunchError(
        f"init_process_group() was called with {place}, but MPI has rank {world.rank} of {world.size}. Leave out rank, "
        "world_size and init_method, because the launcher sets them."
    )
