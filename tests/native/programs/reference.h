/* What the core is compared with: naive, element by element in the order of replicas; and random numbers, and failing.

   Nothing here is taken from the core but the names of dtypes and operations. */

#ifndef REFERENCE_H
#define REFERENCE_H

#include "mpidist.h"

/* Random numbers that a seed decides. */
typedef struct {
    uint64_t state;
} dice;

dice dice_of(uint64_t seed, uint64_t stream);
uint64_t draw(dice *d);
size_t below(dice *d, size_t n);       /* 0 ... n - 1 */
int chance(dice *d, int percent);

/* Print why and end the process. */
_Noreturn void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
void *memory(size_t bytes);            /* zero, or the process fails */

extern const char *const dtype_names[NC_DTYPES], *const op_names[NC_OPS];

int reference_combines(nc_dtype dtype, nc_op op);
int takes_divisor(nc_dtype dtype);

/* The value of a half, exact, and the half nearest to a float, ties to even. */
double value_of_half(uint16_t half, nc_dtype dtype);
uint16_t half_of_value(float value, nc_dtype dtype);

void reference_combine(char *d, const char *const *in, int n, size_t count, nc_dtype dtype, nc_op op, double divisor);

/* Elements for inputs: of ordinary size or, `nasty`, with NaN, infinities, zeros of both signs and the like. */
void fill(dice *d, char *to, size_t count, nc_dtype dtype, int nasty);

/* The first element that is another one, or `count`; bits of NaNs may differ. */
size_t first_difference(const char *a, const char *b, size_t count, nc_dtype dtype);

#endif
