"""The operations that mpidist needs on arrays, on the CPU and on a GPU.

Every other room works with arrays of either kind through ``DeviceOps`` and never imports CuPy. Asynchronous operations
take a stream; the others happen on the current stream of the array's device.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from mpidist.arrays.dtypes import Array, DType
from mpidist.arrays.host_ops import DeviceOps as DeviceOps
from mpidist.arrays.host_ops import check_copy
from mpidist.arrays.kernels import Kernels
from mpidist.arrays.streams import MOST_STAGED_BYTES, CurrentDevice, Event, Stream, require_cupy
from mpidist.core.errors import DeviceError

if TYPE_CHECKING:
    import cupy


# Arrays go to a GPU and back through pinned memory, in pieces of so many bytes.
_PIECE_BYTES = 4 << 20
# cudaStreamPerThread.
_PER_THREAD = 2
# The priority of what others wait for. CUDA takes the highest that the device has, which CuPy does not tell.
_URGENT = -100
# cudaErrorNotReady, which CuPy has no name for.
_NOT_READY = 600
# What CUDA says in place of an answer while a graph is recorded: cudaErrorStreamCaptureUnsupported and -Invalidated,
# cudaErrorCapturedEvent; and, of the default stream, cudaErrorStreamCaptureImplicit.
_NOT_KNOWN, _CAPTURE_IMPLICIT = (900, 901, 907), 906


class CupyEvent(Event):
    """A CUDA event that has been recorded."""

    def __init__(self, stream: CupyStream, raw: cupy.cuda.Event) -> None:
        self._runtime = stream.cupy.cuda.runtime
        self._on_device = stream.on_device
        self.raw = raw

    @property
    def is_done(self) -> bool:
        """Whether everything before it has happened.

        False, too, while a CUDA graph is recorded and CUDA does not tell.

        Raises:
            CUDARuntimeError: The device has failed, as after an illegal access of a kernel: it never will.
        """
        # Event.done would be False for ever after such an error.
        with self._on_device():
            status = int(self._runtime.eventQuery(self.raw.ptr))
        if status == _NOT_READY or status in _NOT_KNOWN:
            return False
        if status:
            raise self._runtime.CUDARuntimeError(status)
        return True

    def synchronize(self) -> None:
        """Block until everything before it has happened; other Python threads run meanwhile."""
        with self._on_device():
            self.raw.synchronize()


class CupyStream(Stream):
    """A CUDA stream with its device, for any thread; CuPy's default stream knows none."""

    raw: cupy.cuda.Stream

    def __init__(self, cupy: ModuleType, current: CurrentDevice, device: int, raw: cupy.cuda.Stream) -> None:
        self.cupy = cupy
        self.device = device
        self._current = current
        self.raw = raw
        self._entered = threading.local()

    def on_device(self) -> AbstractContextManager[None]:
        """Return a block in which its device is current."""
        return self._current.on(self.device)

    @property
    def handle(self) -> int:
        """The cudaStream_t as a number."""
        return int(self.raw.ptr)

    @property
    def is_capturing(self) -> bool:
        """Whether the stream records its work as a CUDA graph, or would spoil one."""
        runtime = self.cupy.cuda.runtime
        with self.on_device():
            try:
                return bool(runtime.streamIsCapturing(self.raw.ptr))
            except runtime.CUDARuntimeError as error:
                if error.status == _CAPTURE_IMPLICIT:
                    return True
                raise

    def record(self, *, blocks: bool = False) -> CupyEvent:
        """Return a new event after all work given so far.

        A thread sleeps while it waits for an event that ``blocks``.
        """
        # An event belongs to the device that is current when it is made, and must be that of its stream.
        with self.on_device():
            event = self.cupy.cuda.Event(block=blocks, disable_timing=True)
            event.record(self.raw)
        return CupyEvent(self, event)

    def wait(self, event: Event) -> None:
        """Let later work wait for ``event``; wait here for one of the CPU."""
        if isinstance(event, CupyEvent):
            with self.on_device():
                self.raw.wait_event(event.raw)
        else:
            event.synchronize()

    def synchronize(self) -> None:
        """Block until everything has happened."""
        with self.on_device():
            self.raw.synchronize()

    def __enter__(self) -> CupyStream:
        # CuPy refuses a stream whose device is not current.
        device = self._current.enter(self.device)
        before = self.cupy.cuda.get_current_stream()
        try:
            self.raw.use()
        except BaseException:
            self._current.leave(device)
            raise
        self._entered.__dict__.setdefault("stack", []).append((device, before))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        device, before = self._entered.stack.pop()
        # Leaving CuPy's own block would return to the block around it, and undo a use() of the program's.
        before.use()
        self._current.leave(device)


