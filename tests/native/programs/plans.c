/* Plans of calls, and what they have to come to; see plans.h. */

#include "plans.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t one_of(dice *d, size_t n, const size_t *values) { return values[below(d, n)]; }
#define ONE_OF(d, ...) one_of(d, sizeof((size_t[]){__VA_ARGS__}) / sizeof(size_t), (size_t[]){__VA_ARGS__})

/* Large enough for results past the cache, and for memory that is read in parts. */
static int is_large(const world_plan *w) { return w->most_bytes >= 4 << 20; }

world_plan plan_world(uint64_t seed, size_t most_bytes, int reads_memory)
{
    dice d = dice_of(seed, 1);
    world_plan w = {.seed = seed, .nodes = chance(&d, 30) ? 2 : 1, .reads_memory = reads_memory};
    w.most_bytes = most_bytes;
    for (int n = 0; n < w.nodes; n++)
        w.ranks[n] = w.nodes == 1 ? 2 + (int)below(&d, is_large(&w) ? 2 : 7) : 1 + (int)below(&d, 4);
    int fewest = w.nodes == 2 && w.ranks[1] < w.ranks[0] ? w.ranks[1] : w.ranks[0];
    w.rails = w.nodes == 1 ? w.ranks[0] : 1 + (int)below(&d, (size_t)fewest);
    w.spins = chance(&d, 50) ? 0 : (int)ONE_OF(&d, 1, 10, 300);
    w.calls = is_large(&w) ? 8 : 40 + (int)below(&d, 60);
    /* A slot holds at least an element of 32 bytes for each stripe and replica. */
    w.sizes = (nc_sizes){ONE_OF(&d, 0, 100, 1000, 4096, 40000), ONE_OF(&d, 800, 4096, 16384, 60000),
                         ONE_OF(&d, 64, 500, 4096, 16384), 1 + (int)below(&d, 4), ONE_OF(&d, 32, 500, 3000, 128 << 10)};
    if (is_large(&w))
        w.sizes = (nc_sizes){256 << 10, 1 << 20, 128 << 10, 4, 128 << 10};
    int pushes = chance(&d, 70), differ = chance(&d, 30); /* ranks may want to push from other sizes */
    for (int r = 0; r < MOST_RANKS && pushes; r++) {
        w.push_from[r] = r && !differ ? w.push_from[0] : ONE_OF(&d, 1, 1, 200, 20000);
        w.pushes_always[r] = r && !differ ? w.pushes_always[0] : chance(&d, 80);
    }
    return w;
}

/* Sizes about those at which another way is taken. */
static size_t draw_bytes(const world_plan *w, dice *d, size_t size, int ranks, int replicas)
{
    size_t r = (size_t)ranks, q = (size_t)replicas, chunk = w->sizes.chunk, slice = w->sizes.slice;
    size_t bytes = ONE_OF(d, 0, size, 96, 96 / q, w->sizes.small, w->sizes.small / q, (256 << 10) / r, slice, slice * r,
                          chunk / q, 2 * chunk, 5 * chunk, 8 << 10, 32 << 10, below(d, 2000), below(d, w->most_bytes));
    if (is_large(w))
        bytes = ONE_OF(d, 128 << 10, 1 << 20, 2 << 20, 8 << 20, w->most_bytes);
    bytes += size * below(d, 3);
    bytes = bytes > size ? bytes - size : bytes;
    return bytes < w->most_bytes ? bytes : w->most_bytes;
}

static void cut_pieces(call_plan *p, dice *d, size_t count)
{
    p->call.pieces = chance(d, 60) ? 1 : 1 + (int)below(d, chance(d, 5) ? MOST_PIECES : 40);
    for (int i = 0; i < p->call.pieces - 1; i++) {
        p->count[i] = chance(d, 20) ? 0 : below(d, count / 2 + 2);
        p->count[i] = p->count[i] < count ? p->count[i] : count;
        count -= p->count[i];
    }
    p->count[p->call.pieces - 1] = count;
}

static void plan_gather(const world_plan *w, int node, call_plan *p, dice *d)
{
    int root = chance(d, 30) ? (int)below(d, (size_t)w->ranks[node]) : -1, are_equal = chance(d, 40);
    p->call.dtype = NC_U8, p->call.pieces = 1;
    for (int r = 0; r < w->ranks[node]; r++) {
        p->replicas[r] = 1;
        if (root < 0 || r == root)
            p->length[r] = r && root < 0 && are_equal ? p->length[0] : draw_bytes(w, d, 1, 1, 1);
    }
}

/* Cut so much into a part for each rank, of which some are empty. */
static void cut_parts(dice *d, int64_t *parts, int ranks, size_t whole)
{
    parts[ranks] = (int64_t)whole;
    for (int r = ranks - 1; r > 0; r--)
        parts[r] = chance(d, 15) ? (chance(d, 50) ? 0 : parts[r + 1]) : (int64_t)below(d, (size_t)parts[r + 1] + 1);
}

