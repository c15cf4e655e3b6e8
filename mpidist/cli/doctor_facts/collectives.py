"""The collectives' facts on the ranks of this job: nodes, table, GPUs and MPI."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpidist.cli.doctor_facts.facts import CollectiveFacts
from mpidist.collectives.gpu.network_probes import rdma_everywhere, takes_device_memory
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.node import Node
from mpidist.collectives.reduce.choice import place_of
from mpidist.collectives.reduce.table import SHIPPED, Table, resolved, table_text
from mpidist.collectives.reduce.tuning_file import Setup, read, setup_of
from mpidist.core.settings import TUNING_FILE

if TYPE_CHECKING:
    from mpi4py import MPI


def collective_facts(comm: MPI.Intracomm, has_gpus: bool) -> CollectiveFacts:
    """Return the facts of collectives over ``comm`` (collective). Those of the tuning file are right on rank 0 only.

    Args:
        comm: All ranks.
        has_gpus: Whether any rank has GPUs; the same on every rank.
    """
    # Node does not keep the communicator: it splits it once.
    node = Node(comm)
    try:
        place = place_of(node)
        table, origin, error = _table(setup_of(node))
        takes = _run_to_the_end(takes_device_memory(comm)) if has_gpus else None
        if has_gpus:
            row = resolved(table.several_nodes_gpu, _run_to_the_end(rdma_everywhere(comm)))
            table = table._replace(several_nodes_gpu=row)
        return CollectiveFacts(
            node_of_rank=node.topology.node_of_rank,
            reads_neighbours=node.reads_neighbours,
            place=place,
            table=table_text(table, place),
            table_origin=origin,
            table_error=error,
            gpu_table=table_text(table, place_of(node, "gpu")) if has_gpus else "",
            mpi_takes_gpu_memory=takes,
        )
    finally:
        node.close()


def _table(setup: Setup) -> tuple[Table, str, str]:
    """Return the table in force, its origin, and the file's error."""
    path = TUNING_FILE.read()
    if path is None:
        return SHIPPED, "the shipped table", ""
    try:
        tables = read(path)
    except ValueError as error:
        return SHIPPED, f"{path} cannot be used", str(error)
    if setup in tables:
        return tables[setup], f"from {path}", ""
    return SHIPPED, "the shipped table", f"{path} has no table for {', '.join(setup)}"


def _run_to_the_end(steps: Steps[bool]) -> bool:
    """Return the result that the ranks have agreed on."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return bool(stop.value)