class CupyOps(Kernels, DeviceOps):
    """Operations on CuPy arrays; those that pack and unpack are kernels.

    Args:
        cupy: The module, which sees a GPU.
    """

    kind = "gpu"

    def __init__(self, cupy: ModuleType) -> None:
        super().__init__(cupy)
        self._current = CurrentDevice(cupy)
        # By device and number.
        self._of_others: dict[tuple[int, int], CupyStream] = {}

    def device_of(self, array: Array) -> int:
        """Return the number of the GPU on which ``array`` lies."""
        return int(array.data.device_id)  # type: ignore[attr-defined]

    def on(self, device: int) -> AbstractContextManager[None]:
        """Return a block in which ``device`` is current in this thread; see ``CurrentDevice``."""
        return self._current.on(device)

    def empty(self, shape: tuple[int, ...], dtype: DType, device: int) -> Array:
        """Return an array with any content."""
        with self.on(device):
            array: Array = self._cupy.empty(shape, dtype)
        return array

    def zeros(self, shape: tuple[int, ...], dtype: DType, device: int) -> Array:
        """Return an array of zeros."""
        with self.on(device):
            array: Array = self._cupy.zeros(shape, dtype)
        return array

    def from_host(self, array: Array, device: int) -> Array:
        """Return a copy of a NumPy array, C-contiguous; ``array`` may be changed on return."""
        # cupy.asarray would not do: it reads pinned memory later, while the caller writes there again.
        target = self.empty(array.shape, array.dtype, device)
        source, flat = np.ascontiguousarray(array).reshape(-1), target.reshape(-1)
        stream, per_piece = self.current_stream(device), max(1, _PIECE_BYTES // array.itemsize)
        with self.on(device):
            for start in range(0, source.size, per_piece):
                piece = source[start : start + per_piece]
                staged = self._staging.room(piece.nbytes)
                np.copyto(staged.view(array.dtype), piece)
                self.copy_to_device(flat[start : start + per_piece], staged, stream)
                self._staging.keep(stream.record(blocks=True), staged)
        return target

    def to_host(self, array: Array) -> Array:
        """Return a copy as a NumPy array; waits for it."""
        (copy,) = self.all_to_host([array])
        return copy

    def all_to_host(self, arrays: Sequence[Array]) -> list[Array]:
        """Return copies of arrays of one device as NumPy arrays; waits for all."""
        targets = [np.empty(array.shape, array.dtype) for array in arrays]
        if not arrays:
            return targets
        # What is on its way: when it is there, where it is then, and where it goes. In pageable memory it were slower.
        arriving: deque[tuple[CupyEvent, Array, Array]] = deque()
        on_its_way = 0
        device = self.device_of(arrays[0])
        with self.on(device):
            stream = self.current_stream(device)
            for array, target in zip(arrays, targets, strict=True):
                source, flat = self._cupy.ascontiguousarray(array).reshape(-1), target.reshape(-1)
                per_piece = max(1, _PIECE_BYTES // array.itemsize)
                for start in range(0, flat.size, per_piece):
                    piece = source[start : start + per_piece]
                    while on_its_way + piece.nbytes > MOST_STAGED_BYTES // 2:
                        on_its_way -= _arrive(arriving.popleft())
                    staged = self._staging.room(piece.nbytes)
                    self.copy_to_host(staged, piece, stream)
                    event = stream.record()
                    self._staging.keep(event, staged)
                    arriving.append((event, staged.view(array.dtype), flat[start : start + per_piece]))
                    on_its_way += piece.nbytes
            while arriving:
                _arrive(arriving.popleft())
        return targets

    def copy(self, array: Array, device: int | None = None) -> Array:
        """Return a C-contiguous copy on ``device``, or on the device where ``array`` is."""
        source = self.device_of(array)
        if device is None or device == source:
            with self.on(source):
                same: Array = array.copy()
            return same
        # CuPy orders a copy between devices on the target's stream only.
        with self.on(source):
            contiguous = self._cupy.ascontiguousarray(array)
        there, here = self.current_stream(source), self.current_stream(device)
        here.wait(there.record())
        target = self.empty(array.shape, array.dtype, device)
        with self.on(device):
            target.data.copy_from_device_async(contiguous.data, contiguous.nbytes, here.raw)  # type: ignore[attr-defined]
        there.wait(here.record())
        return target

    def pointer(self, array: Array) -> int:
        """Return the address of the first element in the memory of its GPU."""
        return int(array.data.ptr)  # type: ignore[attr-defined]

    def pinned(self, nbytes: int) -> Array:
        """Return page-locked host memory as an array of uint8."""
        return self._staging.pinned(nbytes)

    def stream(self, device: int, *, is_urgent: bool = False) -> CupyStream:
        """Return a new stream that waits for no other; an urgent one comes first."""
        priority = _URGENT if is_urgent else None
        with self.on(device):
            raw = self._cupy.cuda.Stream(non_blocking=True, priority=priority)
            return CupyStream(self._cupy, self._current, device, raw)

    def current_stream(self, device: int) -> CupyStream:
        """Return the stream that is current on ``device`` in this thread.

        Raises:
            DeviceError: It is the default stream of each thread, whose number means another one in other threads.
        """
        raw = self._cupy.cuda.get_current_stream(device)
        if raw.ptr == _PER_THREAD:
            raise DeviceError(
                f"the current stream of gpu:{device} is CUDA's per-thread default stream, which is another one in each "
                "thread, mpidist's among them; expected one for all threads. Type: unset "
                "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM; for a stream of the program's own make one current: "
                "cupy.cuda.Stream(non_blocking=True).use()"
            )
        return CupyStream(self._cupy, self._current, device, raw)

    def stream_of_others(self, device: int, handle: int) -> CupyStream:
        """Return a stream that another library has made and keeps, by its number."""
        if (device, handle) not in self._of_others:
            with warnings.catch_warnings():
                # Deprecated for Stream.from_external, which destroys the stream when it is let go.
                warnings.simplefilter("ignore", DeprecationWarning)
                raw = self._cupy.cuda.ExternalStream(handle, device)
            self._of_others[device, handle] = CupyStream(self._cupy, self._current, device, raw)
        return self._of_others[device, handle]

    def copy_to_host(self, target: Array, source: Array, stream: Stream) -> None:
        """Copy ``source`` into ``target``, a NumPy array over pinned memory; return before it is done."""
        check_copy(target, source)
        with self.on(self.device_of(source)):
            source.data.copy_to_host_async(target.ctypes.data, source.nbytes, stream.raw)  # type: ignore[attr-defined]

    def copy_to_device(self, target: Array, source: Array, stream: Stream) -> None:
        """Copy ``source``, a NumPy array over pinned memory; return before it is done."""
        check_copy(target, source)
        with self.on(self.device_of(target)):
            target.data.copy_from_host_async(source.ctypes.data, source.nbytes, stream.raw)  # type: ignore[attr-defined]

    def blank(self, array: Array, stream: Stream) -> None:
        """Make all elements of a contiguous array 0; return before it is done."""
        with self.on(self.device_of(array)):
            array.data.memset_async(0, array.nbytes, stream.raw)  # type: ignore[attr-defined]


def _arrive(copy: tuple[CupyEvent, Array, Array]) -> int:
    """Finish a copy to the host, and return its bytes."""
    event, staged, target = copy
    event.synchronize()
    np.copyto(target, staged)
    return staged.nbytes


_HOST = DeviceOps()


def is_device_array(value: object) -> TypeGuard[Array]:
    """Return whether ``value`` is an array on a GPU. Imports nothing: where nobody has imported CuPy there is none.

    >>> is_device_array(np.zeros(3))
    False
    """
    if type(value) is np.ndarray:
        return False
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, getattr(cupy, "ndarray", ()))


def ops_of(array: Array) -> DeviceOps:
    """Return the operations for ``array``, a NumPy or CuPy array."""
    return _gpu_ops() if is_device_array(array) else _HOST


def ops_for(kind: str) -> DeviceOps:
    """Return the operations for ``"cpu"`` or ``"gpu"``.

    Raises:
        DeviceError: There is no GPU that this process can use; the text says why.
    """
    if kind == "cpu":
        return _HOST
    if kind == "gpu":
        return _gpu_ops()
    raise ValueError(f"there is no kind of device {kind!r}; expected 'cpu' or 'gpu'")


def device_name(array: Array) -> str:
    """Return where ``array`` lies: ``"cpu"``, or ``"gpu:0"`` and so on.

    >>> device_name(np.zeros(3))
    'cpu'
    """
    return f"gpu:{_gpu_ops().device_of(array)}" if is_device_array(array) else "cpu"


@cache
def _gpu_ops() -> DeviceOps:
    cupy = require_cupy()
    from mpidist.arrays.device_ops import CupyOps

    return CupyOps(cupy)
