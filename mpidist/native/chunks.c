/* Calls in chunks, for larger data.

   The elements are cut into stripes, one per reducing rank. Chunk k is the k-th slice of every stripe. For each chunk,
   a rank copies its private inputs for the other ranks' slices into a slot (fill). It reduces its own slice from the
   inputs of all ranks, in rank order, into its result and into a lane (reduce). Then it copies the slices of the other
   ranks from their lanes (take).

   Chunks are numbered across calls, and counters never decrease. A slot or lane is free when the counters of all ranks
   have passed the number of its previous chunk. */

#define _GNU_SOURCE
#include "core.h"

#include <string.h>

enum { REDUCED_AT_ONCE = 32 << 10 };

static int has_lanes(const nc *c) { return c->call.kind != NC_REDUCE_SCATTER && c->shared == NULL; }

static int stripes(const nc *c) { return moves(c) ? c->ranks : c->rails; }

/* Return the length of a stripe, which is 0 for a rank without one, and its first element. In a call that only moves
   bytes, a stripe is the whole contribution of a rank. */
static size_t stripe_of(const nc *c, int rank, size_t *begin)
{
    *begin = moves(c) || rank >= c->rails ? 0 : c->border[rank];
    return moves(c) ? bytes_of(c, rank) : rank >= c->rails ? 0 : c->border[rank + 1] - *begin;
}

/* Slices and elements ------------------------------------------------------------------------------------------ */

/* Return the length of a slice, and its first element. */
static size_t slice_of(const nc *c, int rank, uint64_t chunk, size_t *start)
{
    size_t begin, length = stripe_of(c, rank, &begin), before = smaller((size_t)(chunk - c->begin) * c->slice, length);
    *start = begin + before;
    return smaller(length - before, c->slice);
}

/* Copy flat elements to the pieces of the result. */
static void deliver(nc *c, const char *from, size_t start, size_t n)
{
    for (size_t e = start, elements; e < start + n; e += elements) {
        int piece = piece_with(c, e, start + n, &elements);
        core_copy(output_at(c, piece, e), from + (e - start) * c->itemsize, elements * c->itemsize, streams(c));
    }
}

/* The address of an element that replica q of rank r contributes. `slot` holds the private elements of rank r for this
   rank's slice, which starts at element `start`. */
static const char *input_at(const nc *c, int r, int q, int piece, size_t element, size_t start, const char *slot)
{
    if (r == c->rank)
        return own_input_at(c, q, piece, element);
    int64_t location = location_of_input(c, r, piece, q);
    if (location <= MAPPED)
        return address_at(c, r, location) + (element - c->first[piece]) * c->itemsize;
    return slot + (size_t)q * c->slice * c->itemsize * (size_t)c->rails + (element - start) * c->itemsize;
}

static char *target(nc *c, int piece, size_t element, size_t start, uint64_t chunk)
{
    if (c->shared != NULL)
        return c->shared + element * c->itemsize;
    if (c->on_wire || c->call.flags & NC_UNWANTED)
        return lane(c, c->rank, chunk) + (element - start) * c->itemsize;
    return output_at(c, piece, element);
}

/* Reduce this rank's slice in blocks, so that the copy to the lane reads from the cache. */
static void reduce_slice(nc *c, uint64_t chunk, size_t start, size_t n)
{
    _Alignas(64) char streamed[REDUCED_AT_ONCE];
    char *own_lane = has_lanes(c) ? lane(c, c->rank, chunk) : NULL;
    double divisor = c->on_wire ? 0 : c->call.divisor;
    for (size_t e = start, m; e < start + n; e += m) {
        int piece = piece_with(c, e, start + n, &m), inputs = 0;
        m = smaller(m, REDUCED_AT_ONCE / c->itemsize);
        for (int r = 0; r < c->ranks; r++) {
            const char *slot = c->slots[r] + chunk_at(c, chunk) + (size_t)c->rank * c->slice * c->itemsize;
            for (int q = 0; q < replicas_of(c, r); q++)
                c->combined[inputs++] = input_at(c, r, q, piece, e, start, slot);
        }
        char *to = target(c, piece, e, start, chunk);
        char *shown = own_lane == NULL ? to : own_lane + (e - start) * c->itemsize;
        int in_place = to == input_at(c, c->rank, 0, piece, e, start, NULL);
        if (streams(c) && to != shown && !in_place) {
            nc_combine(shown, c->combined, inputs, m, c->call.dtype, c->call.op, divisor);
            core_copy(to, shown, m * c->itemsize, 1);
        } else if (c->whole >= 4 * (size_t)STREAMED_BYTES && own_lane == NULL && !in_place) {
            nc_combine(streamed, c->combined, inputs, m, c->call.dtype, c->call.op, divisor);
            core_copy(to, streamed, m * c->itemsize, 1);
        } else {
            nc_combine(to, c->combined, inputs, m, c->call.dtype, c->call.op, divisor);
            if (shown != to)
                memcpy(shown, to, m * c->itemsize);
        }
    }
}

/* One step of a chunk ------------------------------------------------------------------------------------------- */

static void fill_slot(nc *c, uint64_t chunk)
{
    char *slot = c->slots[c->rank] + chunk_at(c, chunk);
    for (int stripe = 0; stripe < c->rails; stripe++) {
        size_t start, n = slice_of(c, stripe, chunk, &start);
        if (stripe == c->rank || n == 0)
            continue;
        for (int q = 0; q < c->call.replicas; q++) {
            char *to = slot + (size_t)(q * c->rails + stripe) * c->slice * c->itemsize;
            for (size_t e = start, elements; e < start + n; e += elements) {
                int piece = piece_with(c, e, start + n, &elements);
                if (location_of_input(c, c->rank, piece, q) > MAPPED)
                    memcpy(to + (e - start) * c->itemsize, own_input_at(c, q, piece, e), elements * c->itemsize);
            }
        }
    }
}

