"""The start of jax.distributed on the ranks of MPI, and JAX's order on CPUs.

By default, another thread of JAX runs computations later. Collectives inside them would run between any two collectives
of the program, in another order on each rank. So JAX is configured to run computations at once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import jax

from mpidist.collectives import Communicator
from mpidist.topology import world_topology
from mpidist.topology.topology import Topology

# JAX's default.
_SECONDS = 300
_ASYNC = "jax_cpu_enable_async_dispatch"


class _Status:
    """What this module has done: started jax.distributed, and configured JAX to compute in order."""

    is_distributed = is_in_order = False


def initialize(*, timeout_seconds: int = _SECONDS, local_device_ids: Sequence[int] | None = None) -> None:
    """Start ``jax.distributed`` on all ranks, with addresses from MPI (collective).

    Works with mpirun, srun and every other launcher of MPI, and in one process. Call it on every rank, before JAX
    computes anything. Calling it again does nothing.

    Args:
        timeout_seconds: How long ranks may take to reach the first one's socket.
        local_device_ids: Numbers of this rank's GPUs among those that it sees. By default all if the launcher has
            assigned each rank of the node its own, or if there is one rank on it; otherwise the one with the rank's
            number on its node.

    Raises:
        RuntimeError: On all ranks: JAX has started on one of them, or jax.distributed without mpidist.
        LaunchError: There is no MPI library, or the launcher started more ranks than MPI has.
    """
    world = world_topology()
    with Communicator() as comm:
        found = comm.all_gather_object((_problem(), os.environ.get("CUDA_VISIBLE_DEVICES")))
        hosts = set(world.host_of_rank)
        host = world.host_of_rank[0] if len(hosts) > 1 else "127.0.0.1"
        address = comm.broadcast_object(_free_address(host) if world.rank == 0 else None)
    for rank, (problem, _) in enumerate(found):
        if problem is not None:
            raise RuntimeError(f"mpidist.jax.initialize(): on rank {rank} {problem}")
    if _Status.is_distributed:
        return
    if local_device_ids is None:
        local_device_ids = _share(world, [visible for _, visible in found])
    jax.distributed.initialize(
        address,
        world.size,
        world.rank,
        local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=timeout_seconds,
        # Ranks of one machine need no socket that other machines reach.
        coordinator_bind_address=None if len(hosts) > 1 else address,
    )
    _Status.is_distributed = True


def _problem() -> str | None:
    if _Status.is_distributed:
        return None
    if jax.distributed.is_initialized():
        return "jax.distributed had been initialized without mpidist; leave one of the two calls out"
    if _has_started():
        return "JAX had computed something, or looked for devices; call it before that, next to the imports"
    return None


def _free_address(host: str) -> str:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{host}:{probe.getsockname()[1]}"


def _share(world: Topology, visible: Sequence[str | None]) -> Sequence[int] | None:
    """Return the numbers of this rank's GPUs, None for all that it sees."""
    on_node = {visible[rank] for rank, node in enumerate(world.node_of_rank) if node == world.node_index}
    return None if world.local_size == 1 or len(on_node) > 1 else [world.local_rank]


def _has_started() -> bool:
    """Return whether JAX has looked for its devices, after which some settings are fixed."""
    # JAX has no public function for it, but a setting that can be changed only before.
    before = jax.config.jax_num_cpu_devices
    try:
        jax.config.update("jax_num_cpu_devices", before + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", before)
    return False


def dispatch_in_order() -> None:
    """Configure JAX to run computations on CPUs at once, unless it has started."""
    if jax.config.read(_ASYNC) and not _has_started():
        jax.config.update(_ASYNC, False)
    _Status.is_in_order = not jax.config.read(_ASYNC)


def check_order() -> None:
    """Raise RuntimeError if a collective in a jitted function would run out of order."""
    if jax.default_backend() != "cpu":
        raise RuntimeError(
            f"mpidist.jax.all_reduce in a jitted function, on {jax.default_backend()}: JAX carries it out at any time "
            "there; call it between two jitted functions"
        )
    if not _Status.is_in_order:
        raise RuntimeError(
            "mpidist.jax.all_reduce in a jitted function: JAX had started before mpidist.jax was imported, and carries "
            "functions out at any time; import mpidist.jax before anything is computed, or set "
            "JAX_CPU_ENABLE_ASYNC_DISPATCH=0"
        )
