"""DeviceChoice: which algorithm a reduction of arrays on a GPU takes, and those that have been made for it."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Protocol

from mpidist.arrays.convert import Array
from mpidist.collectives.gpu.alone import Alone
from mpidist.collectives.gpu.device_call import DeviceReduction
from mpidist.collectives.gpu.device_hierarchical import DeviceHierarchical
from mpidist.collectives.gpu.device_streams import DeviceStreams
from mpidist.collectives.gpu.gpu_aware_mpi import takes_device_memory
from mpidist.collectives.gpu.nccl_all_reduce import Nccl
from mpidist.collectives.gpu.nccl_comm import NcclComm
from mpidist.collectives.gpu.nccl_network import rdma_everywhere, rdma_fabric
from mpidist.collectives.gpu.staged import Staged
from mpidist.collectives.gpu.staging import agreed_staging_bytes
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.memory import Pool
from mpidist.collectives.reduce.algorithms.wires import NAMES as WIRES
from mpidist.collectives.reduce.algorithms.wires import Wires
from mpidist.collectives.reduce.choice import Choice, place_of
from mpidist.collectives.reduce.device_packs import SLICE_ALIGNMENT, DevicePack
from mpidist.collectives.reduce.table import ALGORITHMS, BY_NETWORK, Row, Table, look_up, resolved, row_text
from mpidist.core.errors import AlgorithmError
from mpidist.core.options import CommunicationOptions

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpidist.collectives.node.node import Node

_log = logging.getLogger("mpidist")


class DeviceAlgorithm(Protocol):
    """What an algorithm for arrays on GPUs offers."""

    name: str
    """What ran last, for reports."""

    def all_reduce(self, job: DeviceReduction) -> Steps[list[Array]]:
        """Reduce over all ranks, which have met; returns the results once all work has been put on the streams."""

    def close(self) -> None:
        """Free what the algorithm holds (collective)."""


def may_move_by_nccl(table: Table, place: str) -> bool:
    """Whether several ranks move arrays by NCCL, if it works and has a network; the same on every rank."""
    row: Row = getattr(table, place)
    return look_up(row, sys.maxsize) in ("nccl", BY_NETWORK)


class DeviceChoice:
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
        self, comm: MPI.Intracomm, node: Node, table: Table, streams: DeviceStreams, on_host: Choice, pool: Pool
    ) -> None:
        self._comm = comm
        self._node = node
        self._table = table
        self._row: Row = getattr(table, place_of(node, streams.ops.kind))
        self.streams = streams
        self._on_host = on_host
        self._pool = pool
        self._made: dict[str, DeviceAlgorithm] = {}
        self._without: set[str] = set()

    @property
    def multiple(self) -> int:
        """Of which the bytes of flat arrays have to be a multiple: slices between nodes are of one length.

        And each begins where NCCL reads many elements at a time.
        """
        rails = 1 if self._node.is_alone else min(len(ranks) for ranks in self._node.ranks)
        return 1 if rails == 1 else rails * SLICE_ALIGNMENT

    @property
    def place(self) -> str:
        """The row of the table that counts."""
        return place_of(self._node, self.streams.ops.kind)

    def name_for(self, pack: DevicePack, options: CommunicationOptions) -> str:
        """Return the algorithm for a pack: the same on every rank.

        Sums in a fixed order are formed on the host, and so is what NCCL does not know.
        """
        if self._comm.Get_size() == 1:
            return "alone"
        if not pack.suits_nccl or options.deterministic:
            return "staged"
        name = options.algorithm or look_up(self._row, pack.nbytes)
        if name in WIRES or (not self._node.is_alone and options.wire_dtype is not None):
            name = "hierarchical"
        if name == "hierarchical" and self._node.is_alone:
            name = "nccl"
        return self._working(name) if options.algorithm is None else name

    def _working(self, name: str) -> str:
        """Return an algorithm that has not failed to work here: the one named, or the next best."""
        while name in self._without:
            name = "hierarchical" if name == "nccl" and not self._node.is_alone else "staged"
        return name

    def settle(self) -> Steps[None]:
        """Find out what the row of the table asks about the network, the first time (collective)."""
        if any(name == BY_NETWORK for _, name in self._row):
            has_rdma = yield from rdma_everywhere(self._comm)
            self._row = resolved(self._row, has_rdma)
            if self._comm.Get_rank() == 0:
                fabric = rdma_fabric()
                why = f"NCCL has RDMA on all ranks, {fabric.name} here" if has_rdma and fabric else "no RDMA for NCCL"
                _log.info("mpidist: arrays on GPUs go between nodes by %s (%s)", row_text(self._row), why)

    def made(self, pack: DevicePack, options: CommunicationOptions) -> DeviceAlgorithm | None:
        """Return the algorithm for a pack if it has been made."""
        return self._made.get(self.name_for(pack, options))

    def make(self, pack: DevicePack, options: CommunicationOptions) -> Steps[DeviceAlgorithm]:
        """Make the algorithm for a pack (collective).

        Where the table's own choice does not work another takes its place, and a warning says so.

        Raises:
            AlgorithmError: It was asked for by name and does not work here, or is not one for arrays on GPUs.
        """
        name = self.name_for(pack, options)
        if options.algorithm is None:
            return (yield from self._make_working(name))
        self._made[name] = made = yield from self._make(name)
        return made

    def prepare(self) -> Steps[None]:
        """Make the algorithms that the table names (collective)."""
        if self._comm.Get_size() > 1:
            yield from self.settle()
            for name in dict.fromkeys(name for _, name in self._row):
                yield from self._make_working(name)

    def _make_working(self, name: str) -> Steps[DeviceAlgorithm]:
        while (name := self._working(name)) not in self._made:
            try:
                self._made[name] = yield from self._make(name)
            except AlgorithmError as error:
                self._without.add(name)
                if self._comm.Get_rank() == 0:
                    instead = self._working(name)
                    how = "in host memory, which is slow" if instead == "staged" else f"by {instead!r} instead"
                    _log.warning("mpidist: %s. Arrays on GPUs are reduced %s", error, how)
        return self._made[name]

    @property
    def moves_by_nccl(self) -> bool:
        """Whether NCCL moves arrays: where large reductions take it; the same on every rank after ``prepare``."""
        return self._comm.Get_size() > 1 and self._working(look_up(self._row, sys.maxsize)) == "nccl"

    @property
    def nccl(self) -> NcclComm:
        """NCCL over all ranks, where ``moves_by_nccl``."""
        made = self._made["nccl"]
        assert isinstance(made, Nccl)
        return made.comm

    def _make(self, name: str) -> Steps[DeviceAlgorithm]:
        if name == "alone":
            return Alone(self.streams)
        if name == "staged":
            chunk_bytes = yield from agreed_staging_bytes(self._comm)
            return Staged(self._node, self.streams, self._on_host, self._pool, chunk_bytes)
        if name == "nccl":
            return (yield from Nccl.made(self._comm, self.streams))
        if name == "hierarchical":
            wires = Wires(self._comm, self._node, self._table.between_nodes)
            aware = yield from takes_device_memory(self._comm)
            return (yield from DeviceHierarchical.made(self._comm, self._node, wires, self.streams, aware))
        raise AlgorithmError(
            f"algorithm {name!r} is for arrays in host memory, and was asked for arrays on GPUs; "
            f"leave algorithm out, or take one of {', '.join(ALGORITHMS[self.place])}"
        )

    def close(self) -> None:
        """Free what the algorithms hold, once it is all done (collective)."""
        self.streams.close()
        for algorithm in self._made.values():
            algorithm.close()
        self._made.clear()
