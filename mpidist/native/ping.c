/* Latency between the cores of two ranks. They increment their counters in turn, each after reading the other's.

   Cores that share a cache take 35 to 50 ns one way, others 150 ns and more. A hypervisor may move ranks between such
   cores while a program runs, and only a measurement detects it. */

#include "core.h"

/* The fastest of several batches counts: an interrupt slows one of them. */
enum { BATCH = 10, POLLS_BETWEEN_CLOCK_READS = 64 };

int64_t nc_ping(nc *c, int other, int batches, int64_t limit)
{
    uint64_t rounds = (uint64_t)batches * BATCH + 1, before = c->pings;
    int64_t start = 0, fastest = INT64_MAX, deadline = now() + limit;
    c->pings += rounds;
    if (other < 0 || other >= c->ranks)
        return 0;
    for (uint64_t i = 1; i <= rounds; i++) {
        uint64_t turn = before + i;
        if (c->rank < other)
            count(c, PINGED, turn);
        for (int polls = 1; counted(c, other, PINGED) < turn; polls++)
            if (polls % POLLS_BETWEEN_CLOCK_READS == 0 && now() > deadline) {
                count(c, PINGED, before + rounds); /* so that the other rank does not wait for this one */
                return 0;
            }
        if (i < rounds && counted(c, other, PINGED) > turn)
            return 0; /* the other rank timed out */
        if (c->rank > other)
            count(c, PINGED, turn);
        if (i % BATCH == 1) { /* the first time, both ranks have only just arrived */
            int64_t end = now();
            if (i > 1 && end - start < fastest)
                fastest = end - start;
            start = end;
        }
    }
    return fastest / (2 * BATCH);
}
