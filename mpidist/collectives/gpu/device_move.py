"""All-gather, broadcast and reduce-scatter arrays on GPUs with NCCL, if large reductions use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise

from mpidist.arrays.device_ops import gpu_ops, is_device_array
from mpidist.arrays.dtypes import Array
from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.channel.observers import MOVE
from mpidist.collectives.channel.operation import Signature, which_on_device
from mpidist.collectives.gpu.device_streams import DeviceCall
from mpidist.collectives.gpu.nccl import NcclComm
from mpidist.collectives.move.move import MovePlan
from mpidist.collectives.mpi import exchange
from mpidist.collectives.mpi.exchange import all_do
from mpidist.collectives.mpi.waiting import LOOKS_BEFORE_YIELD_ON_WIRE, Steps, relax
from mpidist.collectives.node.memory import slices
from mpidist.collectives.reduce.plan import ReductionPlan
from mpidist.core.errors import PeerError


class DeviceMovement:
    """Run the collectives of one communicator that move arrays on a device."""

    def __init__(self, channel: Channel, nccl: NcclComm) -> None:
        self._channel, self._nccl = channel, nccl

    def all_gather(self, plan: MovePlan, call: DeviceCall) -> Steps[list[Array]]:
        """Concatenate arrays over the ranks along their first axis."""
        with _finishing(call):
            yield from self._begin(plan, call)
            arrays, stream = list(call.inputs.values()), call.streams.stream
            rows = yield from exchange.gather_lengths(self._channel.comm, [len(array) for array in arrays])
            lengths = [sum(lengths) for lengths in zip(*rows, strict=True)]
            shapes = [(length, *array.shape[1:]) for length, array in zip(lengths, arrays, strict=True)]
            yield from self._allocate(call, plan, tuple(zip(shapes, [array.dtype for array in arrays], strict=True)))
            with call.streams.on():
                with self._nccl.group():
                    for index, array in enumerate(arrays):
                        ends = accumulate([row[index] * plan.row_sizes[index] for row in rows], initial=0)
                        whole = call.results[index].reshape(-1)
                        self._nccl.all_gather(array.reshape(-1), whole, stream, [*pairwise(ends)])
                return [plan.result(index, whole) for index, whole in call.results.items()]

    def broadcast(self, plan: MovePlan, call: DeviceCall) -> Steps[list[Array]]:
        """Return the arrays of the root."""
        assert plan.root is not None
        with _finishing(call):
            yield from self._begin(plan, call)
            with call.streams.on(), self._nccl.group():
                for index, array in call.inputs.items():
                    target = call.results[index].reshape(-1)
                    self._nccl.broadcast(array.reshape(-1), target, plan.root, call.streams.stream)
            return list(call.results.values())

    def reduce_scatter(self, plan: ReductionPlan, call: DeviceCall) -> Steps[list[Array]]:
        """Return this rank's rows of the reduction."""
        (reduction,), streams, result = call.reductions, call.streams, call.results[0]
        ((source, target),), pack = reduction.pieces, reduction.pack
        with _finishing(call):
            yield from self._begin(plan, call)
            rows, row_size = plan.shapes[0][0], source.size // plan.shapes[0][0]
            cuts = [(start * row_size, stop * row_size) for start, stop in slices(rows, self._nccl.size)]
            with streams.on():
                if pack.together:
                    start, stop = cuts[self._nccl.rank]
                    target = source[start:stop]
                self._nccl.reduce_scatter(source, target, pack.op, streams.stream, cuts)
                if pack.together or plan.divisor is not None:
                    streams.ops.cast([target], [result], streams.stream, plan.divisor)
            return [result]

    def _begin(self, plan: MovePlan | ReductionPlan, call: DeviceCall) -> Steps[None]:
        """Wait for the handshake, then until ``call`` is first in the queue."""
        yield from self._channel.open(plan.description)
        self._channel.phase(MOVE)
        yield from call.wait_until_first()

    def _allocate(self, call: DeviceCall, plan: MovePlan, signature: Signature) -> Steps[None]:
        """Allocate results of lengths that the handshake did not know, or raise on all ranks."""
        failed_polls = 0
        while call.caller.is_capturing:
            # The program records a CUDA graph. It must end the recording before it waits for the result.
            failed_polls += 1
            relax(failed_polls, LOOKS_BEFORE_YIELD_ON_WIRE)
            yield

        def allocate() -> None:
            # Perhaps in another thread than the caller's.
            with call.streams.on(), call.caller:
                call.allocate(signature)

        yield from all_do(
            self._channel.comm,
            allocate,
            lambda rank, text: PeerError(f"rank {rank} cannot allocate the result of {plan.description.text}: {text}"),
        )


@contextmanager
def _finishing(call: DeviceCall) -> Iterator[None]:
    """Finish a call, and release its place in the queue on any exit."""
    try:
        yield
        with call.streams.on():
            call.streams.finish(call)
    finally:
        call.leave()


# Copies for collectives in host memory --------------------------------------------------------------------------------


BringBack = Callable[[list[Array]], list[Array]]


def on_host(arrays: Sequence[Array]) -> tuple[Sequence[Array], BringBack]:
    """Return copies in host memory, and a function that copies results back to the GPU.

    Blocks until the copies are complete.

    >>> import numpy as np
    >>> arrays, bring_back = on_host([np.ones(2)])
    >>> bring_back([2 * arrays[0]])
    [array([2., 2.])]
    """
    if not which_on_device(arrays):
        return arrays, lambda results: results
    ops = gpu_ops()
    homes = [ops.device_of(array) if is_device_array(array) else None for array in arrays]
    copies = list(arrays)
    for device in {home for home in homes if home is not None}:
        there = [index for index, home in enumerate(homes) if home == device]
        for index, copy in zip(there, ops.all_to_host([arrays[index] for index in there]), strict=True):
            copies[index] = copy

    def bring_back(results: list[Array]) -> list[Array]:
        return [
            result if home is None else ops.from_host(result, home) for home, result in zip(homes, results, strict=True)
        ]

    return copies, bring_back
