"""The CUDA source of the kernels that pack and unpack flat buffers.

The source includes no header, so that CuPy compiles it where no CUDA toolkit is installed, and is plain C++ but for
``INTRINSICS``.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

# A block moves one tile of one array: each of its threads this many pieces of at most 16 bytes.
THREADS = 256
PIECES = 4
PIECE_BYTES = 16
# Blocks that must fit on one multiprocessor: enough to hide the memory's latency, and no register spills.
_BLOCKS = 3

_SIGNED = ("int8", "int16", "int32", "int64")
_UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
_INTEGERS = _SIGNED + _UNSIGNED
_HALVES = ("float16", "bfloat16")
# What a float may become; halves are divided in float32.
_FLOAT_CASTS = {
    "float16": ("float32", "float64"),
    "bfloat16": ("float32", "float64"),
    "float32": ("float16", "bfloat16", "float64"),
    "float64": ("float32",),
}
_PART_OF_COMPLEX = {"complex64": "float32", "complex128": "float64"}
_BYTES = {"bool": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16}
_BYTES |= {name: int(name.lstrip("uint")) // 8 for name in _INTEGERS}

# What plain C++ does not have, or does not promise: halves, bits of floats, arithmetic that is never contracted. In
# assembler, because CuPy compiles with -ftz=true, which takes denormal numbers for 0 wherever the compiler chooses.
INTRINSICS = """
#define DEVICE __device__ __forceinline__

template <typename T> DEVICE T* in_global_memory(T* pointer) {
    __builtin_assume(__isGlobal(pointer));
    return pointer;
}
DEVICE float bits_to_float(unsigned int bits) { return __uint_as_float(bits); }
DEVICE unsigned int float_to_bits(float value) { return __float_as_uint(value); }
DEVICE float half_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
DEVICE unsigned short float_to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
DEVICE double float_to_double(float value) {
    double wide;
    asm("cvt.f64.f32 %0, %1;" : "=d"(wide) : "f"(value));
    return wide;
}
DEVICE float double_to_float(double value) {
    float narrow;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(narrow) : "d"(value));
    return narrow;
}
#define OPERATION(name, instruction, type, letter) \\
    DEVICE type name(type left, type right) { \\
        type result; \\
        asm(instruction " %0, %1, %2;" : "=" letter(result) : letter(left), letter(right)); \\
        return result; \\
    }
OPERATION(divide, "div.rn.f32", float, "f")
OPERATION(divide, "div.rn.f64", double, "d")
OPERATION(multiply, "mul.rn.f32", float, "f")
OPERATION(multiply, "mul.rn.f64", double, "d")
OPERATION(add, "add.rn.f32", float, "f")
OPERATION(add, "add.rn.f64", double, "d")
"""

TEMPLATES = (
    f"""
constexpr int kThreads = {THREADS}, kPieces = {PIECES}, kPieceBytes = {PIECE_BYTES};
"""
    + r"""
typedef signed char int8;
typedef unsigned char uint8;
typedef short int16;
typedef unsigned short uint16;
typedef int int32;
typedef unsigned int uint32;
typedef long long int64;
typedef unsigned long long uint64;
typedef float float32;
typedef double float64;
struct float16 { uint16 bits; };
struct bfloat16 { uint16 bits; };
template <typename T> struct alignas(2 * sizeof(T)) Complex { T real, imag; };
typedef Complex<float> complex64;
typedef Complex<double> complex128;

// One array of a launch: where it lies, where in the flat buffer (in elements), and the number of its first tile.
struct Array { uint64 address; int64 start, count, first_tile; };

template <typename T, int N> struct alignas(sizeof(T) * N) Piece { T item[N]; };

// The number in which halves are divided and cast; everything else is its own.
template <typename T> DEVICE T number_of(T value) { return value; }
DEVICE float number_of(float16 value) { return half_to_float(value.bits); }
DEVICE float number_of(bfloat16 value) { return bits_to_float((uint32)value.bits << 16); }

template <typename To> struct Cast {
    template <typename From> static DEVICE To of(From value) { return (To)value; }
};
template <> struct Cast<float> {
    template <typename From> static DEVICE float of(From value) { return (float)value; }
    static DEVICE float of(float value) { return value; }
    static DEVICE float of(double value) { return double_to_float(value); }
};
template <> struct Cast<double> {
    template <typename From> static DEVICE double of(From value) { return (double)value; }
    static DEVICE double of(float value) { return float_to_double(value); }
};
template <> struct Cast<float16> {
    static DEVICE float16 of(float value) { return float16{float_to_half(value)}; }
};
template <> struct Cast<bfloat16> {
    static DEVICE bfloat16 of(float value) {
        uint32 bits = float_to_bits(value);
        uint32 nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;  // ties to even
        uint32 not_a_number = (bits >> 16 & 0x8000u) | 0x7fc0u;
        return bfloat16{(uint16)((bits & 0x7fffffffu) > 0x7f800000u ? not_a_number : nearest)};
    }
};
template <typename T> struct Cast<Complex<T>> {
    template <typename From> static DEVICE Complex<T> of(Complex<From> value) {
        return Complex<T>{Cast<T>::of(value.real), Cast<T>::of(value.imag)};
    }
};