static int try_fill(nc *c)
{
    /* The slot is free when all ranks have read its previous chunk. */
    if (!c->any_private || c->filled == c->end)
        return 0;
    if (c->filled >= NC_DEPTH && (c->reduced < c->filled - NC_DEPTH + 1 ||
                                  !reached(c, c->on_wire ? READ : REDUCED, c->filled - NC_DEPTH + 1, c->ranks)))
        return 0;
    fill_slot(c, c->filled);
    count(c, FILLED, ++c->filled);
    return 1;
}

static nc_state try_reduce(nc *c)
{
    uint64_t k = c->reduced, depth = (uint64_t)c->sizes.lanes;
    if (k == c->end || (c->any_private && !(c->filled > k && reached(c, FILLED, k + 1, c->ranks))))
        return NC_NOT_YET;
    uint64_t free = k + 1 - depth; /* the lane is free when all ranks have taken this many chunks */
    if ((has_lanes(c) || c->on_wire) && k >= depth && !(c->taken >= free && reached(c, TAKEN, free, c->ranks)))
        return NC_NOT_YET;
    c->reduced++;
    size_t start, n = slice_of(c, c->rank, k, &start);
    if (moves(c) && n)
        memcpy(lane(c, c->rank, k), c->in[0] + start, n);
    else if (n)
        reduce_slice(c, k, start, n);
    if (c->on_wire) {
        count(c, READ, c->reduced);
        if ((n && !moves(c)) || c->crossed != k) { /* empty slices must also wait for earlier ones */
            c->report.slice = (nc_slice){(size_t)(k - c->begin), start, n, SKEW + lane_at(c, k)};
            return NC_SLICE;
        }
        c->crossed = c->reduced;
    }
    count(c, REDUCED, c->reduced);
    return NC_MOVED;
}

/* Copy this rank's part out of another rank's lane, which holds bytes start to end of that rank's input. */
static void copy_part(nc *c, int rank, uint64_t chunk, size_t start, size_t end)
{
    size_t first, n = part_from(c, rank, &first), begin = first > start ? first : start;
    if (end > first + n)
        end = first + n;
    if (begin < end)
        core_copy(c->piece[0].out + c->border[rank] + (begin - first), lane(c, rank, chunk) + (begin - start),
                  end - begin, streams(c));
}

static int try_copy_out(nc *c)
{
    uint64_t k = c->taken, own = c->on_wire ? c->crossed : c->reduced;
    if (k == c->end || own <= k || !reached(c, REDUCED, k + 1, stripes(c)))
        return 0;
    if (has_lanes(c) && !(c->call.flags & NC_UNWANTED)) {
        for (int s = 0; s < stripes(c); s++) {
            size_t start, n = slice_of(c, s, k, &start);
            if (n == 0 || (s == c->rank && !c->on_wire && !moves(c)))
                continue;
            if (moves(c))
                copy_part(c, s, k, start, start + n);
            else
                deliver(c, lane(c, s, k), start, n);
        }
    }
    count(c, TAKEN, ++c->taken);
    return 1;
}

static nc_state watched(nc *c, int what, uint64_t chunk, int64_t since, nc_state state)
{
    if (!(c->call.flags & NC_WATCH) || state == NC_SLICE)
        return state;
    c->report.event = (nc_event){what, (size_t)(chunk - c->begin), now() - since};
    return NC_CHUNK;
}

static nc_state move_chunks(nc *c)
{
    int64_t since = c->call.flags & NC_WATCH ? now() : 0;
    if (c->taken == c->end) {
        /* Peers may still read this rank's slots and lanes, which the next call does not reuse before. They no longer
           read its inputs in place, because all chunks are reduced. */
        c->chunks = c->end;
        return core_end(c, NC_DONE);
    }
    if (try_fill(c))
        return watched(c, 0, c->filled - 1, since, NC_MOVED);
    nc_state state = try_reduce(c);
    if (state != NC_NOT_YET)
        return watched(c, 1, c->reduced - 1, since, state);
    if (try_copy_out(c))
        return watched(c, 2, c->taken - 1, since, NC_MOVED);
    return NC_NOT_YET;
}

int core_start_chunks(nc *c)
{
    size_t fits = c->sizes.chunk / ((size_t)c->rails * (size_t)c->most_replicas * c->itemsize);
    size_t slice = c->call.slice ? c->call.slice : c->sizes.usual / c->itemsize, longest = 0;
    for (int r = 0; r < stripes(c); r++) {
        size_t begin, length = stripe_of(c, r, &begin);
        longest = length > longest ? length : longest;
    }
    if (moves(c))
        fits = c->sizes.slice;
    c->slice = smaller(smaller(slice, c->sizes.slice / c->itemsize), fits);
    if (c->slice == 0)
        return 0;
    /* Slices in a slot are adjacent. Keep each aligned to a cache line. */
    if (c->slice > in_cache_line(c))
        c->slice -= c->slice % in_cache_line(c);
    c->begin = c->filled = c->reduced = c->crossed = c->taken = c->chunks;
    c->end = c->begin + (longest + c->slice - 1) / c->slice;
    c->next = move_chunks;
    return 1;
}

void nc_crossed(nc *c, size_t chunk)
{
    uint64_t k = c->begin + chunk;
    size_t start, n = slice_of(c, c->rank, k, &start);
    if (c->call.divisor != 0 && n) {
        char *at = c->shared != NULL ? c->shared + start * c->itemsize : lane(c, c->rank, k);
        nc_divide(at, n, c->call.dtype, c->call.divisor);
    }
    c->crossed = k + 1;
    count(c, REDUCED, c->crossed);
}
