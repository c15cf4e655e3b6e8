"""The ranks of a strategy that is for one node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpidist.topology import world_topology

if TYPE_CHECKING:
    from mpi4py import MPI


def ranks_of_node(strategy: str, instead: str) -> MPI.Intracomm:
    """Return the ranks of the node, which are all of the job.

    Args:
        strategy: Name of the strategy, for the message.
        instead: What to use on several nodes.

    Raises:
        ValueError: The job has several nodes.
    """
    topology = world_topology()
    if topology.num_nodes > 1:
        raise ValueError(
            f"{strategy} is for one node, and this job has {topology.size} ranks on {topology.num_nodes} nodes; "
            f"use {instead}"
        )
    return topology.node
