/* Element-wise operations for every dtype, compiled twice: for any processor, and for AVX2 with F16C.

   An input may be the target itself. All arrays are aligned to their dtype. Operations are not contracted or reordered
   (-ffp-contract=off, no -ffast-math), so that results are equal on all processors. */

#include "mpidist.h"

#include <string.h>

#if defined(__x86_64__) && !defined(NC_NO_AVX2) /* tests define NC_NO_AVX2 */
#include <cpuid.h>
#include <immintrin.h>
#define NC_X86 1
#endif

#if defined(__clang__)
#pragma clang diagnostic ignored "-Wpass-failed" /* long double has no vector instructions */
#define NC_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define NC_INDEPENDENT _Pragma("GCC ivdep")
#endif

typedef struct { float re, im; } nc_c64;
typedef struct { double re, im; } nc_c128;
typedef struct { long double re, im; } nc_clong;
typedef void nc_kernel(char *d, const char *a, const char *b, size_t n);
typedef void nc_divider(char *d, size_t n, double divisor);
typedef void nc_widener(float *d, const char *s, size_t n);
typedef void nc_rounder(char *d, const float *s, size_t n);
typedef struct {
    nc_kernel *combine[NC_DTYPES][NC_OPS];
    nc_divider *divide[NC_DTYPES];
    nc_widener *widen[NC_DTYPES];
    nc_rounder *round[NC_DTYPES];
} nc_table;

#define NC_TARGET
#define NC_NAME(name) name##_base
#define NC_F16C 0
#include "kernels_table.h"
#undef NC_TARGET
#undef NC_NAME
#undef NC_F16C

#ifdef NC_X86
#define NC_TARGET __attribute__((target("avx2,f16c")))
#define NC_NAME(name) name##_avx2
#define NC_F16C 1
#include "kernels_table.h"
#endif

#ifdef NC_X86
static int supports_avx2(void)
{
    unsigned a, b, c, d; /* compilers differ in whether __builtin_cpu_supports knows "f16c" */
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}
#endif

static const nc_table *table(void)
{
#ifdef NC_X86
    static int has_avx2 = -1; /* a race is harmless, because all threads store the same value */
    int known = __atomic_load_n(&has_avx2, __ATOMIC_RELAXED);
    if (known < 0) {
        known = supports_avx2();
        __atomic_store_n(&has_avx2, known, __ATOMIC_RELAXED);
    }
    if (known)
        return &table_avx2;
#endif
    return &table_base;
}

size_t nc_itemsize(nc_dtype dtype)
{
    static const unsigned char sizes[NC_DTYPES] = {1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, sizeof(long double),
                                                   8, 16, sizeof(nc_clong), 1};
    return sizes[dtype];
}

static int is_half(nc_dtype dtype) { return dtype == NC_F16 || dtype == NC_BF16; }

int nc_combines(nc_dtype dtype, nc_op op)
{
    return table()->combine[is_half(dtype) ? NC_F32 : dtype][op] != NULL;
}

/* Bytes combined at once, so that intermediate results stay in the L1 cache. */
enum { BLOCK = 8192 };

static void combine_halves(char *d, const char *const *in, int n, size_t count, nc_dtype dtype, nc_op op,
                           double divisor)
{
    const nc_table *t = table();
    float total[BLOCK / 8], next[BLOCK / 8];
    for (size_t at = 0; at < count; at += BLOCK / 8) {
        size_t m = count - at < BLOCK / 8 ? count - at : BLOCK / 8;
        t->widen[dtype](total, in[0] + 2 * at, m);
        for (int i = 1; i < n; i++) {
            t->widen[dtype](next, in[i] + 2 * at, m);
            t->combine[NC_F32][op]((char *)total, (char *)total, (char *)next, m);
        }
        if (divisor != 0)
            t->divide[NC_F32]((char *)total, m, divisor);
        t->round[dtype](d + 2 * at, total, m);
    }
}

void nc_combine(char *d, const char *const *in, int n, size_t count, nc_dtype dtype, nc_op op, double divisor)
{
    const nc_table *t = table();
    if (is_half(dtype) && (n > 1 || divisor != 0)) {
        combine_halves(d, in, n, count, dtype, op, divisor);
        return;
    }
    nc_kernel *kernel = t->combine[dtype][op];
    size_t size = nc_itemsize(dtype), per_block = BLOCK / size;
    _Alignas(64) char total[BLOCK];
    for (size_t at = 0; at < count; at += per_block) {
        size_t m = count - at < per_block ? count - at : per_block, first = at * size;
        const char *a = in[0] + first;
        /* Intermediate results must not be stored in d, which may be a later input. */
        for (int i = 1; i < n; i++) {
            char *to = i == n - 1 ? d + first : total;
            kernel(to, a, in[i] + first, m);
            a = to;
        }
        if (n == 1 && d != in[0])
            memmove(d + first, a, m * size);
        if (divisor != 0)
            t->divide[dtype](d + first, m, divisor);
    }
}

void nc_divide(char *d, size_t count, nc_dtype dtype, double divisor)
{
    const char *in[1] = {d};
    if (is_half(dtype))
        combine_halves(d, in, 1, count, dtype, NC_SUM, divisor);
    else
        table()->divide[dtype](d, count, divisor);
}
