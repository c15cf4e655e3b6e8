"""The choice of an algorithm for arrays on a GPU, and those made so far."""

from __future__ import annotations

import logging
import sys

from mpidist.collectives.gpu import algorithms  # noqa: F401  # registers the algorithms
from mpidist.collectives.gpu.algorithms.nccl_all_reduce import Nccl
from mpidist.collectives.gpu.device_call import DeviceAlgorithm, DeviceSite
from mpidist.collectives.gpu.device_streams import DeviceStreams
from mpidist.collectives.gpu.nccl_comm import NcclComm
from mpidist.collectives.gpu.network_probes import rdma_everywhere, rdma_fabric
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.memory import Pool
from mpidist.collectives.reduce.choice import Choice, place_of
from mpidist.collectives.reduce.device_packs import SLICE_ALIGNMENT, DevicePack
from mpidist.collectives.reduce.registry import (
    BY_NETWORK,
    Algorithm,
    Row,
    Table,
    gpu_algorithms,
    look_up,
    resolved,
    row_text,
)
from mpidist.core.options import CommunicationOptions

_log = logging.getLogger("mpidist")


def may_move_by_nccl(table: Table, place: str) -> bool:
    """Return whether several ranks move arrays by NCCL if it works and has a network.

    The same on every rank.
    """
    row: Row = getattr(table, place)
    return look_up(row, sys.maxsize) in ("nccl", BY_NETWORK)


class DeviceChoice(Choice[DeviceAlgorithm]):
    """The algorithms of one communicator for arrays on one device.

    Args:
        table: Which algorithm is taken where.
        streams: Where they work.
        on_host: The choice for arrays in host memory.
        pool: Host memory.
    """

    def __init__(self, table: Table, streams: DeviceStreams, on_host: Choice[Algorithm], pool: Pool) -> None:
        comm, node = on_host.site.comm, on_host.site.node
        site, place = DeviceSite(comm, node, table.between_nodes, streams, on_host, pool), place_of(node, "gpu")
        super().__init__(gpu_algorithms, site, place, getattr(table, place))
        self.streams = streams

    @property
    def multiple(self) -> int:
        """Return the number of bytes of which flat arrays are a multiple.

        So slices between nodes have one length, and each begins where NCCL reads many elements at a time.
        """
        rails = 1 if self.site.node.is_alone else self.site.node.rails
        return 1 if rails == 1 else rails * SLICE_ALIGNMENT

    def names_for_pack(self, pack: DevicePack, options: CommunicationOptions) -> tuple[str, ...]:
        """Return the algorithm for a pack, then its substitutes; the same on every rank."""
        if self.site.comm.Get_size() == 1:
            return ("alone",)
        return self.names_for(pack.nbytes, options, pack.suits_nccl)

    def settle(self) -> Steps[None]:
        """Replace "by network" in the row of the table, the first time (collective)."""
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
        """Return whether NCCL moves arrays, which it does where large reductions take it.

        The same on every rank after ``prepare``.
        """
        taken = self.first_working(self.names_from(look_up(self.row, sys.maxsize)))
        return self.site.comm.Get_size() > 1 and taken == "nccl"

    @property
    def nccl(self) -> NcclComm:
        """Return NCCL over all ranks, where ``moves_by_nccl``."""
        made = self.made(("nccl",))
        assert isinstance(made, Nccl)
        return made.comm

    def close(self) -> None:
        """Free the algorithms, once all work is done (collective)."""
        self.streams.close()
        super().close()