static void cut_equally(int64_t *parts, int ranks, size_t whole)
{
    for (int r = 0; r <= ranks; r++)
        parts[r] = (int64_t)(whole * (size_t)r / (size_t)ranks);
}

static void plan_deal(const world_plan *w, int node, call_plan *p, dice *d)
{
    plan_gather(w, node, p, d);
    for (int r = 0; r < w->ranks[node]; r++) {
        p->deals_equally[r] = chance(d, 40);
        if (p->deals_equally[r])
            cut_equally(p->parts[r], w->ranks[node], p->length[r]);
        else
            cut_parts(d, p->parts[r], w->ranks[node], p->length[r]);
    }
}

static void plan_reduction(const world_plan *w, int node, call_plan *p, dice *d)
{
    do {
        p->call.dtype = (nc_dtype)below(d, NC_DTYPES), p->call.op = (nc_op)below(d, NC_OPS);
    } while (!nc_combines(p->call.dtype, p->call.op) || (is_large(w) && nc_itemsize(p->call.dtype) < 8));
    size_t size = nc_itemsize(p->call.dtype);
    int most = chance(d, 60) ? 1 : 1 + (int)below(d, MOST_REPLICAS), differ = chance(d, 50);
    dice own = dice_of(draw(d), (uint64_t)node);
    for (int r = 0; r < w->ranks[node]; r++)
        p->replicas[r] = differ ? 1 + (int)below(&own, (size_t)most) : most;
    cut_pieces(p, d, draw_bytes(w, d, size, w->rails, most) / size);
    if (p->call.op == NC_SUM && takes_divisor(p->call.dtype) && chance(d, 50))
        p->call.divisor = (double)ONE_OF(d, 1, 2, 3, 7);
    p->call.slice = chance(d, 70) ? 0 : 1 + below(d, 3000);
    if (w->nodes > 1 && most > 1) {
        /* What fits into slots and lanes on each node. */
        size_t fits = w->sizes.chunk / ((size_t)w->rails * (size_t)most * size), lane = w->sizes.slice / size;
        fits = fits < lane ? fits : lane;
        p->call.slice = p->call.slice && p->call.slice < fits ? p->call.slice : fits;
    }
}

void plan_call(const world_plan *w, int node, int number, call_plan *p)
{
    dice d = dice_of(w->seed, 1000 + (uint64_t)number);
    memset(p, 0, sizeof *p);
    size_t kind = below(&d, 100), barred = w->nodes > 1;
    p->number = number;
    p->call.kind = kind < 10               ? NC_MEET
                   : kind < 27             ? NC_ALL_GATHER
                   : kind < 42             ? NC_ALL_TO_ALL
                   : kind < 60 && !barred  ? NC_REDUCE_SCATTER
                                           : NC_ALL_REDUCE;
    p->call.id = draw(&d);
    p->nasty = chance(&d, 30);
    int is_alone = w->ranks[0] == 1 || (w->nodes > 1 && w->ranks[1] == 1);
    p->stranger = chance(&d, 4) && !is_alone ? (int)below(&d, MOST_RANKS) % w->ranks[node] : -1;
    p->call.flags = chance(&d, 40) ? NC_SHARE : 0;
    if (p->call.kind == NC_ALL_GATHER)
        plan_gather(w, node, p, &d);
    else if (p->call.kind == NC_ALL_TO_ALL)
        plan_deal(w, node, p, &d);
    else if (p->call.kind != NC_MEET)
        plan_reduction(w, node, p, &d);
    p->call.parts = NULL; /* of each rank: prepare */
    p->has_parts = p->call.kind == NC_REDUCE_SCATTER;
    if (p->has_parts && chance(&d, 50))
        cut_parts(&d, p->parts[0], w->ranks[node], count_of(p));
    else if (p->has_parts)
        cut_equally(p->parts[0], w->ranks[node], count_of(p));
    if (p->call.kind != NC_ALL_REDUCE)
        p->call.flags = 0;
}

rank_plan plan_rank(const world_plan *w, const call_plan *p, int node, int rank)
{
    dice d = dice_of(w->seed, (uint64_t)(p->number * NODES + node) * 100 + (uint64_t)rank + 1000000);
    rank_plan own = {.flags = p->call.flags, .place = (result_place)below(&d, 3)};
    /* Where all ranks' inputs lie in such memory, they may share a result. */
    own.in_own_memory = p->call.flags & NC_SHARE ? (p->number % 3 ? 100 : 90) : (int)ONE_OF(&d, 0, 0, 50, 100);
    if (own.place == LATER && !(own.flags & NC_SHARE))
        own.flags |= NC_STOP;
    if (own.flags & NC_SHARE)
        own.place = LATER;
    if (chance(&d, 10) && p->call.kind != NC_REDUCE_SCATTER)
        own.flags |= NC_UNWANTED;
    if (chance(&d, 30))
        own.flags |= NC_WATCH;
    if (chance(&d, 50) && moves_bytes(p))
        own.flags |= NC_EQUAL;
    own.out_in_own_memory = own.in_own_memory == 100 && chance(&d, 70);
    if (own.place == IN_PLACE && p->call.kind == NC_REDUCE_SCATTER)
        own.place = NEW;
    return own;
}

