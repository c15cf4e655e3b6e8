"""What an algorithm for arrays on GPUs is given, and what it offers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from mpidist.arrays.convert import Array
from mpidist.collectives.gpu.device_call import DeviceReduction
from mpidist.collectives.gpu.device_streams import DeviceStreams
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.memory import Pool
from mpidist.collectives.node.node import Node
from mpidist.collectives.reduce.choice import Algorithm, Choice
from mpidist.collectives.reduce.registry import Row

if TYPE_CHECKING:
    from mpi4py import MPI


class DeviceSite(NamedTuple):
    """Where an algorithm for arrays on GPUs is to work.

    Attributes:
        comm: The communicator.
        node: Its node of this rank.
        between_nodes: The row of the table for what happens between nodes.
        streams: Of the communicator, on its device.
        on_host: The choice for arrays in host memory.
        pool: Host memory.
    """

    comm: MPI.Intracomm
    node: Node
    between_nodes: Row
    streams: DeviceStreams
    on_host: Choice[Algorithm]
    pool: Pool


class DeviceAlgorithm(Protocol):
    """What an algorithm for arrays on GPUs offers."""

    def all_reduce(self, job: DeviceReduction) -> Steps[list[Array]]:
        """Reduce over all ranks, which have met; returns the results once all work has been put on the streams."""

    def close(self) -> None:
        """Free what the algorithm holds (collective)."""
