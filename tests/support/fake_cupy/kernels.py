"""What the kernels of ``mpidist.arrays.kernel_source`` do, on raw addresses with NumPy.

Everything is read from the launch: the grid, the table and the arguments, so that a wrong one shows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mpidist.arrays.dtypes import as_dtype
from mpidist.arrays.kernel_source import THREADS, Kernel, all_kernels
from tests.support.fake_cupy.devices import cuda_error, machine


def _address(argument: Any) -> int:
    return int(argument.data.ptr) if hasattr(argument, "data") and hasattr(argument.data, "ptr") else int(argument)


def _dtype(name: str) -> np.dtype[Any]:
    return as_dtype(name)


def _memory(address: int, count: int, dtype: np.dtype[Any], device: int) -> np.ndarray[Any, Any]:
    """Return ``count`` elements at any address of a GPU, also one that is not a multiple of their size."""
    nbytes = count * dtype.itemsize
    owner = machine().regions.device_of(address, nbytes)
    if owner != device:
        whose = "no GPU's memory" if owner is None else f"memory of gpu:{owner}"
        raise cuda_error(700, f"a kernel on gpu:{device} was to use {nbytes} bytes at {address:#x}, {whose}")
    return np.ndarray(count, dtype, (ctypes.c_char * nbytes).from_address(address))


def _move(values: np.ndarray[Any, Any], kernel: Kernel, divisor: float) -> np.ndarray[Any, Any]:
    target = _dtype(kernel.target)
    if kernel.divides:
        if kernel.source in ("float16", "bfloat16"):
            values = values.astype(np.float32)
        values = np.true_divide(values, values.dtype.type(divisor))
    elif kernel.source in ("float16", "bfloat16"):
        values = values.astype(np.float32)
    return values.astype(target)


def _run(kernel: Kernel, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], device: int) -> None:
    """Run one launch.

    Args:
        kernel: The kernel.
        grid: Blocks; one for each tile.
        block: Threads of a block.
        args: The table, its number of rows, the flat buffer, whether it is written to, the divisor.
        device: The GPU of the launch, which has to own all the memory.
    """
    table, count, flat, into_flat, divisor = args
    if tuple(block) + (1, 1)[: 3 - len(block)] != (THREADS, 1, 1):
        raise ValueError(f"{kernel.name} was launched with blocks of {block} threads; expected {THREADS}")
    for argument, kind in zip((count, into_flat, divisor), (np.int32, np.int32, np.float64), strict=True):
        if not isinstance(argument, kind):
            raise TypeError(f"{kernel.name} was given {argument!r} as a number; expected {kind.__name__}")
    rows = _memory(_address(table), 4 * int(count), np.dtype(np.int64), device).reshape(-1, 4).tolist()
    source, target, start_of_flat = _dtype(kernel.source), _dtype(kernel.target), _address(flat)
    ends = [row[3] for row in rows[1:]] + [grid[0]]
    for (address, start, elements, first_tile), end in zip(rows, ends, strict=True):
        moved = min(elements, (min(end, grid[0]) - first_tile) * kernel.tile)
        if moved <= 0:
            continue
        in_flat = start_of_flat + start * (target if into_flat else source).itemsize
        read, written = (address, in_flat) if into_flat else (in_flat, address)
        with np.errstate(all="ignore"):
            values = _memory(read, moved, source, device)
            _memory(written, moved, target, device)[...] = _move(values, kernel, float(divisor))


EMULATIONS: dict[str, Callable[[tuple[int, ...], tuple[int, ...], tuple[Any, ...], int], None]] = {
    kernel.name: partial(_run, kernel) for kernel in all_kernels()
}
