/* Calls: headers, the handshake, and the choice of an algorithm.

   Small data are published inline, on the page of the header or in one of two small slots, which alternate like the
   pages. Such a call consists of one handshake. Larger data move in chunks (chunks.c), are pushed (push.c), or are read
   from the memory of other ranks without a copy. */

#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#define RELAX() _mm_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() ((void)0)
#endif

/* Copying private data up to this size into a slot is faster than process_vm_readv. */
enum { SMALLEST_READ = 8 << 10, READ_AT_ONCE = 2 << 20 };
enum { SHOWN_BY_ALL = 256 << 10 };
enum { POLLS_BETWEEN_CLOCK_READS = 32 };
/* Between nodes an early yield costs little, and other ranks or the network stack may need the core. */
enum { SPINS_OVER_NODES = 20 };

static page *next_page(nc *c) { return &c->rows[c->rank].pages[(c->meeting + 1) & 1]; }
size_t nc_length(const nc *c, int rank) { return part_from(c, rank, &(size_t){0}); }
int64_t nc_note(const nc *c, int rank) { return page_of(c, rank)->note; }
int nc_is_on_wire(const nc *c) { return c->on_wire; }
const nc_report *nc_report_of(const nc *c) { return &c->report; }
nc_piece *nc_pieces(nc *c) { return c->piece; }
const char **nc_inputs(nc *c) { return c->in; }
size_t nc_control_bytes(int ranks) { return sizeof(row) * (size_t)ranks; }

nc *nc_open(void *control, int rank, int ranks, int spins, const int32_t *pids, int on_wire, int rails)
{
    nc *c = calloc(1, sizeof *c);
    if (c == NULL)
        return NULL;
    /* Avoids the offsets of arrays within a page, see SKEW. */
    size_t offset = (PAGE - (uintptr_t)c->memory % PAGE + SKEW) % PAGE;
    c->scratch = c->memory + offset;
    c->rows = control;
    c->opened = now(), c->opened_ticks = ticks();
    c->rank = rank, c->ranks = ranks, c->spins = spins, c->on_wire = on_wire, c->rails = rails;
    if (pids != NULL) {
        memcpy(c->pid, pids, sizeof *pids * (size_t)ranks);
        c->pids = c->pid;
    }
    return c;
}

void nc_close(nc *c)
{
    if (c != NULL)
        leader_close(c->leader);
    free(c);
}

static nc_state follow(nc *c);
static nc_state meet(nc *c);

static int is_over_nodes(const nc *c) { return c->on_wire && c->call.flags & NC_OVER_NODES; }

/* Before the handshake ----------------------------------------------------------------------------------------- */

/* Every rank reads the inline data of all ranks, so the limit shrinks with their number. */
static size_t inline_limit(const nc *c) { return smaller((size_t)SHOWN_BY_ALL / (size_t)c->ranks, c->sizes.small); }

/* Publish small data on the page of the next header or in its small slot. Return the flag SHOWN, or 0. */
static int publish_inline(nc *c, page *p)
{
    size_t all = c->bytes * (size_t)c->call.replicas;
    char *to = p->data;
    if (c->on_wire && !(is_over_nodes(c) && c->rank > 0))
        return 0;
    if (all > IN_PAGE) {
        size_t most = c->call.kind == NC_ALL_REDUCE && !c->on_wire ? inline_limit(c) : c->sizes.small;
        if (moves(c) && c->pids != NULL && most > SMALLEST_READ)
            most = SMALLEST_READ;
        if (all > most)
            return 0;
        to = c->slots[c->rank] + ((c->meeting + 1) & 1) * c->sizes.small;
    }
    for (int q = 0; q < c->call.replicas; q++)
        for (int i = 0; i < c->call.pieces; i++) {
            size_t bytes = c->piece[i].count * c->itemsize;
            memcpy(to, c->in[i * c->call.replicas + q], bytes);
            to += bytes;
        }
    return SHOWN;
}

/* Publish the locations of the inputs. Return the flags. The result may be shared if all but small arrays are in memory
   that all ranks map. */
