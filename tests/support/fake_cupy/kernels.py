"""What the kernels of ``mpidist.arrays.kernels`` do, on raw addresses with NumPy.

Everything is read from the launch: the name, the grid, the table and the arguments, so that a wrong one shows.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from mpidist.arrays.dtypes import as_dtype
from mpidist.arrays.kernels import THREADS, TILE
from tests.support.fake_cupy.devices import cuda_error, machine
from tests.support.kernel_values import expected


def run(name: str, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], device: int) -> None:
    """Run one launch on a GPU, which must own all the memory."""
    table, count, divisor = args
    source, target = name.removeprefix("mpidist_").removesuffix("_divided").split("_to_")
    if block != (THREADS,):
        raise ValueError(f"{name} was launched with blocks of {block} threads; expected {THREADS}")
    for argument, kind in zip((count, divisor), (np.int32, np.float64), strict=True):
        if not isinstance(argument, kind):
            raise TypeError(f"{name} was given {argument!r} as a number; expected {kind.__name__}")
    rows = table["rows"][0, : int(count)].tolist()
    ends = [row[3] for row in rows[1:]] + [grid[0]]
    for (read, written, elements, first_tile), end in zip(rows, ends, strict=True):
        moved = min(elements, (min(end, grid[0]) - first_tile) * TILE)
        if moved > 0:
            values, into = _memory(read, moved, source, device), _memory(written, moved, target, device)
            into[...] = expected(values, target, float(divisor) if name.endswith("_divided") else None)


def _memory(address: int, count: int, name: str, device: int) -> np.ndarray[Any, Any]:
    """Return ``count`` elements at any address of a GPU."""
    dtype = as_dtype(name)
    nbytes = count * dtype.itemsize
    owner = machine().regions.device_of(address, nbytes)
    if owner != device:
        whose = "no GPU's memory" if owner is None else f"memory of gpu:{owner}"
        raise cuda_error(700, f"a kernel on gpu:{device} was to use {nbytes} bytes at {address:#x}, {whose}")
    return np.ndarray(count, dtype, (ctypes.c_char * nbytes).from_address(address))
