"""The default resolver: that of the MPI job, unless TF_CONFIG contradicts it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpidist.cluster_resolver.mpi_cluster_resolver import MPIClusterResolver
from mpidist.cluster_resolver.tf_config_cluster_resolver import TFConfigClusterResolver
from mpidist.core.errors import LaunchError
from mpidist.topology import world_topology

if TYPE_CHECKING:
    from mpi4py import MPI

# The jobs whose tasks train, in the order of their ranks.
TRAINING_JOBS = ("chief", "worker")


def resolver_of_job(communicator: MPI.Intracomm | None = None) -> MPIClusterResolver:
    """Return the resolver of the ranks of this job.

    Where TF_CONFIG is set it starts MPI (collective).

    Args:
        communicator: The ranks that take part, where the caller named them; TF_CONFIG is then not asked.

    Raises:
        LaunchError: TF_CONFIG tells of a cluster of another size, or of another task, than MPI: as where processes that
            were started one by one, for TensorFlow, would each train by itself.
        ValueError: TF_CONFIG is not of its form.
    """
    resolver = MPIClusterResolver(communicator)
    if communicator is not None:
        return resolver
    config = TFConfigClusterResolver()
    cluster = {job: len(addresses) for job, addresses in config.cluster_spec().as_dict().items()}
    if not cluster:
        return resolver
    world = world_topology()
    count, task = sum(cluster.values()), (config.task_type, config.task_id)
    theirs = (resolver.task_type, resolver.task_id)
    in_order = [(job, index) for job in TRAINING_JOBS for index in range(cluster.get(job, 0))]
    is_in_order = resolver.is_made_of(("worker",)) and in_order[world.rank : world.rank + 1] == [task]
    is_same = config.task_type is None or task == theirs or is_in_order
    if count == world.size and is_same:
        return resolver
    shown = ", ".join(f"{job}:{number}" for job, number in cluster.items())
    mine = "it does not say which is this process" if task[0] is None else f"this process is {task[0]}:{task[1]}"
    raise LaunchError(
        f"TF_CONFIG tells of a cluster of {count} ({shown}), and {mine}; MPI tells of a world of {world.size}, and "
        f"this is rank {world.rank}, {theirs[0]}:{theirs[1]}. Ranks find one another by MPI, not by TF_CONFIG; "
        f"type `unset TF_CONFIG; mpirun -n {count} python ...`, or, with a TF_CONFIG for each rank, give the strategy "
        "cluster_resolver=mpidist.cluster_resolver.TFConfigClusterResolver()"
    )
