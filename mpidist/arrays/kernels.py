"""Launch kernels that pack many arrays into one flat GPU buffer, or unpack it.

Elements are cast and divided on the way. A table in the GPU's memory has the arrays; it is kept, and made anew only for
other arrays.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpidist.arrays.dtypes import Array, DType
from mpidist.arrays.host_ops import Starts, starts_of
from mpidist.arrays.kernel_source import THREADS, Kernel, kernel_for, source_of
from mpidist.arrays.streams import Event, Staging, Stream

if TYPE_CHECKING:
    from cupy import RawKernel, ndarray

# A table has 32 bytes for each array; a program has one for each bucket, direction and set of gradients in turn.
_TABLES_KEPT = 512
_MOST_BLOCKS = 2**31 - 1

# Address, first element in the flat buffer and number of elements of one array.
_Row = tuple[int, int, int]


class _Table(NamedTuple):
    """A table in the memory of a GPU, which is read on one stream only."""

    device: ndarray
    blocks: int
    stream: Stream


class Kernels:
    """Packs and unpacks CuPy arrays. Kernels are compiled when they are first needed; any thread may call.

    Args:
        cupy: The module, which sees a GPU.
    """

    def __init__(self, cupy: ModuleType) -> None:
        self._cupy = cupy
        self._functions: dict[str, RawKernel] = {}
        self._tables: OrderedDict[tuple[int, int, int, int, tuple[_Row, ...]], _Table] = OrderedDict()
        self._dropped: deque[tuple[Event, _Table]] = deque()
        self._staging = Staging(cupy)
        self._lock = threading.Lock()

    def pack(self, sources: Sequence[Array], flat: Array, stream: Stream, starts: Starts = None) -> None:
        """Copy C-contiguous arrays into ``flat``, cast to its dtype.

        They lie from ``starts`` on, or one after the other. One launch on ``stream`` for all arrays of one dtype; the
        caller does not wait for it. The arrays lie on the stream's device, do not overlap ``flat``, and live until the
        launch is done: nothing here keeps them.

        Raises:
            TypeError: There is no kernel for the cast.
            ValueError: An array is not contiguous, or ``flat`` is too small.
        """
        for dtype, rows in _rows_by_dtype(sources, flat, starts).items():
            self._launch(kernel_for(dtype.name, flat.dtype.name, False), rows, flat, True, 1.0, stream)

    def unpack(
        self, flat: Array, targets: Sequence[Array], divisor: float | None, stream: Stream, starts: Starts = None
    ) -> None:
        """Fill C-contiguous arrays from ``flat``; the reverse of ``pack``.

        With a divisor, which is positive, each number is divided by it in the dtype of ``flat``, halves in float32,
        and then cast to the dtype of its target: the bits are those of NumPy's ``true_divide`` and ``astype``.
        A target of the dtype of ``flat`` may be the very part of it that it is filled from.
        """
        for dtype, rows in _rows_by_dtype(targets, flat, starts).items():
            kernel = kernel_for(flat.dtype.name, dtype.name, divisor is not None)
            self._launch(kernel, rows, flat, False, 1.0 if divisor is None else float(divisor), stream)

    def compile(self, source: DType, target: DType, divides: bool) -> None:
        """Compile the kernel of a cast for the current device, before it is needed."""
        kernel = kernel_for(source.name, target.name, divides)
        with self._lock:
            # RawKernel.compile would forget those of all devices.
            self._function(kernel).kernel  # noqa: B018

    def _function(self, kernel: Kernel) -> RawKernel:
        function = self._functions.get(kernel.name)
        if function is None:
            function = self._functions[kernel.name] = self._cupy.RawKernel(source_of(kernel), kernel.name)
        return function

    def _launch(
        self, kernel: Kernel, rows: list[_Row], flat: Array, into_flat: bool, divisor: float, stream: Stream
    ) -> None:
        with stream, self._lock:
            table = self._table(kernel, rows, stream)
            self._function(kernel)(
                (table.blocks,),
                (THREADS,),
                (table.device, np.int32(len(rows)), flat, np.int32(into_flat), np.float64(divisor)),
            )

    def _table(self, kernel: Kernel, rows: list[_Row], stream: Stream) -> _Table:
        # The table holds on to its stream, so that no other stream gets the same handle.
        key = (stream.device, stream.handle, kernel.tile, kernel.parts, tuple(rows))
        table = self._tables.get(key)
        if table is not None:
            self._tables.move_to_end(key)
            return table
        table = self._tables[key] = self._upload(_table_of(rows, kernel), stream)
        while self._dropped and self._dropped[0][0].is_done:
            self._dropped.popleft()
        if len(self._tables) > _TABLES_KEPT:
            _, oldest = self._tables.popitem(last=False)
            self._dropped.append((oldest.stream.record(), oldest))
        return table

    def _upload(self, content: NDArray[np.int64], stream: Stream) -> _Table:
        blocks = int(content[-1, 3])
        if blocks > _MOST_BLOCKS:
            raise ValueError(f"these arrays need {blocks} blocks; expected at most {_MOST_BLOCKS}: use several packs")
        device = self._cupy.empty(content.shape, np.int64)
        staged = self._staging.room(content.nbytes)
        np.copyto(staged.view(np.int64), content.ravel())
        device.data.copy_from_host_async(staged.ctypes.data, content.nbytes)
        self._staging.keep(stream.record(blocks=True), staged)
        return _Table(device, blocks, stream)


def _rows_by_dtype(arrays: Sequence[Array], flat: Array, starts: Starts) -> dict[DType, list[_Row]]:
    rows: dict[DType, list[_Row]] = {}
    last = 0
    for array, start in zip(arrays, starts_of(arrays) if starts is None else starts, strict=True):
        size = array.size
        if size:
            if not array.flags.c_contiguous:
                raise ValueError(
                    f"an array of shape {array.shape} is not C-contiguous; make it so: cupy.ascontiguousarray(array)"
                )
            rows.setdefault(array.dtype, []).append((array.data.ptr, start, size))  # type: ignore[attr-defined]
            last = max(last, start + size)
    if last > flat.size or not flat.flags.c_contiguous:
        raise ValueError(
            f"the flat buffer has {flat.size} elements{'' if flat.flags.c_contiguous else ', not contiguous'}; "
            f"expected at least {last}, contiguous"
        )
    return rows


def _table_of(rows: list[_Row], kernel: Kernel) -> NDArray[np.int64]:
    """Return the table for the arrays.

    It has address, start, elements and first tile of each, and at last the number of tiles.

    >>> _table_of([(4096, 0, 5000), (8192, 5000, 1)], kernel_for("float32", "float16", False))
    array([[4096,    0, 5000,    0],
           [8192, 5000,    1,    2],
           [   0,    0,    0,    3]])
    """
    content = np.zeros((len(rows) + 1, 4), np.int64)
    content[:-1, :3] = rows
    content[:-1, 1:3] *= kernel.parts
    np.cumsum(-(-content[:-1, 2] // kernel.tile), out=content[1:, 3])
    return content
