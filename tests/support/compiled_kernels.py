"""The CUDA source of the kernels, compiled by g++ and run on the CPU, block by block and thread by thread.

``CompiledCupy`` stands where ``Kernels`` expects CuPy; its arrays are memory of the host at any address.
"""

from __future__ import annotations

import ctypes
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mpidist.arrays.kernel_source import INTRINSICS, TEMPLATES, all_kernels, entry, source_of

# What CUDA has and C++ has not; the counterpart of INTRINSICS.
SHIM = r"""
#include <cmath>
#include <cstring>
#define __global__
#define __launch_bounds__(...)
#define DEVICE inline
struct Index { unsigned int x; };
static Index blockIdx, threadIdx;

template <typename T> DEVICE T* in_global_memory(T* pointer) { return pointer; }
DEVICE float bits_to_float(unsigned int bits) { float value; memcpy(&value, &bits, 4); return value; }
DEVICE unsigned int float_to_bits(float value) { unsigned int bits; memcpy(&bits, &value, 4); return bits; }
DEVICE float half_to_float(unsigned short half) {
    unsigned int sign = (unsigned int)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ff;
    if (exponent == 31) return bits_to_float(sign | 0x7f800000u | fraction << 13);
    float value = std::ldexp((float)(exponent ? fraction + 1024 : fraction), (int)(exponent ? exponent : 1) - 25);
    return sign ? -value : value;
}
DEVICE unsigned short float_to_half(float value) {
    unsigned short sign = float_to_bits(value) >> 16 & 0x8000;
    value = std::fabs(value);
    if (value != value) return sign | 0x7e00;
    if (value >= 65520.0f) return sign | 0x7c00;
    if (value < 6.103515625e-05f) return sign | (unsigned short)std::nearbyint(std::ldexp(value, 24));
    int exponent;
    float fraction = std::frexp(value, &exponent);
    return sign | (unsigned short)(((exponent + 13) << 10) + (int)std::nearbyint(std::ldexp(fraction, 11)));
}
DEVICE double float_to_double(float value) { return value; }
DEVICE float double_to_float(double value) { return (float)value; }
DEVICE float divide(float value, float divisor) { return value / divisor; }
DEVICE double divide(double value, double divisor) { return value / divisor; }
DEVICE float multiply(float left, float right) { return left * right; }
DEVICE double multiply(double left, double right) { return left * right; }
DEVICE float add(float left, float right) { return left + right; }
DEVICE double add(double left, double right) { return left + right; }
"""

_RUN = """
extern "C" void run(void (*kernel)(const Array*, int, char*, int, double), long long first, long long blocks,
                    int threads, const Array* arrays, int count, char* flat, int into_flat, double divisor) {
    for (long long block = first; block < first + blocks; ++block)
        for (int thread = 0; thread < threads; ++thread) {
            blockIdx.x = (unsigned int)block;
            threadIdx.x = thread;
            kernel(arrays, count, flat, into_flat, divisor);
        }
}
"""

# A wrong alignment, or anything else that C++ leaves undefined, ends the process.
FLAGS = ["-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-Wno-unknown-pragmas"]
FLAGS += ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]


def build(folder: Path, compiler: str) -> ctypes.CDLL:
    """Compile all kernels with g++ and load them."""
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text(SHIM + TEMPLATES + "".join(entry(kernel) for kernel in all_kernels()) + _RUN)
    done = subprocess.run([compiler, *FLAGS, str(source), "-o", str(library)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{compiler} does not compile the kernels:\n{done.stderr}")
    return ctypes.CDLL(str(library))


class HostArray:
    """Memory of the host that looks like a CuPy array, as far as ``Kernels`` looks.

    Args:
        memory: A 1-d NumPy array, at an address of any alignment.
    """

    def __init__(self, memory: np.ndarray[Any, Any]) -> None:
        self.memory = memory
        self.dtype, self.size, self.shape = memory.dtype, memory.size, memory.shape
        self.nbytes, self.flags = memory.nbytes, memory.flags
        self.data = SimpleNamespace(ptr=memory.ctypes.data, copy_from_host_async=self._copy)

    def _copy(self, address: int, nbytes: int) -> None:
        ctypes.memmove(self.data.ptr, address, nbytes)


class CompiledCupy:
    """What ``Kernels`` uses of CuPy. Counts launches, uploads and pinned memory.

    Args:
        library: What ``build`` returned.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.launched: list[str] = []
        self.uploads = self.pinned = 0
        self.cuda = SimpleNamespace(alloc_pinned_memory=self._pinned)

    def _pinned(self, nbytes: int) -> bytearray:
        self.pinned += 1
        return bytearray(nbytes)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> HostArray:
        # A table is all that is made here.
        self.uploads += 1
        return HostArray(np.full(shape, -1, dtype))

    def RawKernel(self, code: str, name: str) -> Any:  # noqa: N802
        kernel = next(kernel for kernel in all_kernels() if kernel.name == name)
        assert code == source_of(kernel)
        assert code.startswith(INTRINSICS)

        def launch(grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
            self.launched.append(name)
            table, count, flat, into_flat, divisor = args
            self.run(name, 0, grid[0], block[0], table.data.ptr, count, flat.data.ptr, into_flat, divisor)

        return launch

    def run(
        self,
        name: str,
        first: int,
        blocks: int,
        threads: int,
        table: int,
        count: int,
        flat: int,
        into_flat: int,
        divisor: float,
    ) -> None:
        """Run some blocks of a launch."""
        address = ctypes.cast(getattr(self._library, name), ctypes.c_void_p)
        self._library.run(
            address,
            ctypes.c_longlong(first),
            ctypes.c_longlong(blocks),
            ctypes.c_int(threads),
            ctypes.c_void_p(table),
            ctypes.c_int(count),
            ctypes.c_void_p(flat),
            ctypes.c_int(into_flat),
            ctypes.c_double(divisor),
        )


class HostStream(nullcontext[None]):
    """A stream on which everything has happened."""

    device = 0
    handle = 0

    def record(self, *, blocks: bool = False) -> Any:
        return SimpleNamespace(is_done=True, synchronize=lambda: None)
