"""Where this rank stands: launcher, world, nodes, and what happens to the job when a rank fails."""

from mpidist.topology.abort import install_excepthook
from mpidist.topology.launcher import import_mpi, prepare_environment
from mpidist.topology.topology import Topology, world_topology

__all__ = ["Topology", "import_mpi", "install_excepthook", "prepare_environment", "world_topology"]
