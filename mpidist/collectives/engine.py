"""Engine: the steps of the collectives on one channel, which yield while they wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpidist.arrays.convert import graph_error
from mpidist.arrays.device_ops import gpu_ops, is_device_array, ops_of
from mpidist.arrays.dtypes import Array
from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.channel.observers import PACK, REDUCE, UNPACK
from mpidist.collectives.channel.operation import Description
from mpidist.collectives.move.move import HostMovement
from mpidist.collectives.mpi import exchange
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.core import MET, MOST_INPUTS, Core, FastCalls, Resume
from mpidist.collectives.node.memory import Pool
from mpidist.collectives.node.packing import PackedReduction
from mpidist.collectives.reduce.choice import ALONE, Choice, place_of
from mpidist.collectives.reduce.plan import ReductionPlan
from mpidist.collectives.reduce.registry import Algorithm, Site, Table, host_algorithms

# Programs without arrays on GPUs do not import the modules for them.
if TYPE_CHECKING:
    from mpidist.collectives.gpu.device_move import DeviceMovement
    from mpidist.collectives.gpu.device_streams import DeviceCall, QueuePlace
    from mpidist.collectives.gpu.reduce import DeviceChoice


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
        # The algorithm of all-reduces on the fast path.
        self.core_algorithm = "leaders" if place == "several_nodes" else "hierarchical" if channel.size > 1 else ALONE

    def open_fast_calls(self, resume: Resume) -> FastCalls:
        """Return the fast path. ``resume`` finishes calls with late or mismatched peers."""
        self.channel.executor.fast.algorithm = self.core_algorithm
        return self.channel.executor.fast.open(self._pool.take, resume)

    @property
    def core(self) -> Core | None:
        """The native core that moves the data of all ranks on one node, if any."""
        node = self.channel.node
        return node.core if node.is_alone else None

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
        from mpidist.collectives.gpu.reduce import may_move_by_nccl

        kind = ops_of(arrays[0]).kind
        if self.channel.size == 1 or not may_move_by_nccl(self.table, place_of(self.channel.node, kind)):
            return False
        streams = self.choice_on(kind, ops_of(arrays[0]).device_of(arrays[0])).streams
        return {streams.device} == {ops_of(array).device_of(array) for array in arrays}

    @property
    def on_device(self) -> DeviceMovement | None:
        """The collectives that move arrays on the prepared device by NCCL, if it is used."""
        from mpidist.collectives.gpu.device_move import DeviceMovement

        assert self._on_device is not None
        nccl = self._on_device.mover
        return None if nccl is None else DeviceMovement(self.channel, nccl)

    def choice_for(self, name: str, arrays: Sequence[Array]) -> DeviceChoice:
        """Return the choice for the arrays of a call, in the thread of the program.

        Raises ValueError for another device than before, and RuntimeError while the stream captures a CUDA graph.
        """
        from mpidist.collectives.gpu.device_streams import device_of_arrays

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
            from mpidist.collectives.gpu.device_streams import DeviceStreams
            from mpidist.collectives.gpu.reduce import DeviceChoice

            streams = DeviceStreams(device, lambda: not channel.is_usable)
            channel.at_exit.append(streams.abandon)
            self._on_device = DeviceChoice(self.table, streams, self.choice, self._pool)
        return self._on_device

    def prepare_device(self, choice: DeviceChoice, description: Description) -> Steps[None]:
        """Create the algorithms of all-reduces on a device (collective)."""
        from mpidist.collectives.gpu.device_streams import QueuePlace

        yield from self.channel.open(description)
        place = QueuePlace(choice.streams)
        place.enter()
        try:
            yield from place.wait_until_first()
            yield from choice.prepare()
        finally:
            place.leave()
        self.is_device_prepared = True

    def before_close(self) -> Steps[None]:
        """Return the steps before ``close``, after all ranks have called it (collective)."""
        if self._on_device is not None:
            from mpidist.collectives.gpu.device_streams import QueuePlace

            # Queued calls of other communicators may still use the NCCL communicators of this one.
            self._queue_place = QueuePlace(self._on_device.streams)
            self._queue_place.enter()
            yield from self._queue_place.wait_until_first()

    def all_reduce(
        self,
        plan: ReductionPlan,
        arrays: Sequence[Array],
        out: Sequence[Array] | None = None,
        call: DeviceCall | None = None,
        more: Sequence[Sequence[Array]] = (),
    ) -> Steps[list[Array]]:
        """Reduce ``arrays`` over all ranks, into ``out`` if given, one pack after the other.

        Results on a GPU are complete when ``call`` is done. ``more`` are the arrays of further replicas of this rank.
        If the plan has a root, results of other ranks are undefined.
        """
        channel, observers = self.channel, self.channel.observers
        results, is_open = plan.blank_results() if out is None else list(out), False
        is_wanted = plan.root is None or plan.root == channel.rank
        if call is not None:
            # The device continues while arrays in host memory are reduced.
            yield from self._reduce_on_device(plan, call)
            is_open = True
            if out is None:
                for index, result in call.results.items():
                    results[index] = result
        elif not plan.packs:
            yield from channel.open(plan.description)
        if out is not None:
            arrays = plan.read_late(arrays, out, self._pool)
        for number, pack in enumerate(plan.packs):
            made = plan.made[number]
            if made is None:
                names = self.choice.names_for(pack.nbytes, plan.options)
                if self.choice.made(names) is None and not is_open:
                    # Creating an algorithm is collective, so compare the calls of the ranks first.
                    yield from channel.open(plan.description)
                    is_open = True
                algorithm = yield from self.choice.make(names)
                made = plan.made[number] = self.choice.first_working(names), algorithm
            name, algorithm = made
            if observers.phase:
                channel.phase(PACK)
            job = PackedReduction(pack, arrays, out, plan.op, plan.divisor, plan.options, self._pool, more)
            job.is_wanted, job.may_share = is_wanted, out is None and plan.root is None
            if observers.chunk:
                job.tell_chunk = channel.tell_chunk
            if more and (not algorithm.takes_replicas or len(job.pieces) * (1 + len(more)) > MOST_INPUTS):
                job.combine_replicas()
            if not algorithm.allows_overlap:
                job.separate()
            if not is_open:
                yield from channel.open(plan.description, algorithm.start(job))
                is_open = True
            if observers.phase:
                channel.phase(REDUCE)
            pieces = yield from algorithm.all_reduce(job)
            self._took(job.took or name)
            if observers.phase:
                channel.phase(UNPACK)
            if is_wanted:
                pack.deliver(pieces, results, are_given=out is not None)
        return results

    def _reduce_on_device(self, plan: ReductionPlan, call: DeviceCall) -> Steps[None]:
        choice = self._on_device
        assert choice is not None
        try:
            yield from self.channel.open(plan.description)
            yield from call.wait_until_first()
            yield from choice.settle()
            for reduction in call.reductions:
                self.channel.phase(REDUCE)
                names = choice.names_for_pack(reduction.pack, plan.options)
                algorithm = choice.made(names) or (yield from choice.make(names))
                yield from algorithm.all_reduce(reduction)
                call.store(reduction)
                self._took(choice.first_working(names))
        finally:
            call.leave()

    def _took(self, algorithm: str) -> None:
        self.last_algorithm = algorithm
        self.channel.executor.current.took(algorithm)

    def close(self) -> None:
        """Free the algorithms (collective)."""
        try:
            if self._on_device is not None:
                self._on_device.close()
        finally:
            if self._queue_place is not None:
                self._queue_place.leave()
        self.choice.close()

    def reduce_to(self, plan: ReductionPlan, arrays: Sequence[Array], root: int) -> Steps[list[Array]]:
        """Reduce to the root of the plan. Results of other ranks are undefined."""
        # Between nodes MPI_Ireduce is sufficient, unless the options need more than it offers.
        by_mpi = not (self.channel.node.is_alone or plan.needs_algorithm)
        return self._reduce_by_mpi(plan, arrays, root) if by_mpi else self.all_reduce(plan, arrays)

    def _reduce_by_mpi(self, plan: ReductionPlan, arrays: Sequence[Array], root: int) -> Steps[list[Array]]:
        channel, results = self.channel, plan.blank_results()
        yield from channel.open(plan.description)
        channel.phase(REDUCE)
        channel.executor.current.took("mpi")
        for pack in plan.packs:
            job = PackedReduction(pack, arrays, None, plan.op, plan.divisor, plan.options, self._pool)
            flat = job.flat_result() if channel.rank == root else None
            yield from exchange.reduce_to(channel.comm, job.flat_input(), flat, plan.op, root)
            if flat is not None:
                pack.deliver(job.finish(flat), results, are_given=False)
        return results

    def scatters_on_device(self, plan: ReductionPlan) -> bool:
        """Whether NCCL supports a ``reduce_scatter`` with its options."""
        assert self._on_device is not None
        packs = self._on_device.packs_of(plan)
        return not plan.needs_algorithm and bool(packs) and packs[0].suits_nccl

    def reduce_scatter(
        self, plan: ReductionPlan, array: Array, rows: Sequence[int], out: Array | None
    ) -> Steps[list[Array]]:
        """Return this rank's rows of the reduction."""
        if not plan.needs_algorithm:
            return (yield from self.on_host.reduce_scatter(plan, array, rows, out))
        (whole,) = yield from self.all_reduce(plan, [array])
        return [whole[rows[self.channel.rank] : rows[self.channel.rank + 1]].copy()]