// What is divided by, made once for each thread. Empty where nothing is divided.
template <bool kDivide, typename T> struct Divisor {
    DEVICE explicit Divisor(double) {}
    DEVICE T quotient(T value) const { return value; }
};
template <typename T> struct Divisor<true, T> {
    T divisor;
    DEVICE explicit Divisor(double number) : divisor(Cast<T>::of(number)) {}
    DEVICE T quotient(T value) const { return divide(value, divisor); }
};
// Smith's method, as NumPy divides complex numbers, for a positive divisor without an imaginary part.
template <typename T> struct Divisor<true, Complex<T>> {
    T scale;
    DEVICE explicit Divisor(double number) : scale(divide((T)1, Cast<T>::of(number))) {}
    DEVICE Complex<T> quotient(Complex<T> value) const {
        return Complex<T>{multiply(add(value.real, multiply(value.imag, (T)0)), scale),
                          multiply(add(value.imag, multiply(value.real, (T)-0.0)), scale)};
    }
};

template <typename T> union Bytes { T value; char item[sizeof(T)]; };

template <bool kAligned, typename T> DEVICE T load(const char* address) {
    if constexpr (kAligned) {
        return *reinterpret_cast<const T*>(address);
    } else {
        Bytes<T> bytes;
        #pragma unroll
        for (int k = 0; k < (int)sizeof(T); ++k) bytes.item[k] = address[k];
        return bytes.value;
    }
}

template <bool kAligned, typename T> DEVICE void store(char* address, T value) {
    if constexpr (kAligned) {
        *reinterpret_cast<T*>(address) = value;
    } else {
        Bytes<T> bytes;
        bytes.value = value;
        #pragma unroll
        for (int k = 0; k < (int)sizeof(T); ++k) address[k] = bytes.item[k];
    }
}

// Element by element, neighbouring threads on neighbouring elements; loads of several come before their stores.
template <bool kAligned, typename From, typename To, typename By>
DEVICE void move_elements(const char* __restrict__ from, char* __restrict__ to, int length, const By& divisor) {
    constexpr int kBatch = kAligned ? 4 : 1;
    for (int start = threadIdx.x; start < length; start += kThreads * kBatch) {
        From value[kBatch];
        #pragma unroll
        for (int k = 0; k < kBatch; ++k) {
            int i = start + k * kThreads;
            if (i < length) value[k] = load<kAligned, From>(from + i * sizeof(From));
        }
        #pragma unroll
        for (int k = 0; k < kBatch; ++k) {
            int i = start + k * kThreads;
            if (i < length)
                store<kAligned>(to + i * sizeof(To), Cast<To>::of(divisor.quotient(number_of(value[k]))));
        }
    }
}

template <int kVector, typename From, typename To, typename By>
DEVICE void move_pieces(const char* __restrict__ from, char* __restrict__ to, int pieces, const By& divisor) {
    typedef Piece<From, kVector> Source;
    typedef Piece<To, kVector> Target;
    Source source[kPieces];
    #pragma unroll
    for (int k = 0; k < kPieces; ++k) {
        int i = threadIdx.x + k * kThreads;
        if (i < pieces) source[k] = load<true, Source>(from + i * sizeof(Source));
    }
    #pragma unroll
    for (int k = 0; k < kPieces; ++k) {
        int i = threadIdx.x + k * kThreads;
        Target target;
        #pragma unroll
        for (int n = 0; n < kVector; ++n)
            target.item[n] = Cast<To>::of(divisor.quotient(number_of(source[k].item[n])));
        if (i < pieces) store<true>(to + i * sizeof(Target), target);
    }
}

