/* Which arrays overlap, against looking at each pair. */

#include "reference.h"

#include <stdio.h>

enum { MOST = 12, ROUNDS = 200000 };

static nc_range draw_range(dice *d, const char *memory_of_all, int piece)
{
    const char *begin = memory_of_all + below(d, 100);
    return (nc_range){begin, begin + 1 + below(d, chance(d, 20) ? 60 : 8), piece};
}

static int meet(const nc_range *a, const nc_range *b) { return a->begin < b->end && b->begin < a->end; }

static int naive(const nc_range *inputs, int n, const nc_range *outs, int m)
{
    for (int i = 0; i < n; i++)
        for (int k = 0; k < m; k++)
            if (meet(&inputs[i], &outs[k]) && !(inputs[i].piece == outs[k].piece && inputs[i].begin == outs[k].begin))
                return 1;
    return 0;
}

int main(void)
{
    static char all[200];
    dice d = dice_of(9, 9);
    int seen[2] = {0};
    for (int round = 0; round < ROUNDS; round++) {
        nc_range inputs[MOST], outs[MOST];
        int n = (int)below(&d, MOST), m = (int)below(&d, MOST), are_apart = 1;
        for (int k = 0; k < m; k++) {
            outs[k] = draw_range(&d, all, k);
            for (int other = 0; other < k; other++)
                are_apart = are_apart && !meet(&outs[k], &outs[other]);
        }
        for (int i = 0; i < n; i++)
            inputs[i] = i < m && chance(&d, 60) ? outs[i] : draw_range(&d, all, i);
        int expected = naive(inputs, n, outs, m), found = nc_overlap(inputs, n, outs, m);
        if (found != expected && (are_apart || expected))
            fail("round %d: nc_overlap says %d, looking at each pair %d", round, found, expected);
        seen[expected]++;
    }
    if (!seen[0] || !seen[1])
        fail("all rounds are alike");
    printf("right\n");
    return 0;
}
