/* The naive reference; see reference.h. Assumes little endian, as the machines are on which this runs. */

#include "reference.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char *const dtype_names[NC_DTYPES] = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
                                            "float16", "bfloat16", "float32", "float64", "longdouble", "complex64",
                                            "complex128", "clongdouble", "bool"};
const char *const op_names[NC_OPS] = {"SUM", "PROD", "MIN", "MAX", "BAND", "BOR", "BXOR"};

/* Random numbers: splitmix64. */
dice dice_of(uint64_t seed, uint64_t stream)
{
    dice d = {seed * 0x9E3779B97F4A7C15u + stream};
    d.state = draw(&d);
    return d;
}

uint64_t draw(dice *d)
{
    uint64_t x = d->state += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

size_t below(dice *d, size_t n) { return (size_t)(draw(d) % n); }
int chance(dice *d, int percent) { return below(d, 100) < (size_t)percent; }

void fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    _exit(1);
}

void *memory(size_t bytes)
{
    void *found = calloc(bytes ? bytes : 1, 1);
    if (found == NULL)
        fail("no memory for %zu bytes", bytes);
    return found;
}

static int is_whole(nc_dtype t) { return t <= NC_U64 || t == NC_BOOL; }
static int is_half(nc_dtype t) { return t == NC_F16 || t == NC_BF16; }
static int is_complex(nc_dtype t) { return t >= NC_C64 && t <= NC_CLONG; }
int takes_divisor(nc_dtype t) { return !is_whole(t); }

int reference_combines(nc_dtype t, nc_op op)
{
    if (is_complex(t))
        return op <= NC_PROD;
    if (t == NC_BOOL)
        return op >= NC_MIN;
    return is_whole(t) || op < NC_BAND;
}

/* Whole numbers, in 128 bits of which the lowest are kept. */
static __int128 load_whole(const char *from, size_t size, int has_sign)
{
    uint64_t bits = 0;
    memcpy(&bits, from, size);
    return has_sign ? (__int128)((int64_t)(bits << (64 - 8 * size)) >> (64 - 8 * size)) : (__int128)bits;
}

static void combine_whole(char *d, const char *x, const char *y, size_t size, int has_sign, nc_op op)
{
    __int128 a = load_whole(x, size, has_sign), b = load_whole(y, size, has_sign), r;
    switch (op) {
    case NC_SUM: r = a + b; break;
    case NC_PROD: r = (__int128)((unsigned __int128)a * (unsigned __int128)b); break;
    case NC_MIN: r = a < b ? a : b; break;
    case NC_MAX: r = a < b ? b : a; break;
    case NC_BAND: r = a & b; break;
    case NC_BOR: r = a | b; break;
    default: r = a ^ b; break;
    }
    uint64_t bits = (uint64_t)r;
    memcpy(d, &bits, size);
}

/* NaN wins in MIN and MAX; of equal numbers, zeros of different sign among them, the second does. */
#define REAL(T)                                                                        \
    static T real_##T(T a, T b, nc_op op)                                              \
    {                                                                                  \
        switch (op) {                                                                  \
        case NC_SUM: return a + b;                                                     \
        case NC_PROD: return a * b;                                                    \
        case NC_MIN: return isnan(a) ? a : isnan(b) ? b : a < b ? a : b;               \
        default: return isnan(a) ? a : isnan(b) ? b : a > b ? a : b;                   \
        }                                                                              \
    }                                                                                  \
    static void combine_##T(char *d, const char *x, const char *y, nc_op op)           \
    {                                                                                  \
        T a, b;                                                                        \
        memcpy(&a, x, sizeof a), memcpy(&b, y, sizeof b);                              \
        a = real_##T(a, b, op);                                                        \
        memcpy(d, &a, sizeof a);                                                       \
    }                                                                                  \
    static void complex_##T(char *d, const char *x, const char *y, nc_op op)           \
    {                                                                                  \
        T a[2], b[2], r[2];                                                            \
        memcpy(a, x, sizeof a), memcpy(b, y, sizeof b);                                \
        r[0] = op == NC_SUM ? a[0] + b[0] : a[0] * b[0] - a[1] * b[1];                 \
        r[1] = op == NC_SUM ? a[1] + b[1] : a[0] * b[1] + a[1] * b[0];                 \
        memcpy(d, r, sizeof r);                                                        \
    }                                                                                  \
    /* As NumPy divides by a complex number without an imaginary part. */              \
    static void divide_##T(char *d, int parts, double divisor)                         \
    {                                                                                  \
        T a[2], by = (T)divisor;                                                       \
        memcpy(a, d, sizeof *a * (size_t)parts);                                       \
        if (parts == 1) {                                                              \
            a[0] /= by;                                                                \
        } else {                                                                       \
            T ratio = (T)0 / by, scale = (T)1 / (by + (T)0 * ratio);                   \
            T re = (a[0] + a[1] * ratio) * scale, im = (a[1] - a[0] * ratio) * scale;  \
            a[0] = re, a[1] = im;                                                      \
        }                                                                              \
        memcpy(d, a, sizeof *a * (size_t)parts);                                       \
    }