size_t count_of(const call_plan *p)
{
    size_t count = 0;
    for (int i = 0; i < p->call.pieces; i++)
        count += p->count[i];
    return count;
}

int moves_bytes(const call_plan *p) { return p->call.kind == NC_ALL_GATHER || p->call.kind == NC_ALL_TO_ALL; }

size_t input_bytes(const call_plan *p, int rank, int piece)
{
    return moves_bytes(p) ? p->length[rank] : p->count[piece] * nc_itemsize(p->call.dtype);
}

void fill_input(const world_plan *w, const call_plan *p, int node, int rank, int piece, int replica, char *to)
{
    uint64_t place = (uint64_t)((node * MOST_RANKS + rank) * MOST_PIECES + piece) * MOST_REPLICAS + (uint64_t)replica;
    dice d = dice_of(w->seed ^ 0xABCD, (uint64_t)p->number * 100000 + place);
    fill(&d, to, input_bytes(p, rank, piece) / nc_itemsize(p->call.dtype), p->call.dtype, p->nasty);
}

static void gather(const world_plan *w, const call_plan *p, int node, char *to)
{
    for (int r = 0; r < w->ranks[node]; to += p->length[r], r++)
        fill_input(w, p, node, r, 0, 0, to);
}

void expect_of_node(const world_plan *w, const call_plan *p, int node, char *to)
{
    if (moves_bytes(p)) {
        gather(w, p, node, to);
        return;
    }
    size_t size = nc_itemsize(p->call.dtype);
    for (int i = 0; i < p->call.pieces; to += p->count[i] * size, i++) {
        char *in[MOST_RANKS * MOST_REPLICAS];
        int n = 0;
        for (int r = 0; r < w->ranks[node]; r++)
            for (int q = 0; q < p->replicas[r]; q++) {
                in[n] = memory(p->count[i] * size);
                fill_input(w, p, node, r, i, q, in[n++]);
            }
        reference_combine(to, (const char *const *)in, n, p->count[i], p->call.dtype, p->call.op,
                          w->nodes == 1 ? p->call.divisor : 0);
        while (n)
            free(in[--n]);
    }
}

size_t result_bytes(const world_plan *w, const call_plan *p, int node)
{
    size_t bytes = 0;
    if (!moves_bytes(p))
        return count_of(p) * nc_itemsize(p->call.dtype);
    for (int r = 0; r < w->ranks[node]; r++)
        bytes += p->length[r];
    return bytes;
}

size_t part_bytes(const call_plan *p, int from, int to)
{
    return (size_t)(p->parts[from][to + 1] - p->parts[from][to]);
}

void expect(const world_plan *w, const call_plan *p, int node, char *to)
{
    expect_of_node(w, p, node, to);
    if (w->nodes == 1 || p->call.kind != NC_ALL_REDUCE)
        return;
    /* Of 16 bits, what crosses between nodes has been rounded. */
    call_plan there;
    plan_call(w, 1 - node, p->number, &there);
    size_t count = count_of(p);
    char *other = memory(result_bytes(w, p, node));
    expect_of_node(w, &there, 1 - node, other);
    const char *both[2] = {node == 0 ? to : other, node == 0 ? other : to};
    reference_combine(to, both, 2, count, p->call.dtype, p->call.op, 0);
    if (p->call.divisor != 0)
        reference_combine(to, (const char *[]){to}, 1, count, p->call.dtype, p->call.op, p->call.divisor);
    free(other);
}

int64_t note_of(const world_plan *w, int number, int rank)
{
    dice d = dice_of(w->seed ^ 0x4321, (uint64_t)(number * MOST_RANKS + rank));
    return (int64_t)draw(&d);
}

void describe(const world_plan *w, const call_plan *p, char *text, size_t bytes)
{
    static const char *const kinds[] = {"meeting", "all_reduce", "reduce_scatter", "all_gather", "all_to_all"};
    snprintf(text, bytes,
             "seed %llu, call %d: %s %s of %s, %zu elements in %d pieces, replicas %d %d, divisor %g, "
             "slice %zu, flags %d; %d + %d ranks, %d rails, small %zu, chunk %zu, slice %zu x %d, spins %d%s",
             (unsigned long long)w->seed, p->number, kinds[p->call.kind], op_names[p->call.op],
             dtype_names[p->call.dtype], count_of(p), p->call.pieces, p->replicas[0], p->replicas[1], p->call.divisor,
             p->call.slice, p->call.flags, w->ranks[0], w->ranks[1], w->rails, w->sizes.small,
             w->sizes.chunk, w->sizes.slice, w->sizes.lanes, w->spins, w->reads_memory ? ", reads memory" : "");
}