static int publish_locations(nc *c, page *p)
{
    int any = 0, share = c->call.flags & NC_SHARE, is_candidate = core_is_push_candidate(c), mapped = 1;
    if (c->inputs > NC_WORDS)
        return 0;
    for (int i = 0; i < c->inputs; i++) {
        size_t bytes = c->piece[i / c->call.replicas].count * c->itemsize;
        int64_t location = core_place_of(c, c->in[i], bytes);
        mapped = mapped && location <= MAPPED;
        if (location == PRIVATE && (moves(c) || is_candidate) && c->pids != NULL)
            location = (int64_t)(intptr_t)c->in[i];
        p->words[i] = location;
        any = any || location != PRIVATE;
        share = share && (location <= MAPPED || bytes < NC_SMALL_ARRAY);
    }
    int push = is_candidate ? core_publish_push(c, p->words + c->inputs, mapped) : 0;
    return (any ? TOLD_PLACES | (share ? SHARES : 0) | (mapped ? ALL_MAPPED : 0) : 0) | push;
}

static void publish_header(nc *c)
{
    page *p = next_page(c);
    int flags = 0;
    if (c->call.kind != NC_MEET) {
        for (int r = 0; r <= c->ranks && c->call.kind == NC_ALL_TO_ALL; r++)
            p->words[1 + r] =
                c->call.parts != NULL ? c->call.parts[r] : (int64_t)(c->bytes * (size_t)r / (size_t)c->ranks);
        flags = publish_inline(c, p);
        if (!flags && !is_over_nodes(c))
            flags = publish_locations(c, p);
    }
    p->id = c->call.id;
    p->note = c->call.note;
    p->flags = (unsigned)flags, p->kind = c->call.kind, p->replicas = (unsigned)c->call.replicas, p->bytes = c->bytes;
    c->meeting++;
    c->waits = 0, c->arrived = ticks();
    atomic_store_explicit(&p->met, c->meeting, memory_order_release);
    c->came = 0;
    c->next = is_over_nodes(c) && c->rank > 0 ? follow : meet;
}

/* After the handshake ------------------------------------------------------------------------------------------ */

/* The inline data of a rank, replica after replica, on the page or in the slot. */
static char *inline_data(const nc *c, int rank)
{
    size_t all = bytes_of(c, rank) * (size_t)replicas_of(c, rank);
    return all <= IN_PAGE ? page_of(c, rank)->data : c->slots[rank] + small_at(c);
}

static void cut_stripes(nc *c)
{
    size_t ranks = (size_t)c->rails, unit = in_cache_line(c);
    if (moves(c)) {
        for (int r = 0; r < c->ranks; r++)
            c->border[r + 1] = c->border[r] + nc_length(c, r);
        c->whole = c->border[c->ranks];
        return;
    }
    c->whole = c->bytes;
    if (c->call.kind == NC_REDUCE_SCATTER) {
        for (size_t r = 0; r <= ranks; r++)
            c->border[r] = (size_t)c->call.parts[r];
        return;
    }
    size_t units = (c->count + unit - 1) / unit, each = units / ranks, more = units % ranks;
    for (size_t r = 0; r <= ranks; r++) {
        size_t before = (r * each + (r < more ? r : more)) * unit;
        c->border[r] = before < c->count ? before : c->count;
    }
}

/* Whether the result is as long as if all ranks contributed like this rank, with this rank's part at that offset. */
static int contributes_equally(const nc *c)
{
    if (c->call.kind == NC_ALL_TO_ALL)
        return c->whole == c->bytes;
    return c->whole == c->bytes * (size_t)c->ranks && c->border[c->rank] == c->bytes * (size_t)c->rank;
}

/* Whether all ranks of the node have started the same call. */
static int all_agree(const nc *c)
{
    int is_reduction = c->call.kind != NC_MEET && !moves(c);
    for (int r = 0; r < c->ranks; r++)
        if (page_of(c, r)->id != c->call.id || page_of(c, r)->kind != c->call.kind ||
            (is_reduction && bytes_of(c, r) != c->bytes))
            return 0;
    return 1;
}

/* Inline data and direct reads ---------------------------------------------------------------------------------- */

/* Reduce the inline data of the node into the result, or into `flat` without division. */
static void reduce_inline(nc *c, char *flat)
{
    size_t e = 0, end = c->count, elements;
    double divisor = flat == NULL ? c->call.divisor : 0;
    if (c->call.kind == NC_REDUCE_SCATTER)
        e = c->border[c->rank], end = c->border[c->rank + 1];
    for (; e < end; e += elements) {
        int piece = piece_with(c, e, end, &elements), inputs = 0;
        for (int r = 0; r < c->ranks; r++)
            for (int q = 0; q < replicas_of(c, r); q++) /* this rank's own input is in its cache */
                c->combined[inputs++] = r == c->rank ? own_input_at(c, q, piece, e)
                                                     : inline_data(c, r) + (size_t)q * c->bytes + e * c->itemsize;
        char *to = flat != NULL ? flat + e * c->itemsize : output_at(c, piece, e);
        nc_combine(to, c->combined, inputs, elements, c->call.dtype, c->call.op, divisor);
    }
}

