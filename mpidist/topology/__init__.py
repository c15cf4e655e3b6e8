"""The start of MPI, the map of the job, and its end."""

from mpidist.topology.exit import end_job, install_excepthook
from mpidist.topology.start import allowed_cores, cores_are_short, import_mpi, prepare_environment, trains_alone
from mpidist.topology.topology import Topology, rank, size, world_topology

__all__ = [
    "Topology",
    "allowed_cores",
    "cores_are_short",
    "end_job",
    "import_mpi",
    "install_excepthook",
    "prepare_environment",
    "rank",
    "size",
    "trains_alone",
    "world_topology",
]
