"""The store of a job: torch's dictionary that all ranks share."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mpidist.topology import world_topology


def open_store(timeout: timedelta | None) -> Any:
    """Return a store that all ranks share (collective)."""
    world = world_topology()
    timeout = dist.default_pg_timeout if timeout is None else timeout
    first = world.rank == 0
    store = dist.TCPStore(socket.gethostname(), 0, world.size, True, timeout, wait_for_workers=False) if first else None
    address = world.world.bcast((store.host, store.port) if store is not None else None)
    if store is not None:
        return store
    return dist.TCPStore(*address, world.size, False, timeout, wait_for_workers=False)
