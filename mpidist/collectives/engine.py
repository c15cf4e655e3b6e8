"""Engine: the steps of the collectives on one channel, which yield while they wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from mpidist.arrays.convert import graph_error
from mpidist.arrays.device_ops import gpu_ops, is_device_array, ops_of
from mpidist.arrays.dtypes import Array
from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.channel.observers import PACK, REDUCE, UNPACK
from mpidist.collectives.channel.operation import Description
from mpidist.collectives.gpu.device_move import DeviceMovement
from mpidist.collectives.gpu.device_streams import (
    DeviceStreams,
    QueuePlace,
    ReductionCall,
    device_of_arrays,
)
from mpidist.collectives.gpu.reduce import DeviceChoice, may_move_by_nccl
from mpidist.collectives.move.move import HostMovement
from mpidist.collectives.mpi import exchange
from mpidist.collectives.mpi.mpi_types import NUMPY_OPS
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.core import MET, MOST_INPUTS, SMALL_BETWEEN_NODES, Core, FastCalls, Resume
from mpidist.collectives.node.memory import Pool
from mpidist.collectives.node.packing import Pack, are_in_place, copies_of_overlapping
from mpidist.collectives.reduce.choice import Choice, place_of
from mpidist.collectives.reduce.plan import ReductionPlan
from mpidist.collectives.reduce.registry import Algorithm, Site, Table, host_algorithms
from mpidist.core.options import ReduceOp

BY_CORE, BY_LEADERS, ALONE = "hierarchical", "leaders", "alone"
"""Names of the algorithms that the native core runs."""


class Engine:
    """Creates the steps of collectives. Each collective begins with the handshake of the channel."""

    def __init__(self, channel: Channel, table: Table) -> None:
        self.channel = channel
        place, site = place_of(channel.node), Site(channel.comm, channel.node, table.between_nodes)
        self.choice: Choice[Algorithm] = Choice(host_algorithms, site, place, getattr(table, place))
        self.table = table
        self._on_device: DeviceChoice | None = None
        self._queue_place: QueuePlace | None = None
        # Whether prepare_device() has run. Equal on all ranks between collectives.
        self.is_device_prepared = False
        self._pool = Pool()
        self.on_host = HostMovement(channel, self._pool)
        self.last_algorithm = "none"

    def open_fast_calls(self, resume: Resume) -> FastCalls:
        """Return the fast path. ``resume`` finishes calls with late or mismatched peers."""
        self.channel.executor.fast.algorithm = self.core_algorithm
        return self.channel.executor.fast.open(self._pool.take, resume)

    @property
    def core(self) -> Core | None:
        """The native core that moves the data of all ranks on one node, if any."""
        node = self.channel.node
        return node.core if node.is_alone else None

    @property
    def core_algorithm(self) -> str:
        """The algorithm of all-reduces on the fast path."""
        if not self.channel.node.is_alone:
            return BY_LEADERS
        return BY_CORE if self.channel.size > 1 else ALONE

    def resume(self, description: Description, state: int, value: Array, result: Array) -> Steps[Array]:
        """Finish a fast-path call that has reached ``state``."""
        core = self.channel.node.core
        assert core is not None
        self.channel.executor.fast.resumed()
        core.resume(state)
        yield from self.channel.resume(description)
        if description.operation == "all_reduce":
            self._took(self.core_algorithm)
        return (yield from self.on_host.gathered(core, value)) if core.state == MET else result

    def may_move_on_device(self, arrays: Sequence[Array]) -> bool:
        """Whether all arrays are on this communicator's GPU, and NCCL runs large reductions there."""
        if not arrays or not all(map(is_device_array, arrays)):
            return False
        kind = ops_of(arrays[0]).kind
        if self.channel.size == 1 or not may_move_by_nccl(self.table, place_of(self.channel.node, kind)):
            return False
        streams = self.choice_on(kind, ops_of(arrays[0]).device_of(arrays[0])).streams
        return {streams.device} == {ops_of(array).device_of(array) for array in arrays}

    @property
    def on_device(self) -> DeviceMovement | None:
        """The collectives that move arrays on the prepared device by NCCL, if it is used."""
        assert self._on_device is not None
        return DeviceMovement(self.channel, self._on_device) if self._on_device.moves_by_nccl else None

    def choice_for(self, name: str, arrays: Sequence[Array]) -> DeviceChoice:
        """Return the choice for the arrays of a call, in the thread of the program.

        Raises ValueError for another device than before, and RuntimeError while the stream captures a CUDA graph.
        """
        kind, device = device_of_arrays(arrays)
        if gpu_ops().current_stream(device).is_capturing:
            raise graph_error(name)
        choice = self.choice_on(kind, device)
        if choice.streams.device != device:
            raise ValueError(
                f"arrays are on {kind}:{device}, but this communicator uses {kind}:{choice.streams.device}, the device "
                "of its first arrays. Use one device per rank"
            )
        choice.streams.check_in_step()
        return choice

    def choice_on(self, kind: str, device: int) -> DeviceChoice:
        """Return the choice for arrays on a device, created for the first device."""
        channel = self.channel
        if self._on_device is None:
            streams = DeviceStreams(device, lambda: not channel.is_usable)
            channel.at_exit.append(streams.abandon)
            self._on_device = DeviceChoice(self.table, streams, self.choice, self._pool)
        return self._on_device

    def prepare_device(self, choice: DeviceChoice, description: Description) -> Steps[None]:
        """Create the algorithms of all-reduces on a device (collective)."""
        yield from self.channel.open(description)
        yield from self._take_turn(choice.streams)
        try:
            yield from choice.prepare()
        finally:
            self._end_turn()
        self.is_device_prepared = True

    def before_close(self) -> Steps[None]:
        """Return the steps before ``close``, after all ranks have called it (collective)."""
        if self._on_device is not None:
            # Queued calls of other communicators may still use the NCCL communicators of this one.
            yield from self._take_turn(self._on_device.streams)

    def _take_turn(self, streams: DeviceStreams) -> Steps[None]:
        place = self._queue_place = QueuePlace(streams)
        place.enter()
        yield from place.wait_until_first()

    def _end_turn(self) -> None:
        if self._queue_place is not None:
            self._queue_place.leave()
            self._queue_place = None

    def all_reduce(
        self,
        plan: ReductionPlan,
        arrays: Sequence[Array],
        out: Sequence[Array] | None,
        call: ReductionCall | None = None,
        more: Sequence[Sequence[Array]] = (),
    ) -> Steps[list[Array]]:
        """Reduce ``arrays`` over all ranks, into ``out`` if given.

        Results on a GPU are complete when ``call`` is done. ``more`` are the arrays of further replicas of this rank.
        """
        if more and self._is_alone(plan):
            arrays, more = _combined(plan.op, [arrays, *more]), ()
        if (
            out is not None
            and plan.read_late
            and not self._is_alone(plan)
            and not self._goes_in_place(plan, arrays, out)
        ):
            # A pack may overwrite inputs of a later pack, and a rank inputs that its neighbours still read.
            arrays = self._apart(plan, arrays, out)
        try:
            return (yield from self._reduce_packs(plan, arrays, out, call, more, may_share=out is None, is_wanted=True))
        finally:
            if call is not None:
                call.leave()

    def _is_alone(self, plan: ReductionPlan) -> bool:
        return self.channel.size == 1 and plan.options.algorithm is None

    def _goes_in_place(self, plan: ReductionPlan, arrays: Sequence[Array], out: Sequence[Array]) -> bool:
        """Whether all arrays are reduced in one call that allows results over inputs."""
        # The core detects overlaps. A single rank on its node allows an array that is its own result, and any overlap
        # of small arrays, which are read completely first.
        if len(plan.packs) > 1 or plan.device_groups:
            return False
        pack = plan.packs[0]
        names = self._names_for(plan, pack)
        if self.choice.made(names) is None:
            return False
        name, node = self.choice.first_working(names), self.channel.node
        if name == BY_LEADERS:
            return pack.nbytes <= SMALL_BETWEEN_NODES
        return name == BY_CORE and (node.has_neighbours or are_in_place(arrays, out))

    def _made_for(self, plan: ReductionPlan, pack: Pack) -> tuple[str, Algorithm | None]:
        """Return the name and object of a pack's algorithm, or None before its creation."""
        if pack.made is None:
            name = self.choice.first_working(self._names_for(plan, pack))
            algorithm = self.choice.made((name,))
            if algorithm is None:
                return name, None
            pack.made = name, algorithm
        return cast("tuple[str, Algorithm]", pack.made)

    def _names_for(self, plan: ReductionPlan, pack: Pack) -> Sequence[str]:
        if pack.algorithms is None:
            pack.algorithms = self.choice.names_for(pack.nbytes, plan.options)
        return pack.algorithms

    def _apart(self, plan: ReductionPlan, arrays: Sequence[Array], out: Sequence[Array]) -> Sequence[Array]:
        """Return ``arrays``, with copies of arrays that results may overwrite before they are read."""
        if plan.on_device:
            out = [target for target, is_on_device in zip(out, plan.on_device, strict=True) if not is_on_device]
        late = [arrays[index] for index in plan.read_late]
        apart = list(arrays)
        for index, copy in zip(plan.read_late, copies_of_overlapping(late, out, self._pool), strict=True):
            apart[index] = copy
        return apart

    def _reduce_packs(
        self,
        plan: ReductionPlan,
        arrays: Sequence[Array],
        out: Sequence[Array] | None,
        call: ReductionCall | None,
        more: Sequence[Sequence[Array]] = (),
        *,
        may_share: bool,
        is_wanted: bool,
    ) -> Steps[list[Array]]:
        """Reduce one pack after the other. Results that are not wanted stay undefined."""
        channel = self.channel
        results = plan.blank_results(out, None if call is None else call.results)
        is_alone = self._is_alone(plan)
        if not plan.packs or call is not None or is_alone:
            yield from channel.open(plan.description)
        if call is not None:
            # The device continues while arrays in host memory are reduced.
            yield from self._reduce_on_device(plan, call)
        if is_alone:
            # The fast path of later calls needs the shared memory.
            yield from channel.node.make_room(channel.comm)
            plan.deliver_alone(arrays, results, are_given=out is not None, pool=self._pool)
            self._took(ALONE)
            return results
        tells_phases = bool(channel.observers.phase)
        for number, pack in enumerate(plan.packs):
            name, algorithm = self._made_for(plan, pack)
            if algorithm is None:
                # Creating an algorithm is collective, so run the handshake first.
                yield from channel.open(plan.description)
                yield from self.choice.make(self._names_for(plan, pack))
                name, algorithm = self._made_for(plan, pack)
                assert algorithm is not None
            if tells_phases:
                channel.phase(PACK)
            job = plan.reduction(pack, arrays, out, self._pool, more)
            if not algorithm.takes_replicas or len(job.pieces) * (1 + len(more)) > MOST_INPUTS:
                job.combine_replicas()
            job.is_wanted, job.may_share = is_wanted, may_share
            if channel.observers.chunk:
                job.tell_chunk = channel.tell_chunk
            if number == 0 and call is None:
                yield from channel.open(plan.description, algorithm.start(job))
            if tells_phases:
                channel.phase(REDUCE)
            pieces = yield from algorithm.all_reduce(job)
            self._took(job.took or name)
            if tells_phases:
                channel.phase(UNPACK)
            if is_wanted:
                pack.deliver(pieces, results, are_given=out is not None)
        return results

    def _reduce_on_device(self, plan: ReductionPlan, call: ReductionCall) -> Steps[None]:
        choice = self._on_device
        assert choice is not None
        yield from call.wait_until_first()
        yield from choice.settle()
        for reduction in call.reductions:
            self.channel.phase(REDUCE)
            names = choice.names_for_pack(reduction.pack, plan.options)
            algorithm = choice.made(names) or (yield from choice.make(names))
            yield from algorithm.all_reduce(reduction)
            call.store(reduction)
            self._took(choice.first_working(names))
        call.leave()

    def _took(self, algorithm: str) -> None:
        self.last_algorithm = algorithm
        self.channel.current.took(algorithm)

    def close(self) -> None:
        """Free the algorithms (collective)."""
        if self._on_device is not None:
            try:
                self._on_device.close()
            finally:
                self._end_turn()
        self.choice.close()

    def reduce_to(self, plan: ReductionPlan, arrays: Sequence[Array], root: int) -> Steps[list[Array]]:
        """Reduce to rank ``root``. Results of other ranks are undefined."""
        channel, is_root = self.channel, self.channel.rank == root
        if (channel.node.is_alone and channel.size > 1) or _asks_for_more(plan):
            return (yield from self._reduce_packs(plan, arrays, None, None, may_share=False, is_wanted=is_root))
        # Between nodes MPI_Ireduce is sufficient, unless the options need more than it offers.
        yield from channel.open(plan.description)
        results = plan.blank_results(None)
        channel.phase(REDUCE)
        channel.current.took("mpi")
        for pack in plan.packs:
            job = plan.reduction(pack, arrays, None, self._pool)
            flat = job.flat_result() if is_root else None
            yield from exchange.reduce_to(channel.comm, job.flat_input(), flat, plan.op, root)
            if flat is not None:
                pack.deliver(job.finish(flat), results, are_given=False)
        return results

    def scatters_on_device(self, plan: ReductionPlan) -> bool:
        """Whether NCCL supports a ``reduce_scatter`` with its options."""
        assert self._on_device is not None
        packs = self._on_device.packs_of(plan)
        return not _asks_for_more(plan) and bool(packs) and packs[0].suits_nccl

    def reduce_scatter(
        self, plan: ReductionPlan, array: Array, rows: Sequence[int], out: Array | None
    ) -> Steps[list[Array]]:
        """Return this rank's rows of the reduction."""
        if _asks_for_more(plan):
            (whole,) = yield from self._reduce_packs(plan, [array], None, None, may_share=False, is_wanted=True)
            mine: Array = whole[rows[self.channel.rank] : rows[self.channel.rank + 1]].copy()
            return [mine]
        return (yield from self.on_host.reduce_scatter(plan, array, rows, out))


def _combined(op: ReduceOp, replicas: Sequence[Sequence[Array]]) -> list[Array]:
    totals = list(replicas[0])
    for arrays in replicas[1:]:
        totals = [NUMPY_OPS[op](total, array) for total, array in zip(totals, arrays, strict=True)]
    return totals


def _asks_for_more(plan: ReductionPlan) -> bool:
    """Whether a call needs a named algorithm, a fixed order or a 16-bit wire."""
    options = plan.options
    return options.algorithm is not None or options.deterministic or options.wire_dtype is not None
