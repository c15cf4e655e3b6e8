"""The resolver that is meant where none is given: that of the MPI job, unless TF_CONFIG tells of another cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpidist.cluster_resolver.mpi_cluster_resolver import MPIClusterResolver
from mpidist.cluster_resolver.tf_config_cluster_resolver import TFConfigClusterResolver
from mpidist.core.errors import LaunchError
from mpidist.topology import world_topology

if TYPE_CHECKING:
    from mpi4py import MPI

# In this order a TF_CONFIG numbers the tasks that train.
_TRAINING_JOBS = ("chief", "worker")


def resolver_of_job(communicator: MPI.Intracomm | None = None) -> MPIClusterResolver:
    """Return the resolver of the ranks of this job; where TF_CONFIG is set it starts MPI (collective).

    Args:
        communicator: The ranks that take part, where the caller named them; TF_CONFIG is then not asked.

    Raises:
        LaunchError: TF_CONFIG tells of a cluster of another size, or of another task, than MPI: as where processes that
            were started one by one, for TensorFlow, would each train by itself.
        ValueError: TF_CONFIG is not of its form.
    """
    resolver = MPIClusterResolver(communicator)
    config = TFConfigClusterResolver()
    cluster = {job: len(addresses) for job, addresses in config.cluster_spec().as_dict().items()}
    if communicator is not None or not cluster:
        return resolver
    world = world_topology()
    count, task = sum(cluster.values()), (config.task_type, config.task_id)
    theirs = (resolver.task_type, resolver.task_id)
    in_order = [(job, index) for job in _TRAINING_JOBS for index in range(cluster.get(job, 0))]
    is_same = task == theirs or (resolver.is_made_of(("worker",)) and in_order[world.rank : world.rank + 1] == [task])
    if count == world.size and is_same:
        return resolver
    shown = ", ".join(f"{job}:{number}" for job, number in cluster.items())
    ranks = "1 rank" if world.size == 1 else f"{world.size} ranks"
    raise LaunchError(
        f"TF_CONFIG tells of {count} tasks ({shown}), of which this process is {task[0]}:{task[1]}, and MPI of "
        f"{ranks}, of which this is {world.rank}, {theirs[0]}:{theirs[1]}. Ranks find one another by MPI, and "
        f"TF_CONFIG is not read; type `unset TF_CONFIG; mpirun -n {count} python ...`, or, with a TF_CONFIG for each "
        "rank, give the strategy cluster_resolver=mpidist.cluster_resolver.TFConfigClusterResolver()"
    )
