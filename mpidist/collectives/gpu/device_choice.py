"""DeviceChoice: which algorithm a reduction of arrays on a GPU takes, and those that have been made for it."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from mpidist.collectives.gpu import algorithms  # noqa: F401  # which register themselves
from mpidist.collectives.gpu.algorithms.nccl_all_reduce import Nccl
from mpidist.collectives.gpu.device_site import DeviceAlgorithm, DeviceSite
from mpidist.collectives.gpu.device_streams import DeviceStreams
from mpidist.collectives.gpu.nccl_comm import NcclComm
from mpidist.collectives.gpu.nccl_network import rdma_everywhere, rdma_fabric
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.memory import Pool
from mpidist.collectives.reduce.choice import Algorithm, Choice, place_of
from mpidist.collectives.reduce.device_packs import SLICE_ALIGNMENT, DevicePack
from mpidist.collectives.reduce.registry import Row, gpu_algorithms
from mpidist.collectives.reduce.table import BY_NETWORK, Table, look_up, resolved, row_text
from mpidist.core.options import CommunicationOptions

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpidist.collectives.node.node import Node

_log = logging.getLogger("mpidist")


def may_move_by_nccl(table: Table, place: str) -> bool:
    """Whether several ranks move arrays by NCCL, if it works and has a network; the same on every rank."""
    row: Row = getattr(table, place)
    return look_up(row, sys.maxsize) in ("nccl", BY_NETWORK)


class DeviceChoice(Choice[DeviceAlgorithm]):
    """The algorithms of one communicator for arrays on one device.

    Args:
        comm: The communicator.
        node: Its node of this rank.
        table: Which algorithm is taken where.
        streams: Where they work.
        on_host: The choice for arrays in host memory.
        pool: Host memory.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        node: Node,
        table: Table,
        streams: DeviceStreams,
        on_host: Choice[Algorithm],
        pool: Pool,
    ) -> None:
        site, place = DeviceSite(comm, node, table.between_nodes, streams, on_host, pool), place_of(node, "gpu")
        super().__init__(gpu_algorithms, site, place, getattr(table, place))
        self.streams = streams

    @property
    def multiple(self) -> int:
        """Of which the bytes of flat arrays have to be a multiple: slices between nodes are of one length.

        And each begins where NCCL reads many elements at a time.
        """
        rails = 1 if self.site.node.is_alone else min(len(ranks) for ranks in self.site.node.ranks)
        return 1 if rails == 1 else rails * SLICE_ALIGNMENT

    def names_for_pack(self, pack: DevicePack, options: CommunicationOptions) -> tuple[str, ...]:
        """Return the algorithm for a pack, and what may take its place, in order; the same on every rank."""
        if self.site.comm.Get_size() == 1:
            return ("alone",)
        return self.names_for(pack.nbytes, options, pack.suits_nccl)

    def settle(self) -> Steps[None]:
        """Find out what the row of the table asks about the network, the first time (collective)."""
        if any(name == BY_NETWORK for _, name in self.row):
            has_rdma = yield from rdma_everywhere(self.site.comm)
            self.row = resolved(self.row, has_rdma)
            if self.site.comm.Get_rank() == 0:
                fabric = rdma_fabric()
                why = f"NCCL has RDMA on all ranks, {fabric.name} here" if has_rdma and fabric else "no RDMA for NCCL"
                _log.info("mpidist: arrays on GPUs go between nodes by %s (%s)", row_text(self.row), why)

    def prepare(self) -> Steps[None]:
        """Make the algorithms that the table names (collective)."""
        if self.site.comm.Get_size() > 1:
            yield from self.settle()
            for name in dict.fromkeys(name for _, name in self.row):
                yield from self.make(self.names_from(name))

    @property
    def moves_by_nccl(self) -> bool:
        """Whether NCCL moves arrays: where large reductions take it; the same on every rank after ``prepare``."""
        taken = self.first_working(self.names_from(look_up(self.row, sys.maxsize)))
        return self.site.comm.Get_size() > 1 and taken == "nccl"

    @property
    def nccl(self) -> NcclComm:
        """NCCL over all ranks, where ``moves_by_nccl``."""
        made = self.made(("nccl",))
        assert isinstance(made, Nccl)
        return made.comm

    def close(self) -> None:
        """Free what the algorithms hold, once it is all done (collective)."""
        self.streams.close()
        super().close()