typedef long double longdouble;
REAL(float)
REAL(double)
REAL(longdouble)

double value_of_half(uint16_t half, nc_dtype dtype)
{
    int digits = dtype == NC_F16 ? 10 : 7, largest = dtype == NC_F16 ? 31 : 255, bias = largest / 2;
    int exponent = half >> digits & largest, part = half & ((1 << digits) - 1);
    double sign = half & 0x8000 ? -1 : 1;
    if (exponent == largest)
        return part ? (double)NAN : sign * (double)INFINITY;
    return sign * (exponent ? ldexp(part + (1 << digits), exponent - bias - digits) : ldexp(part, 1 - bias - digits));
}

/* The largest half that is not above, or the one after it. */
uint16_t half_of_value(float value, nc_dtype dtype)
{
    uint16_t sign = signbit(value) ? 0x8000 : 0, infinity = dtype == NC_F16 ? 0x7c00 : 0x7f80, low = 0, high = infinity;
    double x = fabs((double)value);
    if (isnan(value))
        return (uint16_t)(infinity | 1);
    if (isinf(value))
        return sign | infinity;
    while (high - low > 1) {
        uint16_t middle = (uint16_t)((low + high) / 2);
        if (value_of_half(middle, dtype) <= x)
            low = middle;
        else
            high = middle;
    }
    /* Above the largest is where the next one would be. */
    double below_it = value_of_half(low, dtype), before = value_of_half((uint16_t)(low - 1), dtype);
    double above_it = high == infinity ? below_it + (below_it - before) : value_of_half(high, dtype);
    double down = x - below_it, up = above_it - x;
    return sign | (down < up || (down == up && low % 2 == 0) ? low : high);
}

static void combine_one(char *d, const char *a, const char *b, nc_dtype t, nc_op op)
{
    if (is_whole(t))
        combine_whole(d, a, b, nc_itemsize(t), t < NC_U8, op);
    else if (t == NC_F32)
        combine_float(d, a, b, op);
    else if (t == NC_F64)
        combine_double(d, a, b, op);
    else if (t == NC_LONG)
        combine_longdouble(d, a, b, op);
    else if (t == NC_C64)
        complex_float(d, a, b, op);
    else if (t == NC_C128)
        complex_double(d, a, b, op);
    else
        complex_longdouble(d, a, b, op);
}

static void divide_one(char *d, nc_dtype t, double divisor)
{
    if (t == NC_F32 || t == NC_C64)
        divide_float(d, t == NC_F32 ? 1 : 2, divisor);
    else if (t == NC_F64 || t == NC_C128)
        divide_double(d, t == NC_F64 ? 1 : 2, divisor);
    else
        divide_longdouble(d, t == NC_LONG ? 1 : 2, divisor);
}

static void combine_half(char *d, const char *const *in, int n, size_t at, nc_dtype t, nc_op op, double divisor)
{
    float total = 0;
    for (int i = 0; i < n; i++) {
        uint16_t bits;
        memcpy(&bits, in[i] + 2 * at, 2);
        float value = (float)value_of_half(bits, t);
        total = i == 0 ? value : real_float(total, value, op);
    }
    if (divisor != 0)
        total /= (float)divisor;
    uint16_t rounded = half_of_value(total, t);
    memcpy(d + 2 * at, &rounded, 2);
}

