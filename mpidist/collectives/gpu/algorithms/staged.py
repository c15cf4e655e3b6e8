"""All-reduce of arrays on GPUs by way of host memory.

It works without NCCL, on any device and for any dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.arrays.streams import Event
from mpidist.collectives.gpu.device_call import DeviceReduction, DeviceSite
from mpidist.collectives.gpu.staging import agreed_staging_bytes
from mpidist.collectives.mpi.waiting import Steps, until_event
from mpidist.collectives.node.packing import Pack, PackedReduction
from mpidist.collectives.reduce.registry import GPU_PLACES, AlgorithmEntry, gpu_algorithms, gpu_names

# Chunks that are in host memory at a time: one is copied there while the one before is reduced.
_ROOMS = 2


class Staged:
    """All-reduce in chunks by an algorithm for the host, in page-locked memory.

    Args:
        site: Where it works.
        chunk_bytes: Of a chunk, at most; the same on all ranks.
    """

    def __init__(self, site: DeviceSite, chunk_bytes: int) -> None:
        self._streams = site.streams
        self._choice = site.on_host
        self._pool = site.pool
        self._chunk_bytes = chunk_bytes
        self._given = self._reduced = [np.empty(0, np.uint8)] * _ROOMS

    @classmethod
    def made(cls, site: DeviceSite) -> Steps[Staged]:
        """Return a new one (collective)."""
        chunk_bytes = yield from agreed_staging_bytes(site.comm)
        return cls(site, chunk_bytes)

    def all_reduce(self, job: DeviceReduction) -> Steps[list[Array]]:
        """See ``DeviceAlgorithm``."""
        streams, ops = self._streams, self._streams.ops
        chunks = job.pack.on_host(self._chunk_bytes // job.dtype.itemsize)
        yield from self._make_room(chunks[0].nbytes)
        next_copied = self._copy_to_host(job, chunks, 0)
        for number, chunk in enumerate(chunks):
            copied, room = next_copied, number % _ROOMS
            if number + 1 < len(chunks):
                next_copied = self._copy_to_host(job, chunks, number + 1)
            # The communicator's stream has then been past the last copies from and to this room, too.
            yield from until_event(copied)
            given, reduced = [rooms[room][: chunk.nbytes].view(job.dtype) for rooms in (self._given, self._reduced)]
            yield from self._reduce(job, chunk, given, reduced)
            with streams.on():
                start = number * chunks[0].count
                ops.copy_to_device(job.target[start : start + chunk.count], reduced, streams.stream)
        with streams.on():
            return job.store()

    def _make_room(self, nbytes: int) -> Steps[None]:
        if self._given[0].nbytes < nbytes:
            # The pool would give their memory to others at once.
            yield from until_event(self._streams.stream.record())
            with self._streams.on():
                ops = self._streams.ops
                self._given, self._reduced = [[ops.pinned(nbytes) for _ in range(_ROOMS)] for _ in range(2)]

    def _copy_to_host(self, job: DeviceReduction, chunks: Sequence[Pack], number: int) -> Event:
        streams, chunk, start = self._streams, chunks[number], number * chunks[0].count
        given = self._given[number % _ROOMS][: chunk.nbytes].view(job.dtype)
        with streams.on():
            streams.ops.copy_to_host(given, job.source[start : start + chunk.count], streams.stream)
            return streams.stream.record()

    def _reduce(self, job: DeviceReduction, chunk: Pack, given: Array, reduced: Array) -> Steps[None]:
        options = job.options
        if options.algorithm in gpu_names():
            options = replace(options, algorithm=None)
        host_job = PackedReduction(chunk, [given], [], [reduced], job.op, None, options, self._pool)
        names = self._choice.names_for(chunk.nbytes, options)
        algorithm = self._choice.made(names) or (yield from self._choice.make(names))
        yield from algorithm.all_reduce(host_job)

    def close(self) -> None:
        """Let go of the memory."""
        self._given = self._reduced = [np.empty(0, np.uint8)] * _ROOMS


gpu_algorithms.register(
    AlgorithmEntry("staged", Staged.made, GPU_PLACES, GPU_PLACES, is_ordered=True, rounds=True, instead=())
)
