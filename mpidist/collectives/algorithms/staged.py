"""All-reduce of arrays on GPUs by way of host memory: what works without NCCL, on any device and for any dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.collectives.algorithms import DEVICE_NAMES
from mpidist.collectives.device_packing import DeviceReduction
from mpidist.collectives.lane import Lane
from mpidist.collectives.memory import Pool
from mpidist.collectives.node import Node
from mpidist.collectives.packing import Reduction
from mpidist.collectives.waiting import Steps, until_event

if TYPE_CHECKING:
    from mpidist.collectives.choice import Choice


class Staged:
    """The pack is copied to page-locked memory, reduced there by an algorithm for the host, and copied back.

    Args:
        node: The node of this rank.
        lane: Where the arrays are.
        choice: Of algorithms for the host.
        pool: Memory for them.
    """

    name = "staged"

    def __init__(self, node: Node, lane: Lane, choice: Choice, pool: Pool) -> None:
        self._node = node
        self._lane = lane
        self._choice = choice
        self._pool = pool
        self._rooms = [np.empty(0, np.uint8)] * 2

    def all_reduce(self, job: DeviceReduction) -> Steps[list[Array]]:
        """See ``DeviceAlgorithm``."""
        lane, ops = self._lane, self._lane.ops
        if self._rooms[0].nbytes < job.nbytes:
            # The pool would give their memory to others at once.
            yield from until_event(lane.stream.record())
            with lane.on():
                self._rooms = [ops.pinned(job.nbytes) for _ in range(2)]
        # Used in order: the lane's stream has been past the last copy from them when it comes to the next one to them.
        given, reduced = [room[: job.nbytes].view(job.dtype) for room in self._rooms]
        with lane.on():
            ops.copy_to_host(given, job.source[: job.count], lane.stream)
            copied = lane.stream.record()
        yield from until_event(copied)
        options = job.options
        if options.algorithm in DEVICE_NAMES:
            options = replace(options, algorithm=None)
        host_job = Reduction(job.pack.on_host, [given], [reduced], job.op, None, options, self._pool)
        algorithm = self._choice.made(job.nbytes, options)
        if algorithm is None:
            algorithm = yield from self._choice.make(job.nbytes, options)
        algorithm.prepare(host_job, may_share=False)
        yield from self._node.board.meet()
        yield from algorithm.all_reduce(host_job)
        with lane.on():
            ops.copy_to_device(job.target[: job.count], reduced, lane.stream)
            return job.store()

    def close(self) -> None:
        """Let go of the memory."""
        self._rooms = [np.empty(0, np.uint8)] * 2