void reference_combine(char *d, const char *const *in, int n, size_t count, nc_dtype dtype, nc_op op, double divisor)
{
    size_t size = nc_itemsize(dtype);
    char total[32];
    for (size_t e = 0; e < count; e++) {
        if (is_half(dtype) && (n > 1 || divisor != 0)) {
            combine_half(d, in, n, e, dtype, op, divisor);
            continue;
        }
        memcpy(total, in[0] + e * size, size);
        for (int i = 1; i < n; i++)
            combine_one(total, total, in[i] + e * size, dtype, op);
        if (divisor != 0)
            divide_one(total, dtype, divisor);
        memcpy(d + e * size, total, size);
    }
}

static double number(dice *d, int nasty)
{
    static const double special[] = {0.0, -0.0, INFINITY, -INFINITY, NAN, 1e-45, -1e-310, 6e-8, 3e38, 1e308, 65504, 1};
    if (nasty && chance(d, 15))
        return special[below(d, sizeof special / sizeof *special)];
    return ((double)(int64_t)draw(d) * 0x1p-63) * (chance(d, 5) ? 1e4 : 4);
}

void fill(dice *d, char *to, size_t count, nc_dtype dtype, int nasty)
{
    size_t size = nc_itemsize(dtype), parts = is_complex(dtype) ? 2 : 1;
    if (is_whole(dtype) && dtype != NC_BOOL) {
        for (size_t bytes = count * size; bytes;) {
            uint64_t bits = draw(d);
            size_t n = bytes < sizeof bits ? bytes : sizeof bits;
            memcpy(to, &bits, n);
            to += n, bytes -= n;
        }
        return;
    }
    for (size_t e = 0; e < count; e++, to += size)
        for (size_t part = 0; part < parts; part++) {
            uint64_t bits = draw(d);
            double value = dtype == NC_BOOL ? 0 : number(d, nasty);
            float single = (float)value;
            long double wide = (long double)value * (1 + 0x1p-55L * (long double)(bits % 99));
            uint16_t half = dtype <= NC_BF16 ? half_of_value(single, dtype) : 0;
            if (dtype == NC_BOOL)
                *to = bits & 1;
            else if (is_half(dtype))
                memcpy(to, &half, 2);
            else if (size / parts == sizeof single)
                memcpy(to + part * sizeof single, &single, sizeof single);
            else if (size / parts == sizeof value)
                memcpy(to + part * sizeof value, &value, sizeof value);
            else
                memcpy(to + part * sizeof wide, &wide, sizeof wide);
        }
}

#define SAME(T)                                                             \
    static int same_##T(const char *x, const char *y)                       \
    {                                                                       \
        T a, b;                                                             \
        memcpy(&a, x, sizeof a), memcpy(&b, y, sizeof b);                   \
        return (isnan(a) && isnan(b)) || (a == b && !signbit(a) == !signbit(b)); \
    }
SAME(float)
SAME(double)
SAME(longdouble)

static int same_half(const char *x, const char *y, nc_dtype t)
{
    uint16_t a, b;
    memcpy(&a, x, 2), memcpy(&b, y, 2);
    return a == b || (isnan(value_of_half(a, t)) && isnan(value_of_half(b, t)));
}

size_t first_difference(const char *a, const char *b, size_t count, nc_dtype dtype)
{
    size_t size = nc_itemsize(dtype), parts = is_complex(dtype) ? 2 : 1, step = size / parts;
    if (!memcmp(a, b, count * size))
        return count;
    for (size_t i = 0; i < count * parts; i++, a += step, b += step) {
        int same = is_whole(dtype)            ? !memcmp(a, b, step)
                   : is_half(dtype)           ? same_half(a, b, dtype)
                   : step == sizeof(float)    ? same_float(a, b)
                   : step == sizeof(double)   ? same_double(a, b)
                                              : same_longdouble(a, b);
        if (!same)
            return i / parts;
    }
    return count;
}
