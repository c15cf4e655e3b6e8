"""The rendezvous of ranks by MPI, without MASTER_ADDR."""

from __future__ import annotations

import multiprocessing.process
import socket
from collections.abc import Iterator
from datetime import timedelta
from urllib.parse import parse_qs, urlparse

from mpidist.core.errors import LaunchError
from mpidist.topology import trains_alone, world_topology
from mpidist.torch.foreign import Foreign
from mpidist.torch.groups import check_place
from mpidist.torch.mpi_store import open_store
from mpidist.torch.variables import set_missing

# The key of an address at which programs may open a store of their own.
_ADDRESS = "mpidist/address"


def meet(url: str, timeout: timedelta | None = None, **_: object) -> Iterator[tuple[Foreign, int, int]]:
    """Yield a store, rank and number of ranks (collective); the handler of ``env://`` for torch.

    Args:
        url: URL with the rank and the number of ranks, if the program passed them.
        timeout: Timeout of the store.

    Raises:
        LaunchError: The program passed another rank or number of ranks than MPI has.
    """
    world = world_topology()
    query = parse_qs(urlparse(url).query)
    rank, size = [int(query.get(name, ["-1"])[0]) for name in ("rank", "world_size")]
    check_place(rank, size)
    if (world.size, size) == (1, -1) and multiprocessing.process.parent_process() is not None:
        error = trains_alone("no rank and world_size", "N")
        raise LaunchError(f"{error} If one process alone is intended, pass rank=0 and world_size=1.")
    set_missing(RANK=world.rank, WORLD_SIZE=world.size, LOCAL_RANK=world.local_rank, LOCAL_WORLD_SIZE=world.local_size)
    store = open_store(timeout)
    if world.rank == 0:
        store.set(_ADDRESS, f"{'localhost' if world.num_nodes == 1 else socket.gethostname()} {_free_port()}")
    address, port = store.get(_ADDRESS).decode().split()
    set_missing(MASTER_ADDR=address, MASTER_PORT=port)
    yield store, world.rank, world.size
    raise RuntimeError("torch asks to meet once more; ranks of MPI meet once")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port
