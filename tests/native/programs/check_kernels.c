/* The kernels of every table against the naive reference.

   check_kernels ROUNDS: halves exhaustively, 8-bit operands exhaustively, all else at random. Includes the source, so
   that each table is reached, whatever this processor would choose. */

#include "kernels.c"

#include "reference.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST = 5000 };

static const nc_table *tables[2];
static const char *table_names[2];
static int table_count;

static void find_tables(void)
{
    tables[table_count] = &table_base, table_names[table_count++] = "base";
#ifdef NC_X86
    if (supports_avx2())
        tables[table_count] = &table_avx2, table_names[table_count++] = "AVX2";
#endif
}

static const nc_dtype halves[2] = {NC_F16, NC_BF16};

/* Every half becomes the float that it is; a NaN stays one. */
static void check_widening(const nc_table *t, const char *name, nc_dtype dtype)
{
    uint16_t *all = memory(65536 * sizeof *all);
    float *wide = memory(65536 * sizeof *wide);
    for (int i = 0; i < 65536; i++)
        all[i] = (uint16_t)i;
    /* Some begin and end beside the blocks of vectors. */
    for (int cut = 0; cut < 9; cut++) {
        t->widen[dtype](wide, (char *)(all + cut), (size_t)(65536 - 2 * cut));
        for (int i = cut; i < 65536 - cut; i++) {
            double expected = value_of_half((uint16_t)i, dtype);
            float found = wide[i - cut];
            if (isnan(expected) ? !isnan(found) : !(expected == (double)found && !signbit(expected) == !signbit(found)))
                fail("%s: %s %04x became %a; expected %a", name, dtype_names[dtype], (unsigned)i, (double)found,
                     expected);
        }
    }
    free(all), free(wide);
}

static float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static void check_rounded(const nc_table *t, const char *name, nc_dtype dtype, const float *values, size_t n)
{
    uint16_t found[64];
    t->round[dtype]((char *)found, values, n);
    for (size_t i = 0; i < n; i++) {
        uint16_t expected = half_of_value(values[i], dtype);
        int is_right = isnan(values[i]) ? isnan(value_of_half(found[i], dtype)) : found[i] == expected;
        if (!is_right)
            fail("%s: %a rounded to %s %04x; expected %04x", name, (double)values[i], dtype_names[dtype], found[i],
                 expected);
    }
}

/* Every half, the middle between it and the next one, and the floats beside the middle; then any floats. */
static void check_rounding(const nc_table *t, const char *name, nc_dtype dtype, size_t rounds)
{
    dice d = dice_of(1, dtype);
    for (unsigned half = 0; half < 65536; half++) {
        float value = (float)value_of_half((uint16_t)half, dtype);
        float next = (float)value_of_half((uint16_t)(half + 1), dtype);
        float middle = isinf(next) ? value * (dtype == NC_F16 ? 1 + 0x1p-11f / (2 - 0x1p-10f) : 1) : (value + next) / 2;
        float values[8] = {value, middle, nextafterf(middle, 0), nextafterf(middle, INFINITY),
                           nextafterf(middle, -INFINITY), -middle, float_of((uint32_t)draw(&d)), next};
        check_rounded(t, name, dtype, values, 1 + below(&d, 8));
        check_rounded(t, name, dtype, values, 8);
    }
    for (size_t i = 0; i < 4000 * rounds; i++) {
        float values[64];
        size_t n = 1 + below(&d, 64);
        for (size_t e = 0; e < n; e++) {
            uint32_t bits = (uint32_t)draw(&d);
            /* Half of them near the range of float16. */
            values[e] = float_of(e % 2 ? bits : (bits & 0x8fffffffu) | (uint32_t)(112 - 24 + below(&d, 44)) << 23);
        }
        check_rounded(t, name, dtype, values, n);
    }
}

static void check_same(const char *what, const char *name, const char *found, const char *expected, size_t n,
                       nc_dtype dtype)
{
    size_t at = first_difference(found, expected, n, dtype);
    if (at != n)
        fail("%s: %s of %s, %zu elements: element %zu is wrong", name, what, dtype_names[dtype], n, at);
}

/* Operands of one byte: each with each. */
static void check_bytes(const nc_table *t, const char *name, nc_dtype dtype, nc_op op)
{
    size_t values = dtype == NC_BOOL ? 2 : 256, n = values * values;
    char *a = memory(n), *b = memory(n), *found = memory(n), *expected = memory(n);
    for (size_t i = 0; i < n; i++)
        a[i] = (char)(i % values), b[i] = (char)(i / values);
    t->combine[dtype][op](found, a, b, n);
    reference_combine(expected, (const char *[]){a, b}, 2, n, dtype, op, 0);
    check_same(op_names[op], name, found, expected, n, dtype);
    free(a), free(b), free(found), free(expected);
}