// The tile of this block. Between the arrays and the flat buffer, in the direction that into_flat says.
template <bool kDivide, typename From, typename To>
DEVICE void move_tile(const Array* __restrict__ arrays, int count, char* flat, int into_flat, double number) {
    constexpr int kWidest = sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To);
    constexpr int kVector = kPieceBytes / kWidest;
    constexpr int kTile = kThreads * kPieces * kVector;
    const Divisor<kDivide, decltype(number_of(From()))> divisor(number);
    int64 tile = blockIdx.x;
    int low = 0, high = count;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (arrays[middle].first_tile <= tile) low = middle;
        else high = middle;
    }
    Array array = arrays[low];
    int64 begin = (tile - array.first_tile) * kTile;
    if (begin >= array.count) return;
    int length = array.count - begin < kTile ? (int)(array.count - begin) : kTile;
    const char* from;
    char* to;
    if (into_flat) {
        from = reinterpret_cast<const char*>(array.address) + begin * sizeof(From);
        to = flat + (array.start + begin) * sizeof(To);
    } else {
        from = flat + (array.start + begin) * sizeof(From);
        to = reinterpret_cast<char*>(array.address) + begin * sizeof(To);
    }
    from = in_global_memory(from);
    to = in_global_memory(to);
    if ((uint64)from % alignof(From) != 0 || (uint64)to % alignof(To) != 0) {
        move_elements<false, From, To>(from, to, length, divisor);
        return;
    }
    int head = (int)(-(uint64)to / sizeof(To) % kVector);  // elements before the next piece of the target begins
    if ((uint64)(from + head * sizeof(From)) % (kVector * sizeof(From)) != 0 || length < head + kVector) {
        move_elements<true, From, To>(from, to, length, divisor);
        return;
    }
    int pieces = (length - head) / kVector, done = head + pieces * kVector;
    move_pieces<kVector, From, To>(from + head * sizeof(From), to + head * sizeof(To), pieces, divisor);
    if (head) move_elements<true, From, To>(from, to, head, divisor);
    if (done < length)
        move_elements<true, From, To>(from + done * sizeof(From), to + done * sizeof(To), length - done, divisor);
}
"""
)

_ENTRY = """
extern "C" __global__ void __launch_bounds__({threads}, {blocks})
{kernel.name}(const Array* arrays, int count, char* flat, int into_flat, double divisor) {{
    move_tile<{divide}, {kernel.source}, {kernel.target}>(arrays, count, flat, into_flat, divisor);
}}
"""


class Kernel(NamedTuple):
    """A kernel, and how a launch counts.

    Args:
        name: Its name in the source.
        source: The type of the elements it reads.
        target: The type of the elements it writes.
        divides: Whether it divides.
        parts: Elements of the kernel in one element of the arrays: 2 where complex numbers move as pairs.
    """

    name: str
    source: str
    target: str
    divides: bool
    parts: int

    @property
    def tile(self) -> int:
        """Elements of the kernel that one block moves."""
        return THREADS * PIECES * (PIECE_BYTES // max(_BYTES[self.source], _BYTES[self.target]))


@cache
def kernel_for(source: str, target: str, divides: bool) -> Kernel:
    """Return the kernel that casts one dtype to another, both by NumPy's names.

    Raises:
        TypeError: There is none.

    >>> kernel_for("float32", "bfloat16", True).name, kernel_for("bool", "bool", False).name
    ('mpidist_float32_to_bfloat16_divided', 'mpidist_uint8_to_uint8')
    """
    pair = _divided_pair(source, target) if divides else _cast_pair(source, target)
    if pair is None:
        doing = "dividing" if divides else "copying"
        raise TypeError(
            f"{doing} {source} into {target} in one pass on a GPU is not provided; expected equal dtypes, a wider or "
            "narrower number of the same kind, or a float for an integer (which is not divided); "
            f"cast before: array.astype('{target}')"
        )
    kinds, parts = pair
    return Kernel(f"mpidist_{kinds[0]}_to_{kinds[1]}{'_divided' if divides else ''}", *kinds, divides, parts)


def _cast_pair(source: str, target: str) -> tuple[tuple[str, str], int] | None:
    if source not in _BYTES or target not in _BYTES:
        return None
    if source in _PART_OF_COMPLEX and target in _PART_OF_COMPLEX:
        pair = _cast_pair(_PART_OF_COMPLEX[source], _PART_OF_COMPLEX[target])
        return None if pair is None else (pair[0], 2 * pair[1])
    integers = source in _INTEGERS and target in _INTEGERS
    if source == target or (integers and _BYTES[source] == _BYTES[target]):
        word = f"uint{8 * _BYTES[source]}"
        return (word, word), 1
    if integers:
        # What is cut off has no sign, and the bits of what is extended depend on the sign of the source alone.
        signed = f"int{8 * _BYTES[target]}"
        return (source if _BYTES[source] < _BYTES[target] else f"int{8 * _BYTES[source]}", signed), 1
    if target in _FLOAT_CASTS.get(source, ()) or (source in _INTEGERS and target in ("float32", "float64")):
        return (source, target), 1
    return None


def _divided_pair(source: str, target: str) -> tuple[tuple[str, str], int] | None:
    number = "float32" if source in _HALVES else source
    floats = source in _FLOAT_CASTS and (target == number or target in _FLOAT_CASTS[number])
    return ((source, target), 1) if floats or (source in _PART_OF_COMPLEX and target in _PART_OF_COMPLEX) else None


def all_kernels() -> list[Kernel]:
    """Return every kernel there is."""
    kernels = {}
    for source in _BYTES:
        for target in _BYTES:
            for divides, pair in ((False, _cast_pair), (True, _divided_pair)):
                if pair(source, target) is not None:
                    kernel = kernel_for(source, target, divides)
                    kernels[kernel.name] = kernel
    return list(kernels.values())


def entry(kernel: Kernel) -> str:
    """Return the source of the kernel alone, which follows ``INTRINSICS`` and ``TEMPLATES``."""
    return _ENTRY.format(kernel=kernel, divide="true" if kernel.divides else "false", threads=THREADS, blocks=_BLOCKS)


def source_of(kernel: Kernel) -> str:
    """Return the whole source of a kernel."""
    return INTRINSICS + TEMPLATES + entry(kernel)
