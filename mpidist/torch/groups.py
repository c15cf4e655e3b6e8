"""The communicators of process groups."""

from __future__ import annotations

import json

import torch.distributed

from mpidist.collectives import Advice, Communicator
from mpidist.core.errors import LaunchError
from mpidist.core.options import CommunicationOptions
from mpidist.topology import import_mpi, trains_alone, world_topology
from mpidist.topology.start import check_world, create_group
from mpidist.torch.foreign import Foreign

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


def new_communicator(given: Foreign, options: CommunicationOptions) -> Communicator:
    """Return the communicator of a new group (collective over the group).

    Args:
        given: torch's _DistributedBackendOptions of the group.
        options: Options of the group's collectives.

    Raises:
        LaunchError: torch and MPI disagree about the ranks, or the members' installations or settings differ.
        DistStoreError: A member did not arrive within the group's timeout.
    """
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


def _mpi_ranks(given: Foreign) -> list[int]:
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
    place = f"rank {torch.distributed.get_rank()} of {torch.distributed.get_world_size()} of torch.distributed"
    if set(sizes) == {1}:
        raise trains_alone(place, torch.distributed.get_world_size())
    raise LaunchError(
        f"{place} is rank {world.Get_rank()} of {world.Get_size()} of MPI, but the ranks of this group belong to "
        f"several MPI jobs: they are the ranks {list(ranks)} of worlds of {list(sizes)}. Start all ranks with one "
        "mpirun or srun."
    )


def _key(rank: int) -> str:
    return f"MPI rank of group rank {rank}"


def _default_is_mpidist() -> bool:
    backends = torch.distributed.get_backend_config().replace(",", ":").split(":")
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
