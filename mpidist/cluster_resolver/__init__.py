"""Who is who in the job: which rank has which task, and where it runs."""

from mpidist.cluster_resolver.cluster_resolver import ClusterResolver
from mpidist.cluster_resolver.cluster_spec import ClusterSpec
from mpidist.cluster_resolver.mpi_cluster_resolver import MPIClusterResolver

__all__ = ["ClusterResolver", "ClusterSpec", "MPIClusterResolver"]
