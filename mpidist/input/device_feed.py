"""Copies of batches to devices, ahead of use. A thread reads batches into page-locked memory.

The memory of a batch on the device is allocated on the caller's stream, when the previous batch is returned. The copy
waits for earlier work on that stream, because CuPy may reuse memory of that work. So a copy overlaps with the work on
the previous batch, and waits for work on earlier ones.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpidist.arrays.device_ops import gpu_ops, is_device_array
from mpidist.arrays.dtypes import Array, is_transportable
from mpidist.arrays.streams import Event, Stream
from mpidist.core import nest
from mpidist.input.input_options import InputOptions, InputWorkers
from mpidist.input.local_batches import MISSING
from mpidist.input.threads import Readers
from mpidist.values.placement import Place, place_at

# Arrays start at multiples of this many bytes in page-locked memory.
_ALIGNMENT = 256


class _Buffer:
    """Page-locked memory for the batch of one replica."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._memory: Array = np.empty(0, np.uint8)
        # When the device has read it. None: the device is not reading it.
        self.copied: Event | None = None

    def wait(self) -> None:
        """Wait until the device has read the memory."""
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None

    def take(self, arrays: Sequence[Array]) -> list[Array]:
        """Return copies of ``arrays`` in this memory."""
        self.wait()
        starts, end = [], 0
        for array in arrays:
            starts.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if end > self._memory.nbytes:
            with self._place.current():
                self._memory = gpu_ops().pinned(end)
        return [self._put(array, start) for array, start in zip(arrays, starts, strict=True)]

    def _put(self, array: Array, start: int) -> Array:
        staged = self._memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(staged, array)
        return staged


class _Staged(NamedTuple):
    """A batch of one replica with its arrays in page-locked memory."""

    batch: object
    indices: list[int]
    arrays: list[Array]
    buffer: _Buffer


class _Transfer:
    """The copies to the device of one replica."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._stream: Stream = gpu_ops().stream(place.number)
        self._free: deque[_Buffer] = deque()
        self.buffers: list[_Buffer] = []

    def stage(self, batch: object) -> object:
        """Copy the arrays of a batch to page-locked memory. Runs in the reading thread."""
        leaves = nest.flatten(batch)
        # Text and objects stay on the host.
        indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, np.ndarray) and is_transportable(leaf.dtype)]
        try:
            buffer = self._free.popleft()
        except IndexError:
            buffer = _Buffer(self.place)
            self.buffers.append(buffer)
        return _Staged(batch, indices, buffer.take([leaves[i] for i in indices]), buffer)

    def send(self, staged: _Staged) -> tuple[object, Event]:
        """Start copying a batch, and return it with the event of its arrival. Runs in the caller's thread."""
        ops, device = gpu_ops(), self.place.number
        leaves = nest.flatten(staged.batch)
        with self.place.current():
            leaves = [self.place.brings(leaf) if is_device_array(leaf) else leaf for leaf in leaves]
            targets = [ops.empty(array.shape, array.dtype, device) for array in staged.arrays]
            self._stream.wait(ops.current_stream(device).record())
            for target, array in zip(targets, staged.arrays, strict=True):
                if array.size:
                    ops.copy_to_device(target, array, self._stream)
            # The reading thread waits for it.
            event = self._stream.record(blocks=True)
        staged.buffer.copied = event
        self._free.append(staged.buffer)
        for index, target in zip(staged.indices, targets, strict=True):
            leaves[index] = target
        return nest.pack_like(staged.batch, leaves), event

    def receive(self, event: Event) -> None:
        """Let the caller's stream wait for a batch."""
        gpu_ops().current_stream(self.place.number).wait(event)


class DeviceFeed(Iterator[list[object]]):
    """The steps of a pass with each batch on the device of its replica. ``size`` steps are kept ready there."""

    def __init__(
        self, open_steps: Callable[[], Iterator[list[object]]], places: Sequence[Place], size: int, readers: Readers
    ) -> None:
        transfers = [None if place.is_host else _Transfer(place) for place in places]
        self._transfers: list[_Transfer | None] = transfers
        self._size = size
        self._source = readers.open(lambda: (_staged(step, transfers) for step in open_steps()), size)
        self._in_flight: deque[list[tuple[object, Event | None]]] = deque()
        self._end: Exception | None = None
        # Memory that a copy reads or writes must not be reused, whenever the pass ends.
        self._finalizer = weakref.finalize(self, _drain, transfers)

    def __next__(self) -> list[object]:
        if not self._in_flight:
            end, self._end = self._end, None  # the source raises StopIteration again in the next call
            try:
                if end is not None:
                    raise end
            finally:
                del end  # its traceback holds this frame
            self._in_flight.append(self._sent(next(self._source)))
        ready = self._in_flight.popleft()
        self._send_ahead()
        step = []
        for transfer, (batch, event) in zip(self._transfers, ready, strict=True):
            if transfer is not None and event is not None:
                transfer.receive(event)
            step.append(batch)
        return step

    def _send_ahead(self) -> None:
        """Start the copies of steps that have been read already, up to ``size`` steps."""
        while len(self._in_flight) < self._size and self._end is None and self._source.has_ready():
            try:
                self._in_flight.append(self._sent(next(self._source)))
            except Exception as error:  # the end, or an error of reading: raised after the steps before it
                self._end = error

    def _sent(self, step: list[object]) -> list[tuple[object, Event | None]]:
        return [
            transfer.send(part) if transfer is not None and isinstance(part, _Staged) else (part, None)
            for transfer, part in zip(self._transfers, step, strict=True)
        ]

    def close(self) -> None:
        """Drop the steps that are kept ready, after their copies."""
        self._finalizer()
        self._in_flight.clear()


def _staged(step: list[object], transfers: Sequence[_Transfer | None]) -> list[object]:
    return [
        batch if transfer is None or batch is MISSING else transfer.stage(batch)
        for transfer, batch in zip(transfers, step, strict=True)
    ]


def _drain(transfers: Sequence[_Transfer | None]) -> None:
    for transfer in transfers:
        for buffer in () if transfer is None else transfer.buffers:
            buffer.wait()


def on_place(place: Place, batch: object) -> object:
    """Return ``batch`` with its arrays on ``place``."""
    return nest.map_structure(
        lambda leaf: place.brings(leaf) if isinstance(leaf, np.ndarray) and is_transportable(leaf.dtype) else leaf,
        batch,
    )


def fetch_places(workers: InputWorkers, options: InputOptions | None) -> list[Place] | None:
    """Return the devices of the local replicas' batches. None: all batches stay on the host."""
    if options is not None and options.experimental_fetch_to_device is False:
        return None
    places = [place_at(device) for device in workers.devices]
    return None if all(place.is_host for place in places) else places
