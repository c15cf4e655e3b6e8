"""Cast many GPU arrays with one kernel, and divide them on the way.

The table of addresses is a kernel parameter, so a launch needs no memory and no copy. CUDA allows 4 KiB of parameters,
so a launch serves up to ``ROWS`` arrays. The source includes no header, so CuPy compiles it without a CUDA toolkit.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from mpidist.arrays.dtypes import Array, DType
from mpidist.arrays.streams import Stream

if TYPE_CHECKING:
    from cupy import RawKernel

# Each block handles a tile of one array. Each thread loads PIECES elements before it stores them, to hide latency.
ROWS, THREADS, PIECES = 120, 256, 8
TILE = THREADS * PIECES
# CuPy passes an array of one structured element by value.
TABLE = np.dtype({"names": ["rows"], "formats": [(np.int64, (ROWS, 4))]})

# In assembler, because CuPy compiles with -ftz=true, which flushes denormal numbers to zero.
INTRINSICS = """
#define DEVICE __device__ __forceinline__
DEVICE float float_of(unsigned int bits) { return __uint_as_float(bits); }
DEVICE unsigned int bits_of(float value) { return __float_as_uint(value); }
DEVICE float half_to_float(unsigned short h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
DEVICE unsigned short float_to_half(float f) {
    unsigned short h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
DEVICE float divide(float a, float b) { float q; asm("div.rn.f32 %0, %1, %2;" : "=f"(q) : "f"(a), "f"(b)); return q; }
DEVICE double divide(double a, double b) { return a / b; }
DEVICE float fused(float a, float b, float c) {
    float sum;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(a), "f"(b), "f"(c));
    return sum;
}
DEVICE double fused(double a, double b, double c) { return a * b + c; }
"""
TEMPLATES = """
typedef signed char int8;     typedef unsigned char uint8;
typedef short int16;          typedef unsigned short uint16;
typedef int int32;            typedef unsigned int uint32;
typedef long long int64;      typedef unsigned long long uint64;
typedef float float32;        typedef double float64;
struct float16 { uint16 bits; };
struct bfloat16 { uint16 bits; };
template <typename T> struct Complex { T real, imag; };
typedef Complex<float> complex64;
typedef Complex<double> complex128;
struct Table { struct { uint64 source, target; int64 count, first_tile; } rows[%(ROWS)d]; };

// 16-bit floats are divided and cast as float.
template <typename T> DEVICE T number(T value) { return value; }
DEVICE float number(float16 value) { return half_to_float(value.bits); }
DEVICE float number(bfloat16 value) { return float_of((uint32)value.bits << 16); }

template <typename T> DEVICE T quotient(T value, double by) { return divide(value, (T)by); }
// Smith's method, as in NumPy, for a real divisor.
template <typename T> DEVICE Complex<T> quotient(Complex<T> value, double by) {
    T scale = divide((T)1, (T)by), minus_zero = (T)-0.0;
    return Complex<T>{fused(fused(value.imag, (T)0, value.real), scale, minus_zero),
                      fused(fused(value.real, minus_zero, value.imag), scale, minus_zero)};
}

template <typename T, typename From> DEVICE void put(T& target, From value) { target = (T)value; }
DEVICE void put(float16& target, float value) { target.bits = float_to_half(value); }
DEVICE void put(bfloat16& target, float value) {
    uint32 bits = bits_of(value), to_even = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    target.bits = (uint16)((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16 & 0x8000u) | 0x7fc0u : to_even);
}
""" % {"ROWS": ROWS}  # noqa: UP031  # the source has braces
_ENTRY = """
extern "C" __global__ void __launch_bounds__({threads}) {name}(const Table table, int rows, double by) {{
    int row = 0;
    for (int end = rows; end - row > 1;) {{
        int middle = (row + end) / 2;
        if (table.rows[middle].first_tile <= (int64)blockIdx.x) row = middle;
        else end = middle;
    }}
    const {source}* source = reinterpret_cast<const {source}*>(table.rows[row].source);
    {target}* target = reinterpret_cast<{target}*>(table.rows[row].target);
    int64 count = table.rows[row].count;
    int64 first = (blockIdx.x - table.rows[row].first_tile) * {tile} + threadIdx.x;
    {source} value[{pieces}];
    #pragma unroll
    for (int k = 0; k < {pieces}; ++k)
        if (first + k * {threads} < count) value[k] = source[first + k * {threads}];
    #pragma unroll
    for (int k = 0; k < {pieces}; ++k)
        if (first + k * {threads} < count) put(target[first + k * {threads}], {number});
}}
"""


def kernel_name(source: DType, target: DType, divides: bool) -> str:
    """Return the name of the kernel for a cast.

    >>> kernel_name(np.dtype("float32"), np.dtype("float16"), True), kernel_name(np.dtype("?"), np.dtype("?"), False)
    ('mpidist_float32_to_float16_divided', 'mpidist_uint8_to_uint8')
    """
    if source == target and not divides:
        # Copied by size.
        word = "complex128" if source.itemsize == 16 else f"uint{8 * source.itemsize}"
        return f"mpidist_{word}_to_{word}"
    return f"mpidist_{source.name}_to_{target.name}{'_divided' if divides else ''}"


def entry_of(name: str) -> str:
    """Return the source of one kernel, which follows ``INTRINSICS`` and ``TEMPLATES``."""
    source, target = name.removeprefix("mpidist_").removesuffix("_divided").split("_to_")
    number = "quotient(number(value[k]), by)" if name.endswith("_divided") else "number(value[k])"
    sizes = {"threads": THREADS, "pieces": PIECES, "tile": TILE}
    return _ENTRY.format(name=name, source=source, target=target, number=number, **sizes)


class CastKernels:
    """Cast CuPy arrays, and compile the kernels for it on first use (thread-safe)."""

    def __init__(self, cupy: ModuleType) -> None:
        self._cupy = cupy
        self._kernels: dict[str, RawKernel] = {}

    def cast(
        self, sources: Sequence[Array], targets: Sequence[Array], stream: Stream, divisor: float | None = None
    ) -> None:
        """Divide contiguous arrays of one dtype by ``divisor``, and cast them into ``targets``.

        The targets are contiguous, of one dtype. One may be its own source. 16-bit floats are divided in float32, to
        round only once.
        """
        pairs = [(source, target) for source, target in zip(sources, targets, strict=True) if source.size]
        if not pairs:
            return
        kernel = self._kernel(kernel_name(pairs[0][0].dtype, pairs[0][1].dtype, divisor is not None))
        with stream:
            for start in range(0, len(pairs), ROWS):
                some = pairs[start : start + ROWS]
                table = np.zeros((ROWS, 4), np.int64)
                table[: len(some), :3] = [(a.data.ptr, b.data.ptr, a.size) for a, b in some]  # type: ignore[attr-defined]
                tiles = -(-table[:, 2] // TILE)
                table[1:, 3] = np.cumsum(tiles[:-1])
                arguments = (table.reshape(-1).view(TABLE), np.int32(len(some)), np.float64(divisor or 1))
                kernel((int(tiles.sum()),), (THREADS,), arguments)

    def compile(self, source: DType, target: DType, divides: bool) -> None:
        """Compile the kernel of a cast for the current device, before it is needed."""
        # RawKernel.compile() would forget the kernels of all devices.
        self._kernel(kernel_name(source, target, divides)).kernel  # noqa: B018

    def _kernel(self, name: str) -> RawKernel:
        kernel = self._kernels.get(name)
        if kernel is None:
            kernel = self._kernels[name] = self._cupy.RawKernel(INTRINSICS + TEMPLATES + entry_of(name), name)
        return kernel