/* Copy `n` bytes that a rank sends to this one, from offset `at` on. Return 0, or -1 with errno. */
static int copy_from(nc *c, int rank, size_t at, size_t n)
{
    size_t begin;
    part_from(c, rank, &begin);
    begin += at;
    char *to = c->piece[0].out + c->border[rank] + at;
    int64_t location = words_of(c, rank)[0];
    if (rank == c->rank) {
        if (to != c->in[0] + begin)
            core_copy(to, c->in[0] + begin, n, streams(c));
    } else if (flags_of(c, rank) & SHOWN) {
        memcpy(to, inline_data(c, rank) + begin, n);
    } else if (location <= MAPPED) {
        core_copy(to, address_at(c, rank, location) + begin, n, streams(c));
    } else {
        return nc_read(c->pids[rank], to, (const char *)(intptr_t)location + begin, n);
    }
    return 0;
}

/* Finish a call with inline data only. */
static nc_state finish_inline(nc *c)
{
    if (c->call.flags & NC_UNWANTED)
        return core_end(c, NC_DONE);
    if (!moves(c))
        reduce_inline(c, NULL);
    for (int r = 0; r < c->ranks && moves(c); r++)
        if (nc_length(c, r))
            copy_from(c, r, 0, nc_length(c, r));
    return core_end(c, NC_DONE);
}

/* Wait until no other rank reads this rank's memory. Inline data are in slots, which the caller cannot change. */
static nc_state end_direct(nc *c)
{
    if (!(flags_of(c, c->rank) & SHOWN) && !reached(c, LEFT, c->exits, c->ranks))
        return NC_NOT_YET;
    return core_end(c, NC_DONE);
}

/* Read from the memory of one rank after the other. This rank is last. */
static nc_state read_next(nc *c)
{
    int r = c->reader;
    size_t length = nc_length(c, r), n = smaller(length - c->reader_at, READ_AT_ONCE);
    if (n && !(c->call.flags & NC_UNWANTED) && copy_from(c, r, c->reader_at, n) < 0)
        return core_fail(c, errno);
    c->reader_at += n;
    if (c->reader_at < length)
        return NC_MOVED;
    c->reader_at = 0, c->reader = (r + 1) % c->ranks;
    if (r == c->rank) {
        count(c, LEFT, ++c->exits);
        c->next = end_direct;
    }
    return NC_MOVED;
}

/* The handshake ------------------------------------------------------------------------------------------------- */

/* Add the wait of this rank. The last rank reads no clock. */
static void end_wait(nc *c)
{
    if (c->waits)
        c->waited += ticks() - c->arrived;
}

int64_t nc_waited(const nc *c)
{
    double opened = (double)(ticks() - c->opened_ticks);
    return opened > 0 ? (int64_t)((double)c->waited * ((double)(now() - c->opened) / opened)) : 0;
}

static nc_state wait_for_others(nc *c)
{
    c->waits = 1;
    return NC_NOT_YET;
}

/* Choose the algorithm from the headers of all ranks, so that all make the same choice. */
static nc_state choose_algorithm(nc *c)
{
    int all_flags = ~0, replicas_of_all = 0, readable = 1;
    c->most_replicas = 1;
    end_wait(c);
    if (!all_agree(c))
        return core_end(c, NC_MISMATCH);
    for (int r = 0; r < c->ranks; r++) {
        int replicas = replicas_of(c, r);
        all_flags &= flags_of(c, r);
        readable = readable && flags_of(c, r) & (SHOWN | TOLD_PLACES);
        replicas_of_all += replicas;
        if (replicas > c->most_replicas)
            c->most_replicas = replicas;
    }
    c->report.shares = (all_flags & SHARES) != 0;
    if (c->call.kind == NC_MEET)
        return core_end(c, NC_DONE);
    if (replicas_of_all > NC_INPUTS)
        return core_fail(c, E2BIG); /* on all ranks, because each computes this from the headers */
    cut_stripes(c);
    if (all_flags & PUSH_CANDIDATE)
        core_update_latency(c);
    if (all_flags & SHOWN) {
        c->next = finish_inline;
    } else if (moves(c) && readable) {
        c->next = read_next;
        c->reader = (c->rank + 1) % c->ranks, c->reader_at = 0;
    } else if (!(all_flags & PUSH_READY && core_start_push(c, replicas_of_all))) {
        c->any_private = !moves(c) && !(all_flags & ALL_MAPPED);
        if (!core_start_chunks(c))
            return core_fail(c, ENOBUFS);
    }
    int differ = c->call.flags & NC_EQUAL && !contributes_equally(c);
    if (differ || c->call.flags & (NC_STOP | NC_SHARE))
        return NC_MET;
    /* Inline data are processed at once, because reading the clock first would cost latency. */
    return all_flags & SHOWN ? finish_inline(c) : NC_MOVED;
}

