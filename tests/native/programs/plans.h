/* What the ranks of a test are, and what each of their calls does: all of it follows from a seed. */

#ifndef PLANS_H
#define PLANS_H

#include "mpidist.h"
#include "reference.h"

/* More inputs than a rank can tell the places of, in some calls. */
enum { NODES = 2, MOST_RANKS = 8, MOST_PIECES = 800, MOST_REPLICAS = 3 };

/* One or two nodes; only with two are there slices that cross between them. */
typedef struct {
    uint64_t seed;
    int nodes, ranks[NODES], rails, spins, reads_memory, calls;
    size_t most_bytes;            /* of a rank's arrays in one call */
    size_t push_from[MOST_RANKS];
    int pushes_always[MOST_RANKS];
    nc_sizes sizes;
} world_plan;

typedef enum { NEW, IN_PLACE, LATER } result_place; /* LATER: told when all have met */

typedef struct {
    int number;
    nc_call call;                 /* but for what each rank decides by itself */
    size_t count[MOST_PIECES];
    int replicas[MOST_RANKS];     /* of the ranks of one node; of ALL_GATHER, see lengths */
    size_t length[MOST_RANKS];    /* where bytes are moved: of each rank of one node */
    int64_t parts[MOST_RANKS][MOST_RANKS + 1]; /* ALL_TO_ALL: of each rank; REDUCE_SCATTER: the first, for all */
    int deals_equally[MOST_RANKS]; /* ALL_TO_ALL, of each rank */
    int has_parts;                /* REDUCE_SCATTER */
    int nasty, stranger;          /* the rank that passes another id, or -1 */
} call_plan;

/* What one rank decides by itself. */
typedef struct {
    int flags;
    result_place place;
    int in_own_memory;            /* per cent of its inputs that lie in memory of nc_segment */
    int out_in_own_memory;        /* whether its results do */
} rank_plan;

world_plan plan_world(uint64_t seed, size_t most_bytes, int reads_memory);
void plan_call(const world_plan *world, int node, int number, call_plan *call);
rank_plan plan_rank(const world_plan *world, const call_plan *call, int node, int rank);

size_t count_of(const call_plan *call);

/* Whether ranks give bytes to one another. */
int moves_bytes(const call_plan *call);

/* Bytes that one rank of a node gives another one in ALL_TO_ALL. */
size_t part_bytes(const call_plan *call, int from, int to);

/* Fill one input with what a replica gives. */
void fill_input(const world_plan *world, const call_plan *call, int node, int rank, int piece, int replica, char *to);
size_t input_bytes(const call_plan *call, int rank, int piece);

/* What a node's ranks come to, flat: the reduction before it is divided, or all that is gathered. */
void expect_of_node(const world_plan *world, const call_plan *call, int node, char *to);

/* The result on a node. */
void expect(const world_plan *world, const call_plan *call, int node, char *to);
size_t result_bytes(const world_plan *world, const call_plan *call, int node);

int64_t note_of(const world_plan *world, int number, int rank);

void describe(const world_plan *world, const call_plan *call, char *text, size_t bytes);

#endif
