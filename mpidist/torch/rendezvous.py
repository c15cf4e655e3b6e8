"""The way in which ranks that a launcher has started meet by MPI, without MASTER_ADDR."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from urllib.parse import parse_qs, urlparse

from mpidist.core.errors import LaunchError
from mpidist.topology import world_topology
from mpidist.torch.foreign import Foreign
from mpidist.torch.mpi_store import open_store
from mpidist.torch.variables import set_missing


def meet(url: str, timeout: timedelta | None = None, **_: object) -> Iterator[tuple[Foreign, int, int]]:
    """Yield a store, rank and number of ranks (collective); the handler of ``env://`` for torch.

    Args:
        url: With the rank and the number of ranks if the program has named them.
        timeout: Of the store.

    Raises:
        LaunchError: The program names another rank or number than MPI has.
    """
    world = world_topology()
    query = parse_qs(urlparse(url).query)
    for name, number in (("rank", world.rank), ("world_size", world.size)):
        if name in query and int(query[name][0]) not in (-1, number):
            raise LaunchError(f"{name} is {query[name][0]}; MPI has {number}. Leave it out: the launcher has set it")
    set_missing(world.rank, world.size, world.local_rank, world.local_size)
    yield open_store(timeout), world.rank, world.size
    raise RuntimeError("torch asks to meet once more; ranks of MPI meet once")
