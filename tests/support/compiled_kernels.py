"""The CUDA source of the kernels, compiled by g++ and run on the CPU, block by block and thread by thread.

``CompiledCupy`` replaces CuPy for ``CastKernels``. Its arrays are host memory at any address.
"""

from __future__ import annotations

import ctypes
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mpidist.arrays.kernels import INTRINSICS, TEMPLATES, entry_of
from tests.support.kernel_values import KERNELS

# What CUDA has and C++ lacks: the counterpart of INTRINSICS.
SHIM = r"""
#include <cmath>
#include <cstring>
#define __global__
#define __launch_bounds__(...)
#define DEVICE inline
struct Index { unsigned int x; };
static Index blockIdx, threadIdx;

DEVICE float float_of(unsigned int bits) { float value; memcpy(&value, &bits, 4); return value; }
DEVICE unsigned int bits_of(float value) { unsigned int bits; memcpy(&bits, &value, 4); return bits; }
DEVICE float half_to_float(unsigned short half) {
    unsigned int sign = (unsigned int)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ff;
    if (exponent == 31) return float_of(sign | 0x7f800000u | fraction << 13);
    float value = std::ldexp((float)(exponent ? fraction + 1024 : fraction), (int)(exponent ? exponent : 1) - 25);
    return sign ? -value : value;
}
DEVICE unsigned short float_to_half(float value) {
    unsigned short sign = bits_of(value) >> 16 & 0x8000;
    value = std::fabs(value);
    if (value != value) return sign | 0x7e00;
    if (value >= 65520.0f) return sign | 0x7c00;
    if (value < 6.103515625e-05f) return sign | (unsigned short)std::nearbyint(std::ldexp(value, 24));
    int exponent;
    float fraction = std::frexp(value, &exponent);
    return sign | (unsigned short)(((exponent + 13) << 10) + (int)std::nearbyint(std::ldexp(fraction, 11)));
}
DEVICE float divide(float value, float divisor) { return value / divisor; }
DEVICE double divide(double value, double divisor) { return value / divisor; }
DEVICE float fused(float a, float b, float c) { return std::fma(a, b, c); }
DEVICE double fused(double a, double b, double c) { return std::fma(a, b, c); }
"""

_RUN = """
extern "C" void run(void (*kernel)(const Table, int, double), long long first, long long blocks, int threads,
                    const Table* table, int rows, double by) {
    for (long long block = first; block < first + blocks; ++block)
        for (int thread = 0; thread < threads; ++thread) {
            blockIdx.x = (unsigned int)block;
            threadIdx.x = thread;
            kernel(*table, rows, by);
        }
}
"""

# A wrong alignment, or anything else that C++ leaves undefined, ends the process.
FLAGS = ["-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-Wno-unknown-pragmas"]
FLAGS += ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]


def build(folder: Path, compiler: str) -> ctypes.CDLL:
    """Compile all kernels with g++ and load them."""
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text(SHIM + TEMPLATES + "".join(map(entry_of, KERNELS)) + _RUN)
    done = subprocess.run([compiler, *FLAGS, str(source), "-o", str(library)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{compiler} does not compile the kernels:\n{done.stderr}")
    return ctypes.CDLL(str(library))


class HostArray:
    """Host memory that looks like a CuPy array.

    Args:
        memory: A 1-d NumPy array, at an address of any alignment.
    """

    def __init__(self, memory: np.ndarray[Any, Any]) -> None:
        self.memory = memory
        self.dtype, self.size, self.shape, self.flags = memory.dtype, memory.size, memory.shape, memory.flags
        self.data = SimpleNamespace(ptr=memory.ctypes.data)


class CompiledCupy:
    """What ``CastKernels`` uses of CuPy. Records launches.

    Args:
        library: Result of ``build``.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.launched: list[str] = []

    def RawKernel(self, code: str, name: str) -> Any:  # noqa: N802
        assert code == INTRINSICS + TEMPLATES + entry_of(name)

        def launch(grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
            self.launched.append(name)
            self.run(name, 0, grid[0], block[0], *args)

        return launch

    def run(self, name: str, first: int, blocks: int, threads: int, table: Any, rows: int, divisor: float) -> None:
        """Run some blocks of a launch."""
        self._library.run(
            ctypes.cast(getattr(self._library, name), ctypes.c_void_p),
            ctypes.c_longlong(first),
            ctypes.c_longlong(blocks),
            ctypes.c_int(threads),
            ctypes.c_void_p(table.ctypes.data),
            ctypes.c_int(rows),
            ctypes.c_double(divisor),
        )


class HostStream(nullcontext[None]):
    """A stream on which everything has happened."""
