/* The memory of ranks that are threads, and the wire between two nodes of them. */

#ifndef WORLDS_H
#define WORLDS_H

#include "plans.h"

#include <stdatomic.h>

enum { WIRE_SLOTS = 16 };

/* What a rank has put on the wire to the rank of the same number on the other node. */
typedef struct {
    _Atomic uint64_t posted;
    char *data[WIRE_SLOTS];
} mailbox;

typedef struct {
    char *control, *slots[MOST_RANKS], *own[MOST_RANKS], *common, *expected[2];
    size_t own_bytes;
    int may_share[2][MOST_RANKS];         /* of the calls in turn */
} node_memory;

typedef struct {
    world_plan plan;
    node_memory node[NODES];
    mailbox wire[NODES][MOST_RANKS];
} world;

world *make_world(world_plan plan);
void free_world(world *w);

#endif
