"""The communicators of process groups."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

from mpidist.collectives import Advice, Communicator
from mpidist.core.errors import LaunchError
from mpidist.core.options import CommunicationOptions
from mpidist.topology import trains_alone, world_topology

_ADVICE = Advice(
    "Make this call on every rank. Put only the printing under `if dist.get_rank() == 0:`. If ranks have different "
    "numbers of batches, use DistributedSampler, drop_last=True, or `with Join([model]):` of "
    "torch.distributed.algorithms.join.",
    "timeout=datetime.timedelta(...) in init_process_group or new_group, or MPIDIST_TIMEOUT=SECONDS",
)
# That of the default group, which others are made from.
_default: list[ref[Communicator]] = []


def communicator_for(ranks: Sequence[int], rank: int, size: int, options: CommunicationOptions) -> Communicator:
    """Return the communicator of a new group (collective over its ranks alone).

    That of some ranks alone has the options of the default group.

    Args:
        ranks: Its ranks among all; none for all of them.
        rank: Of this process in the group, as torch has it.
        size: Of the group, as torch has it.
        options: Of its collectives.

    Raises:
        LaunchError: torch and MPI do not agree on the ranks.
    """
    world = world_topology()
    if not ranks:
        check_place(rank, size)
    if not ranks or len(ranks) == world.size:
        comm = Communicator(options=options, advice=_ADVICE)
        if not ranks:
            _default[:] = [ref(comm)]
        return comm
    base = _default_comm()
    if base is None:
        raise LaunchError("a group of some ranks is made of a default group that is mpidist's; this one is not")
    return base.group(list(ranks))


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


def replace_default(old: Communicator, new: Communicator) -> None:
    """Have further groups made from ``new`` where they were made from ``old``."""
    if _default_comm() is old:
        _default[:] = [ref(new)]


def _default_comm() -> Communicator | None:
    return _default[0]() if _default else None
