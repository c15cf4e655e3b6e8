/* Kernels and their table for the instruction set NC_TARGET. kernels.c includes this file once per set. C allows to
   define the macros again, because they are the same each time. */

#define BINARY(name, T, expression)                                                     \
    NC_TARGET static void NC_NAME(name)(char *d, const char *x, const char *y, size_t n) \
    {                                                                                   \
        T *out = (T *)d;                                                                \
        const T *left = (const T *)x, *right = (const T *)y;                            \
        NC_INDEPENDENT                                                                  \
        for (size_t i = 0; i < n; i++) {                                                \
            T a = left[i], b = right[i];                                                \
            out[i] = (expression);                                                      \
        }                                                                               \
    }

/* Integers wrap. W is an unsigned type that C does not promote to a signed one, whose overflow would be undefined. */
#define WHOLE(S, T, U, W)                                     \
    BINARY(sum_##S, T, (T)(U)((W)(U)a + (W)(U)b))             \
    BINARY(prod_##S, T, (T)(U)((W)(U)a * (W)(U)b))            \
    BINARY(min_##S, T, a < b ? a : b)                         \
    BINARY(max_##S, T, a > b ? a : b)                         \
    BINARY(band_##S, T, (T)(a & b))                           \
    BINARY(bor_##S, T, (T)(a | b))                            \
    BINARY(bxor_##S, T, (T)(a ^ b))

/* NaN propagates, as in np.minimum and np.maximum. */
#define FLOATING(S, T)                                         \
    BINARY(sum_##S, T, a + b)                                  \
    BINARY(prod_##S, T, a * b)                                 \
    BINARY(min_##S, T, (a < b || a != a) ? a : b)              \
    BINARY(max_##S, T, (a > b || a != a) ? a : b)              \
    NC_TARGET static void NC_NAME(divide_##S)(char *d, size_t n, double divisor) \
    {                                                          \
        T *out = (T *)d, by = (T)divisor;                      \
        for (size_t i = 0; i < n; i++)                         \
            out[i] = out[i] / by;                              \
    }

/* Divide like NumPy: by a complex number with imaginary part 0 (Smith's method). */
#define COMPLEX(S, T, R)                                                                   \
    BINARY(sum_##S, T, ((T){a.re + b.re, a.im + b.im}))                                    \
    BINARY(prod_##S, T, ((T){a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}))       \
    NC_TARGET static void NC_NAME(divide_##S)(char *d, size_t n, double divisor)           \
    {                                                                                      \
        T *out = (T *)d;                                                                   \
        R none = (R)0, scale = (R)1 / (R)divisor;                                          \
        for (size_t i = 0; i < n; i++) {                                                   \
            T a = out[i];                                                                  \
            out[i].re = (a.re + a.im * none) * scale;                                      \
            out[i].im = (a.im - a.re * none) * scale;                                      \
        }                                                                                  \
    }

WHOLE(i8, int8_t, uint8_t, uint32_t)
WHOLE(i16, int16_t, uint16_t, uint32_t)
WHOLE(i32, int32_t, uint32_t, uint32_t)
WHOLE(i64, int64_t, uint64_t, uint64_t)
WHOLE(u8, uint8_t, uint8_t, uint32_t)
WHOLE(u16, uint16_t, uint16_t, uint32_t)
WHOLE(u32, uint32_t, uint32_t, uint32_t)
WHOLE(u64, uint64_t, uint64_t, uint64_t)
FLOATING(f32, float)
FLOATING(f64, double)
FLOATING(flong, long double)
COMPLEX(c64, nc_c64, float)
COMPLEX(c128, nc_c128, double)
COMPLEX(clong, nc_clong, long double)

NC_TARGET static void NC_NAME(widen_bf16)(float *d, const char *s, size_t n)
{
    const uint16_t *in = (const uint16_t *)s;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)in[i] << 16;
        memcpy(d + i, &bits, 4);
    }
}

/* Round to nearest, ties to even. NaN stays NaN. */
NC_TARGET static void NC_NAME(round_bf16)(char *d, const float *s, size_t n)
{
    uint16_t *out = (uint16_t *)d;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, s + i, 4);
        uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
        uint32_t quiet = (bits >> 16 & 0x8000u) | 0x7fc0u;
        out[i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
    }
}

NC_TARGET static void NC_NAME(widen_f16)(float *d, const char *s, size_t n)
{
    const uint16_t *in = (const uint16_t *)s;
    size_t i = 0;
#if NC_F16C
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(d + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + i))));
#endif
    for (; i < n; i++) {
        uint32_t sign = (uint32_t)(in[i] & 0x8000u) << 16, exponent = in[i] >> 10 & 0x1fu, part = in[i] & 0x3ffu, bits;
        if (exponent == 0x1f) {
            bits = 0x7f800000u | part << 13 | (part ? 0x400000u : 0);
        } else if (exponent) {
            bits = (exponent + 112) << 23 | part << 13;
        } else {
            float small = (float)part * 0x1p-24f;
            memcpy(&bits, &small, 4);
        }
        bits |= sign;
        memcpy(d + i, &bits, 4);
    }
}

NC_TARGET static void NC_NAME(round_f16)(char *d, const float *s, size_t n)
{
    uint16_t *out = (uint16_t *)d;
    size_t i = 0;
#if NC_F16C
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(s + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; i++) {
        uint32_t bits, sign, half;
        memcpy(&bits, s + i, 4);
        sign = bits >> 16 & 0x8000u;
        bits &= 0x7fffffffu;
        if (bits > 0x7f800000u) {
            half = 0x7e00u | (bits >> 13 & 0x3ffu);
        } else if (bits >= 0x477ff000u) {
            half = 0x7c00u; /* too large even when rounded down */
        } else if (bits >= 0x38800000u) {
            half = (bits - 0x38000000u + 0xfffu + (bits >> 13 & 1)) >> 13;
        } else {
            float value;
            memcpy(&value, &bits, 4);
            value += 0.5f; /* aligns the last bit with that of the smallest half, so that the addition rounds */
            memcpy(&half, &value, 4);
            half -= 0x3f000000u;
        }
        out[i] = (uint16_t)(sign | half);
    }
}

#define OF_REAL(S) NC_NAME(sum_##S), NC_NAME(prod_##S), NC_NAME(min_##S), NC_NAME(max_##S)
#define OF_WHOLE(S) {OF_REAL(S), NC_NAME(band_##S), NC_NAME(bor_##S), NC_NAME(bxor_##S)}

static const nc_table NC_NAME(table) = {
    .combine = {
        [NC_I8] = OF_WHOLE(i8), [NC_I16] = OF_WHOLE(i16), [NC_I32] = OF_WHOLE(i32), [NC_I64] = OF_WHOLE(i64),
        [NC_U8] = OF_WHOLE(u8), [NC_U16] = OF_WHOLE(u16), [NC_U32] = OF_WHOLE(u32), [NC_U64] = OF_WHOLE(u64),
        [NC_F32] = {OF_REAL(f32)}, [NC_F64] = {OF_REAL(f64)}, [NC_LONG] = {OF_REAL(flong)},
        [NC_C64] = {NC_NAME(sum_c64), NC_NAME(prod_c64)}, [NC_C128] = {NC_NAME(sum_c128), NC_NAME(prod_c128)},
        [NC_CLONG] = {NC_NAME(sum_clong), NC_NAME(prod_clong)},
        /* bool is 0 or 1, so min is "and", and max is "or". */
        [NC_BOOL] = {NULL, NULL, NC_NAME(min_u8), NC_NAME(max_u8), NC_NAME(band_u8), NC_NAME(bor_u8),
                     NC_NAME(bxor_u8)},
    },
    .divide = {
        [NC_F32] = NC_NAME(divide_f32), [NC_F64] = NC_NAME(divide_f64), [NC_LONG] = NC_NAME(divide_flong),
        [NC_C64] = NC_NAME(divide_c64), [NC_C128] = NC_NAME(divide_c128), [NC_CLONG] = NC_NAME(divide_clong),
    },
    .widen = {[NC_F16] = NC_NAME(widen_f16), [NC_BF16] = NC_NAME(widen_bf16)},
    .round = {[NC_F16] = NC_NAME(round_f16), [NC_BF16] = NC_NAME(round_bf16)},
};
