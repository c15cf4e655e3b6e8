"""The start of jax.distributed on the ranks of MPI, whichever launcher has started them."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from mpidist.collectives import Communicator
from mpidist.jax.dispatch import has_started
from mpidist.topology import world_topology
from mpidist.topology.topology import Topology

# JAX's own.
_SECONDS = 300


@dataclass
class _Started:
    """Whether this module has started jax.distributed."""

    here: bool = False


_started = _Started()


def initialize(*, timeout_seconds: int = _SECONDS, local_device_ids: Sequence[int] | None = None) -> None:
    """Start ``jax.distributed`` on all ranks, which MPI tells of each other (collective).

    Under mpirun, srun and every other launcher of MPI, and in one process. Call it on every rank, before JAX computes
    anything. Calling it again does nothing.

    Args:
        timeout_seconds: How long ranks may take to reach the first one's socket.
        local_device_ids: Which of the GPUs that this rank sees are its own. By default all where the launcher has given
            each rank of the node its own, or there is one rank on it; otherwise the one with the rank's number on
            its node.

    Raises:
        RuntimeError: On all ranks: JAX has started on one of them, or jax.distributed without mpidist.
        LaunchError: There is no MPI library, or the launcher started more ranks than MPI has.
    """
    world = world_topology()
    with Communicator() as comm:
        told = comm.all_gather_object((_problem(), os.environ.get("CUDA_VISIBLE_DEVICES")))
        hosts = set(world.host_of_rank)
        host = world.host_of_rank[0] if len(hosts) > 1 else "127.0.0.1"
        address = comm.broadcast_object(_free_address(host) if world.rank == 0 else None)
    for rank, (problem, _) in enumerate(told):
        if problem is not None:
            raise RuntimeError(f"mpidist.jax.initialize(): on rank {rank} {problem}")
    if _started.here:
        return
    if local_device_ids is None:
        local_device_ids = _share(world, [told[rank][1] for rank in _node_ranks(world)])
    jax.distributed.initialize(
        address,
        world.size,
        world.rank,
        local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=timeout_seconds,
        # Ranks of one machine need no socket that others reach.
        coordinator_bind_address=None if len(hosts) > 1 else address,
    )
    _started.here = True


def _problem() -> str | None:
    if _started.here:
        return None
    if jax.distributed.is_initialized():
        return "jax.distributed had been initialized without mpidist; leave one of the two calls out"
    if has_started():
        return "JAX had computed something, or looked for devices; call it before that, next to the imports"
    return None


def _free_address(host: str) -> str:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{host}:{probe.getsockname()[1]}"


def _node_ranks(world: Topology) -> list[int]:
    return [rank for rank, node in enumerate(world.node_of_rank) if node == world.node_index]


def _share(world: Topology, visible: Sequence[str | None]) -> Sequence[int] | None:
    """Return the GPUs of this rank by number, None for all that it sees."""
    return None if world.local_size == 1 or len(set(visible)) > 1 else [world.local_rank]
