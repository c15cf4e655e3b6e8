"""The roles in the job: the task of each rank, and its host."""

from mpidist.cluster_resolver.cluster_resolver import (
    ClusterResolver,
    GCEClusterResolver,
    KubernetesClusterResolver,
    SageMakerClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    TPUClusterResolver,
    UnionResolver,
)
from mpidist.cluster_resolver.cluster_spec import ClusterSpec
from mpidist.cluster_resolver.mpi_cluster_resolver import MPIClusterResolver
from mpidist.cluster_resolver.slurm_cluster_resolver import SlurmClusterResolver

UnionClusterResolver = UnionResolver
"""The name that TensorFlow's own code has for it."""

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "MPIClusterResolver",
    "SageMakerClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "UnionClusterResolver",
    "UnionResolver",
]
