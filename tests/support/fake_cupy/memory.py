"""Memory of the pretended GPUs and pinned memory: freed memory is handed out again, spoiled.

For tests: ``fail_allocations(...)`` makes the GPUs of this process run out of memory.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any

import numpy as np

from tests.support.fake_cupy.devices import Machine, Worker, check_status, current_device, machine, touch
from tests.support.fake_cupy.pool import Chunk, aligned
from tests.support.fake_cupy.streams import Device, Stream, current_worker, worker_of

# Huge numbers in floating-point dtypes, 127 in int8.
FREED = 0x7F


class _Address:
    """What NumPy reads as memory at an address."""

    def __init__(self, address: int, nbytes: int, owner: Any) -> None:
        self.owner = owner
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def bytes_at(address: int, nbytes: int, owner: Any = None) -> np.ndarray:
    """Return the memory at an address as a NumPy array of uint8."""
    return np.asarray(_Address(address, nbytes, owner)) if nbytes else np.empty(0, np.uint8)


class Memory:
    """``cupy.cuda.Memory``, from the pool: ``buffer`` is what the device holds."""

    def __init__(self, size: int) -> None:
        self.device_id = current_device()
        self.size = size
        worker = current_worker()
        _run_out(worker.machine, size)
        chunk = worker.arena.take(size)
        self.buffer = chunk.memory[:size]
        self.ptr = int(chunk.memory.ctypes.data) if size else 0
        worker.machine.used[self.device_id] += chunk.nbytes
        weakref.finalize(self, _free, worker, chunk).atexit = False

    @property
    def device(self) -> Device:
        return Device(self.device_id)


class UnownedMemory:
    """Memory that another library made and ``owner`` keeps."""

    def __init__(self, buffer: np.ndarray, device_id: int, owner: Any) -> None:
        self.buffer = buffer
        self.device_id = device_id
        self.size = buffer.nbytes
        self.ptr = int(buffer.ctypes.data) if buffer.nbytes else 0
        self.owner = owner
        machine().contexts.need(device_id)
        regions = machine().regions
        regions.add_foreign(id(self), self.ptr, self.size, device_id)
        weakref.finalize(self, regions.drop_foreign, id(self)).atexit = False


def _free(worker: Worker, chunk: Chunk) -> None:
    # At once for the stream that asked for the memory, as in CuPy's pool: other streams may be reading still.
    worker.machine.used[worker.device] -= chunk.nbytes
    if not worker.stopping:
        memory = chunk.memory
        worker.enqueue(lambda: memory.fill(FREED))
        worker.arena.give_back(chunk)


class OutOfMemoryError(MemoryError):
    """``cupy.cuda.memory.OutOfMemoryError``."""

    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes).")


def fail_allocations(count: int = 1, after: int = 0) -> None:
    """Let ``count`` requests for device memory in this process fail, after ``after`` more that do not."""
    machine().failing_allocations = range(after, after + count)


def _run_out(machine: Machine, size: int) -> None:
    if size and machine.failing_allocations:
        failing = machine.failing_allocations
        machine.failing_allocations = range(max(failing.start - 1, 0), failing.stop - 1)
        if failing.start == 0:
            raise OutOfMemoryError(size, machine.used[current_device()])


class MemoryPointer:
    """``cupy.cuda.MemoryPointer``."""

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem = mem
        self.ptr = mem.ptr + offset
        self.device_id = mem.device_id

    @property
    def device(self) -> Device:
        return Device(self.device_id)

    def __int__(self) -> int:
        return int(self.ptr)

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    __radd__ = __add__

    def __sub__(self, offset: int) -> MemoryPointer:
        return self + -offset

    def bytes(self, size: int) -> np.ndarray:
        """Return what lies here; raise where there is less than ``size``."""
        start = self.ptr - self.mem.ptr
        if not 0 <= start <= start + size <= self.mem.size:
            raise RuntimeError(f"illegal access: {size} bytes at {start} of memory of {self.mem.size} bytes")
        view: np.ndarray = self.mem.buffer[start : start + size]
        return view

    def copy_from_device_async(self, src: MemoryPointer, size: int, stream: Any = None) -> None:
        worker = worker_of(stream)
        if size:
            target, source = self.bytes(size), src.bytes(size)
            worker.enqueue(lambda: np.copyto(target, source))

    def copy_from_device(self, src: MemoryPointer, size: int) -> None:
        self.copy_from_device_async(src, size, Stream.null)
        Stream.null.synchronize()

    def copy_from_host_async(self, mem: Any, size: int, stream: Any = None) -> None:
        worker = worker_of(stream)
        if size:
            target, source = self.bytes(size), bytes_at(_number(mem), size)
            if not is_pinned(_number(mem)):  # CUDA has read pageable memory on return
                worker.machine.counts.add("synchronizations")
                worker.drain()
                source = source.copy()
            worker.enqueue(lambda: np.copyto(target, source))

    def copy_to_host_async(self, mem: Any, size: int, stream: Any = None) -> None:
        worker = worker_of(stream)
        if size:
            target, source = bytes_at(_number(mem), size), self.bytes(size)
            worker.enqueue(lambda: np.copyto(target, source))
            if not is_pinned(_number(mem)):
                worker.machine.counts.add("synchronizations")
                worker.drain()

    def memset_async(self, value: int, size: int, stream: Any = None) -> None:
        worker = worker_of(stream)
        if size:
            target = self.bytes(size)
            worker.enqueue(lambda: target.fill(value))


def alloc(size: int) -> MemoryPointer:
    """``cupy.cuda.alloc``."""
    return MemoryPointer(Memory(size), 0)


def _number(mem: Any) -> int:
    return mem if isinstance(mem, int) else int(mem.value)


class PinnedMemoryPool:
    """``cupy.cuda.PinnedMemoryPool``: sizes are powers of two; what dies comes back at once, whoever still reads it."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}
        self._blocks: list[np.ndarray] = []
        self._lock = threading.Lock()

    def malloc(self, size: int) -> Any:
        rounded = 1 << (max(size, 512) - 1).bit_length()
        with self._lock:
            free = self._free.setdefault(rounded, [])
            if free:
                block = free.pop()
            else:
                touch()
                check_status(machine().captures.try_unsafe())
                machine().counts.add("pinned_allocations")
                block = aligned(rounded)
                self._blocks.append(block)
        pointer_type = type("PinnedMemoryPointer", (ctypes.c_int8 * rounded,), {"size": lambda self: rounded})
        pointer = pointer_type.from_buffer(block)
        pointer.ptr = int(block.ctypes.data)
        pointer.mem = block
        weakref.finalize(pointer, self._take_back, free, block).atexit = False
        return pointer

    def n_free_blocks(self) -> int:
        return sum(len(blocks) for blocks in self._free.values())

    def free_all_blocks(self) -> None:
        """Keep the blocks: work that still reads them shall meet spoiled memory, not none."""

    def holds(self, address: int) -> bool:
        return any(block.ctypes.data <= address < block.ctypes.data + block.nbytes for block in self._blocks)

    @staticmethod
    def _take_back(free: list[np.ndarray], block: np.ndarray) -> None:
        block.fill(FREED)
        free.append(block)


def alloc_pinned_memory(size: int) -> Any:
    """``cupy.cuda.alloc_pinned_memory``; readable through the buffer protocol."""
    return machine().pinned.malloc(size)


def is_pinned(address: int) -> bool:
    """Whether an address lies in pinned memory."""
    return machine().pinned.holds(address)


def empty_pinned(shape: Any, dtype: Any = float, order: str = "C") -> np.ndarray:
    """``cupyx.empty_pinned``."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return np.ndarray(shape, dtype=dtype, buffer=alloc_pinned_memory(nbytes), order=order)  # type: ignore[call-overload]


def zeros_pinned(shape: Any, dtype: Any = float, order: str = "C") -> np.ndarray:
    """``cupyx.zeros_pinned``."""
    array = empty_pinned(shape, dtype, order)
    array.fill(0)
    return array