/* Calls over nodes ----------------------------------------------------------------------------------------------- */

/* Copy the result of all nodes. The leader publishes it inline, in place of its own input. */
static nc_state finish_over_nodes(nc *c, const char *result, int refused)
{
    end_wait(c);
    if (refused)
        return core_end(c, NC_MISMATCH);
    for (int i = 0; i < c->call.pieces && !(c->call.flags & NC_UNWANTED); i++)
        memcpy(c->piece[i].out, result + c->first[i] * c->itemsize, c->piece[i].count * c->itemsize);
    return core_end(c, NC_DONE);
}

static nc_state lead(nc *c)
{
    int refused;
    nc_state state = leader_go_on(c, &refused);
    if (state != NC_MOVED)
        return state == NC_NOT_YET ? wait_for_others(c) : state;
    if (c->bytes && !refused) {
        if (c->call.divisor != 0)
            nc_divide(c->sum, c->count, c->call.dtype, c->call.divisor);
        if (c->ranks > 1)
            memcpy(inline_data(c, c->rank), c->sum, c->bytes);
    }
    count(c, SETTLED, c->meeting << 1 | (uint64_t)refused);
    return finish_over_nodes(c, c->sum, refused);
}

static nc_state begin_to_lead(nc *c)
{
    int refused = !all_agree(c);
    c->sum = leader_begin(c, refused);
    if (c->bytes && !refused)
        reduce_inline(c, c->sum);
    c->next = lead;
    return NC_MOVED;
}

static nc_state follow(nc *c)
{
    uint64_t settled = counted(c, 0, SETTLED);
    return settled >> 1 != c->meeting ? wait_for_others(c) : finish_over_nodes(c, inline_data(c, 0), (int)(settled & 1));
}

static nc_state meet(nc *c)
{
    for (; c->came < c->ranks; c->came++)
        if (atomic_load_explicit(&page_of(c, c->came)->met, memory_order_acquire) != c->meeting)
            return wait_for_others(c);
    return is_over_nodes(c) ? begin_to_lead(c) : choose_algorithm(c);
}

/* Calls ---------------------------------------------------------------------------------------------------------- */

void nc_targets(nc *c, char *shared) { c->shared = shared; }

nc_state nc_step(nc *c, int64_t nanoseconds)
{
    int64_t end = 0;
    int idle = 0, spins = is_over_nodes(c) && c->spins > SPINS_OVER_NODES ? SPINS_OVER_NODES : c->spins;
    for (unsigned polls = 1;; polls++) {
        nc_state state = c->next == NULL ? NC_DONE : c->next(c);
        if (state == NC_MOVED)
            idle = 0;
        else if (state != NC_NOT_YET)
            return state;
        else if (idle == spins)
            sched_yield();
        else {
            RELAX();
            idle++;
        }
        /* Without spins each poll yields the core and may take long, so check the clock every time. */
        if (polls % POLLS_BETWEEN_CLOCK_READS == 0 || state == NC_MOVED || idle == spins) {
            int64_t t = now();
            if (end == 0)
                end = t + nanoseconds;
            else if (t >= end)
                return state;
        }
    }
}

nc_state nc_begin(nc *c, const nc_call *call, int64_t nanoseconds)
{
    c->call = *call;
    c->itemsize = nc_itemsize(call->dtype);
    c->inputs = call->pieces * call->replicas;
    c->count = 0;
    for (int i = 0; i < call->pieces; i++) {
        c->first[i] = c->count;
        c->count += c->piece[i].count;
    }
    c->first[call->pieces] = c->count;
    c->bytes = c->count * c->itemsize;
    c->shared = NULL;
    if (is_over_nodes(c) && c->bytes > NC_MOST_OVER_NODES)
        return core_fail(c, E2BIG);
    publish_header(c);
    return nc_step(c, nanoseconds);
}