/* A kernel with its own target, or with one of its operands as such. */
static void check_kernel(const nc_table *t, const char *name, nc_dtype dtype, nc_op op, dice *d)
{
    size_t n = below(d, 70), size = nc_itemsize(dtype), shift = size * below(d, 9);
    char *a = memory(n * size + shift), *b = memory(n * size + shift), *found = memory(n * size + shift);
    char *expected = memory(n * size);
    fill(d, a + shift, n, dtype, 1), fill(d, b + shift, n, dtype, 1);
    reference_combine(expected, (const char *[]){a + shift, b + shift}, 2, n, dtype, op, 0);
    char *to = (char *[]){found, a, b}[below(d, 3)];
    t->combine[dtype][op](to + shift, a + shift, b + shift, n);
    check_same(op_names[op], name, to + shift, expected, n, dtype);
    free(a), free(b), free(found), free(expected);
}

/* nc_combine and nc_divide over blocks, of any number of inputs, each of which may be the target. */
static void check_combine(nc_dtype dtype, nc_op op, dice *d)
{
    size_t size = nc_itemsize(dtype), per_block = BLOCK / size;
    size_t n = below(d, 2) ? below(d, 40) : (1 + below(d, 2)) * per_block - 1 + below(d, 3);
    int inputs = 1 + (int)below(d, 5);
    n = n < MOST ? n : MOST;
    char *in[5], *out = memory(n * size), *expected = memory(n * size);
    for (int i = 0; i < inputs; i++) {
        in[i] = memory(n * size);
        fill(d, in[i], n, dtype, 1);
    }
    double divisor = op == NC_SUM && takes_divisor(dtype) && below(d, 2) ? (double)(1 + below(d, 7)) : 0;
    reference_combine(expected, (const char *const *)in, inputs, n, dtype, op, divisor);
    int target = (int)below(d, (size_t)inputs + 1);
    char *to = target == inputs ? out : in[target];
    nc_combine(to, (const char *const *)in, inputs, n, dtype, op, divisor);
    check_same("nc_combine", op_names[op], to, expected, n, dtype);
    if (takes_divisor(dtype)) {
        reference_combine(expected, (const char *[]){to}, 1, n, dtype, op, 3);
        nc_divide(to, n, dtype, 3);
        check_same("nc_divide", op_names[op], to, expected, n, dtype);
    }
    for (int i = 0; i < inputs; i++)
        free(in[i]);
    free(out), free(expected);
}

int main(int argc, char **argv)
{
    size_t rounds = argc > 1 ? (size_t)atol(argv[1]) : 1;
    find_tables();
    for (int t = 0; t < table_count; t++) {
        for (int h = 0; h < 2; h++) {
            check_widening(tables[t], table_names[t], halves[h]);
            check_rounding(tables[t], table_names[t], halves[h], rounds);
        }
        for (nc_dtype dtype = 0; dtype < NC_DTYPES; dtype++)
            for (nc_op op = 0; op < NC_OPS; op++) {
                dice d = dice_of(2, (uint64_t)(dtype * NC_OPS + op));
                int is_there = tables[t]->combine[dtype][op] != NULL, is_half_type = is_half(dtype);
                if (is_there != (reference_combines(dtype, op) && !is_half_type))
                    fail("%s: %s of %s: %s", table_names[t], op_names[op], dtype_names[dtype],
                         is_there ? "there" : "missing");
                if (is_there && nc_itemsize(dtype) == 1)
                    check_bytes(tables[t], table_names[t], dtype, op);
                for (size_t i = 0; is_there && i < 40 * rounds; i++)
                    check_kernel(tables[t], table_names[t], dtype, op, &d);
            }
    }
    for (nc_dtype dtype = 0; dtype < NC_DTYPES; dtype++)
        for (nc_op op = 0; op < NC_OPS; op++) {
            dice d = dice_of(3, (uint64_t)(dtype * NC_OPS + op));
            if (!nc_combines(dtype, op) != !reference_combines(dtype, op))
                fail("nc_combines is wrong about %s of %s", op_names[op], dtype_names[dtype]);
            for (size_t i = 0; nc_combines(dtype, op) && i < 20 * rounds; i++)
                check_combine(dtype, op, &d);
        }
    printf("%s: right\n", table_count == 2 ? "base and AVX2" : "base");
    return 0;
}
