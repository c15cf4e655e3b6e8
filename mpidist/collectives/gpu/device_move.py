"""All-gather, broadcast and reduce-scatter arrays on GPUs with NCCL, if large reductions use it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise

from mpidist.arrays.dtypes import Array
from mpidist.arrays.streams import Stream
from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.channel.observers import MOVE
from mpidist.collectives.channel.operation import Signature
from mpidist.collectives.gpu.device_streams import DeviceCall, DeviceStreams
from mpidist.collectives.gpu.nccl_comm import NcclComm
from mpidist.collectives.gpu.reduce import DeviceChoice
from mpidist.collectives.move.move import MovePlan
from mpidist.collectives.mpi import exchange
from mpidist.collectives.mpi.exchange import all_do
from mpidist.collectives.mpi.waiting import LOOKS_BEFORE_YIELD_ON_WIRE, Steps, relax
from mpidist.collectives.node.memory import slices
from mpidist.collectives.reduce.plan import ReductionPlan
from mpidist.core.errors import PeerError
from mpidist.core.options import ReduceOp


class MovementCall(DeviceCall):
    """Hold a call that moves arrays of one device.

    Args:
        travelling: Arrays to send, for example transposed to put the gather axis first.
        results: Shapes and dtypes that are known before the handshake.
        streams, timeout: See ``DeviceCall``.
    """

    def __init__(self, travelling: Sequence[Array], results: Signature, streams: DeviceStreams, timeout: float) -> None:
        super().__init__(streams, timeout)
        ops = streams.ops
        with streams.on():
            for index, array in enumerate(travelling):
                self.inputs[index] = array if ops.is_contiguous(array) else ops.copy(array)
        self.allocate(results)
        # Enter last, so that an earlier failure does not block the queue.
        self.enter()

    def allocate(self, signature: Signature) -> None:
        """Allocate the results on the caller's stream (thread-safe)."""
        streams = self.streams
        with streams.on(), self.caller:
            for index, (shape, dtype) in enumerate(signature):
                self.results[index] = streams.ops.empty(shape, dtype, streams.device)
            self.follow_caller()


class DeviceMovement:
    """Run the collectives of one communicator that move arrays on a device."""

    def __init__(self, channel: Channel, choice: DeviceChoice) -> None:
        self._channel = channel
        self._choice = choice

    def all_gather(self, plan: MovePlan, call: MovementCall) -> Steps[list[Array]]:
        """Concatenate arrays over the ranks along their first axis."""
        with _finishing(call):
            nccl = yield from self._begin(plan, call)
            arrays, stream = list(call.inputs.values()), call.streams.stream
            rows = yield from exchange.gather_lengths(self._channel.comm, [len(array) for array in arrays])
            lengths = [sum(lengths) for lengths in zip(*rows, strict=True)]
            shapes = [(length, *array.shape[1:]) for length, array in zip(lengths, arrays, strict=True)]
            yield from self._allocate(call, plan, tuple(zip(shapes, [array.dtype for array in arrays], strict=True)))
            with call.streams.on():
                with nccl.group():
                    for index, array in enumerate(arrays):
                        counts = [row[index] * plan.row_sizes[index] for row in rows]
                        _gather(nccl, array.reshape(-1), call.results[index].reshape(-1), counts, stream)
                return [plan.result(index, whole) for index, whole in call.results.items()]

    def broadcast(self, plan: MovePlan, call: MovementCall) -> Steps[list[Array]]:
        """Return the arrays of the root."""
        assert plan.root is not None
        with _finishing(call):
            nccl = yield from self._begin(plan, call)
            with call.streams.on(), nccl.group():
                for index, array in call.inputs.items():
                    target = call.results[index].reshape(-1)
                    nccl.broadcast(array.reshape(-1), target, plan.root, call.streams.stream)
            return list(call.results.values())

    def reduce_scatter(self, plan: ReductionPlan, call: MovementCall) -> Steps[list[Array]]:
        """Return this rank's rows of the reduction."""
        (pack,), streams, result = plan.device_packs, call.streams, call.results[0]
        op = ReduceOp.SUM if plan.op is ReduceOp.MEAN else plan.op
        with _finishing(call):
            nccl = yield from self._begin(plan, call)
            with streams.on():
                source, target = call.inputs[0].reshape(-1), result
                if not pack.is_plain:
                    source, target = streams.empty(source.size, pack.dtype), streams.empty(result.size, pack.dtype)
                    pack.load(streams.ops, list(call.inputs.values()), source, streams.stream)
                rows, row_size = plan.shapes[0][0], source.size // plan.shapes[0][0]
                cuts = [(start * row_size, stop * row_size) for start, stop in slices(rows, nccl.size)]
                _reduce_scatter(nccl, source, target, cuts, op, streams.stream)
                if plan.divisor is not None or target is not result:
                    streams.ops.unpack(target, [result], plan.divisor, streams.stream)
            return [result]

    def _begin(self, plan: MovePlan | ReductionPlan, call: MovementCall) -> Steps[NcclComm]:
        """Return NCCL after the handshake, when ``call`` is first in the queue."""
        yield from self._channel.open(plan.description)
        self._channel.phase(MOVE)
        yield from call.wait_until_first()
        return self._choice.nccl

    def _allocate(self, call: MovementCall, plan: MovePlan, signature: Signature) -> Steps[None]:
        """Allocate results of lengths that the handshake did not know, or raise on all ranks."""
        failed_polls = 0
        while call.caller.is_capturing:
            # The program records a CUDA graph. It must end the recording before it waits for the result.
            failed_polls += 1
            relax(failed_polls, LOOKS_BEFORE_YIELD_ON_WIRE)
            yield
        yield from all_do(
            self._channel.comm,
            lambda: call.allocate(signature),
            lambda rank, text: PeerError(f"rank {rank} cannot allocate the result of {plan.description.text}: {text}"),
        )


@contextmanager
def _finishing(call: MovementCall) -> Iterator[None]:
    """Finish a call, and release its place in the queue on any exit."""
    try:
        yield
        with call.streams.on():
            call.streams.finish(call)
    finally:
        call.leave()


def _gather(nccl: NcclComm, mine: Array, whole: Array, counts: Sequence[int], stream: Stream) -> None:
    """Concatenate the flat arrays of all ranks, of ``counts`` elements, in ``whole``."""
    if len({*counts}) == 1:
        nccl.all_gather(mine, whole, stream)
        return
    for root, (start, stop) in enumerate(pairwise(accumulate(counts, initial=0))):
        nccl.broadcast(mine if root == nccl.rank else None, whole[start:stop], root, stream)


def _reduce_scatter(
    nccl: NcclComm, source: Array, target: Array, cuts: Sequence[tuple[int, int]], op: ReduceOp, stream: Stream
) -> None:
    """Reduce this rank's cut into ``target``."""
    if len({stop - start for start, stop in cuts}) == 1:
        nccl.reduce_scatter(source, target, op, stream)
        return
    with nccl.group():
        for root, (start, stop) in enumerate(cuts):
            nccl.reduce(source[start:stop], target if root == nccl.rank else None, op, root, stream)
