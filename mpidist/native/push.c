/* Push: an all-reduce without slots, into results that every rank of the node can write.

   Each rank reduces a stripe of the elements. It reads this stripe of all ranks' inputs, combines them in rank order,
   and writes the sum into all ranks' results. Mapped memory is accessed directly, private memory by the kernel
   (process_vm_readv, process_vm_writev). Ranks wait for each other only at the start and at the end of the call.

   Peers write to the memory of this rank, so a rank that leaves a call early must stop them first. A writer sets
   WRITING and then reads ABANDONED. A leaving rank sets ABANDONED and then reads WRITING. At least one of the two sees
   the other's flag. This is Dekker's pattern and needs sequential consistency. */

#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <sched.h>
#include <string.h>

/* MOST_READ: inputs of other ranks, so that a block of each has at least 4 KiB of the scratch memory. */
enum { COMBINED_AT_ONCE = 32 << 10, MOST_SEGMENTS = 64, MOST_READ = SCRATCH_BYTES / 4096 };
/* Cores that share a cache answer within 35 to 50 ns, others within 150 to 230 ns. The limit ends a ping when the peer
   is descheduled. */
enum { FAR_NANOSECONDS = 100, BATCHES = 2, PING_LIMIT_NANOSECONDS = 200000, CALLS_BETWEEN_PINGS = 32 };
/* ABANDONED is 0, LEFT_EARLY, or FAILED + errno. Every rank fails with that errno. */
enum { LEFT_EARLY = 1, FAILED = 2 };

/* The part of a block that lies in one array of the call. A stripe is pushed block by block. */
typedef struct {
    int array;
    size_t offset, bytes; /* in this array */
    char *sum;            /* location of the combined elements in this process */
} segment;

static void set(nc *c, int which, uint64_t value)
{
    atomic_store_explicit(&c->rows[c->rank].counters[which].value, value, memory_order_seq_cst);
}

static uint64_t get(const nc *c, int rank, int which)
{
    return atomic_load_explicit(&c->rows[rank].counters[which].value, memory_order_seq_cst);
}

/* Publishing ------------------------------------------------------------------------------------------------------ */

void nc_allow_push(nc *c, int may_write, const nc_push_sizes *from)
{
    c->may_write = may_write;
    c->push_from = *from;
}

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

int core_is_push_candidate(const nc *c)
{
    size_t least = smaller(smaller(c->push_from.near, c->push_from.far), c->push_from.mapped);
    return c->call.kind == NC_ALL_REDUCE && !c->on_wire && c->ranks > 1 && c->ranks <= NC_MOST_PUSHING && least > 0 &&
           c->bytes >= least && !(c->call.flags & (NC_UNWANTED | NC_SHARE)) && c->piece[0].out != NULL &&
           c->inputs + 1 + c->call.pieces <= NC_WORDS;
}

/* Probe both ends of each input or result, because the kernel rejects some mappings and peers would fail in the middle
   of a call. Writes store the same bytes back. */
static int can_access(const nc *c, int count, int are_results)
{
    char ends[2 * MOST_SEGMENTS];
    struct iovec remote[2 * MOST_SEGMENTS];
    for (int i = 0, n = 0; i < count; i++) {
        size_t bytes = c->piece[are_results ? i : i / c->call.replicas].count * c->itemsize;
        char *at = are_results ? c->piece[i].out : (char *)(intptr_t)c->in[i];
        if (bytes) {
            ends[n] = *at, ends[n + 1] = at[bytes - 1];
            remote[n++] = (struct iovec){at, 1}, remote[n++] = (struct iovec){at + bytes - 1, 1};
        }
        if (n && (n == 2 * MOST_SEGMENTS || i + 1 == count)) {
            struct iovec here = {ends, (size_t)n};
            ssize_t done = are_results ? process_vm_writev(c->pids[c->rank], &here, 1, remote, (unsigned long)n, 0)
                                       : process_vm_readv(c->pids[c->rank], &here, 1, remote, (unsigned long)n, 0);
            if (done != n)
                return 0;
            n = 0;
        }
    }
    return 1;
}

int core_publish_push(nc *c, int64_t *words, int inputs_are_mapped)
{
    int mapped = inputs_are_mapped;
    words[0] = c->latency > FAR_NANOSECONDS;
    for (int i = 0; i < c->call.pieces; i++) {
        words[1 + i] = core_place_of(c, c->piece[i].out, c->piece[i].count * c->itemsize);
        if (words[1 + i] == PRIVATE) {
            words[1 + i] = (int64_t)(intptr_t)c->piece[i].out;
            mapped = 0;
        }
    }
    if (c->bytes < (mapped ? c->push_from.mapped : c->any_far ? c->push_from.far : c->push_from.near))
        return PUSH_CANDIDATE;
    if (!mapped && !(c->may_write && can_access(c, c->inputs, 0) && can_access(c, c->call.pieces, 1)))
        return PUSH_CANDIDATE;
    return PUSH_CANDIDATE | PUSH_READY;
}

void core_update_latency(nc *c)
{
    c->any_far = 0;
    for (int r = 0; r < c->ranks; r++)
        c->any_far = c->any_far || nc_told(c, r)[c->call.pieces * replicas_of(c, r)];
    if (c->push_candidates++ % CALLS_BETWEEN_PINGS != 0)
        return;
    /* Pairs (0, 1), (2, 3) and so on, then (1, 2), (3, 4) and so on. nc_ping returns 0 for a missing rank. */
    int64_t first = nc_ping(c, c->rank ^ 1, BATCHES, PING_LIMIT_NANOSECONDS);
    int64_t second = nc_ping(c, ((c->rank + 1) ^ 1) - 1, BATCHES, PING_LIMIT_NANOSECONDS);
    if (first || second)
        c->latency = first > second ? first : second;
}

/* The location of an input or a result that a rank has published. */
static int64_t location_of_input(const nc *c, int rank, int array, int replica)
{
    return nc_told(c, rank)[array * replicas_of(c, rank) + replica];
}

static int64_t location_of_result(const nc *c, int rank, int array)
{
    return nc_told(c, rank)[c->call.pieces * replicas_of(c, rank) + 1 + array];
}

static int all_are_mapped(const nc *c)
{
    for (int r = 0; r < c->ranks; r++)
        for (int i = 0; i < c->call.pieces; i++) {
            if (location_of_result(c, r, i) > MAPPED)
                return 0;
            for (int q = 0; q < replicas_of(c, r); q++)
                if (location_of_input(c, r, i, q) > MAPPED)
                    return 0;
        }
    return 1;
}

int core_start_push(nc *c, int replicas_of_all)
{
    if (replicas_of_all > MOST_READ)
        return 0;
    size_t bytes = all_are_mapped(c) ? COMBINED_AT_ONCE : SCRATCH_BYTES / (size_t)(replicas_of_all - c->call.replicas);
    size_t unit = c->call.unit ? c->call.unit : 1, elements = bytes / c->itemsize;
    c->slice = elements > unit ? elements - elements % unit : elements;
    c->next_element = c->border[c->rank];
    c->blocks_pushed = 0;
    c->phase = PUSHING;
    return 1;
}

/* Blocks ---------------------------------------------------------------------------------------------------------- */

/* Split the next block into segments, one per array. Return their number. `end`: the element after the block. */
static int cut(const nc *c, segment *segments, size_t *end)
{
    size_t e = c->next_element, stop = c->border[c->rank + 1];
    int n = 0;
    stop = stop - e < c->slice ? stop : e + c->slice;
    for (int i = core_piece_with(c, e); e < stop && n < MOST_SEGMENTS; i++) {
        size_t m = smaller(c->first[i + 1], stop) - e;
        if (m)
            segments[n++] = (segment){i, (e - c->first[i]) * c->itemsize, m * c->itemsize, NULL};
        e += m;
    }
    *end = e;
    return n;
}

/* Scratch memory of an input. Inputs of other ranks are numbered in rank order. */
static char *scratch_of(const nc *c, int number) { return c->scratch + (size_t)number * c->slice * c->itemsize; }

/* Read the private inputs of a rank into scratch memory. */
static int read_inputs(nc *c, int rank, int number, const segment *segments, int n)
{
    for (int q = 0; q < replicas_of(c, rank); q++, number++) {
        struct iovec here[MOST_SEGMENTS], there[MOST_SEGMENTS];
        char *to = scratch_of(c, number);
        int m = 0;
        for (int i = 0; i < n; to += segments[i++].bytes) {
            int64_t location = location_of_input(c, rank, segments[i].array, q);
            if (location <= MAPPED)
                continue;
            here[m] = (struct iovec){to, segments[i].bytes};
            there[m++] = (struct iovec){(char *)(intptr_t)location + segments[i].offset, segments[i].bytes};
        }
        if (m && core_transfer(c->pids[rank], here, there, m, 0) < 0)
            return -1;
    }
    return 0;
}

static int read_all(nc *c, const segment *segments, int n)
{
    int first[NC_MOST_PUSHING], number = 0;
    for (int r = 0; r < c->ranks; r++) {
        first[r] = number;
        number += r == c->rank ? 0 : replicas_of(c, r);
    }
    for (int i = 1; i < c->ranks; i++) { /* not all ranks read the memory of rank 0 first */
        int r = (c->rank + i) % c->ranks;
        if (read_inputs(c, r, first[r], segments, n) < 0)
            return -1;
    }
    return 0;
}

/* Collect the inputs of a segment in rank order. Return their number. `at`: bytes of the block before the segment. */
static int collect(nc *c, const segment *s, size_t at)
{
    int inputs = 0, number = 0;
    for (int r = 0; r < c->ranks; r++)
        for (int q = 0; q < replicas_of(c, r); q++) {
            if (r == c->rank) {
                c->combined[inputs++] = c->in[s->array * c->call.replicas + q] + s->offset;
                continue;
            }
            int64_t location = location_of_input(c, r, s->array, q);
            c->combined[inputs++] =
                location <= MAPPED ? address_at(c, r, location) + s->offset : scratch_of(c, number) + at;
            number++;
        }
    return inputs;
}

/* Whether a rank's result of an array is one of its inputs. */
static int is_in_place(const nc *c, int rank, int array)
{
    for (int q = 0; q < replicas_of(c, rank); q++)
        if (location_of_input(c, rank, array, q) == location_of_result(c, rank, array))
            return 1;
    return 0;
}

/* Combine a segment into the result of this rank, COMBINED_AT_ONCE bytes at a time, so that copies read from the cache.
   Large results bypass the cache, except in place, because the lines are cached already. */
static void combine(nc *c, segment *s, size_t at)
{
    int inputs = collect(c, s, at), streamed = streams(c) && !is_in_place(c, c->rank, s->array);
    char *to = c->piece[s->array].out + s->offset;
    s->sum = streamed ? scratch_of(c, 0) + at : to; /* may overwrite the first input, which nc_combine allows */
    for (size_t done = 0; done < s->bytes; done += COMBINED_AT_ONCE) {
        size_t bytes = smaller(s->bytes - done, COMBINED_AT_ONCE);
        nc_combine(s->sum + done, c->combined, inputs, bytes / c->itemsize, c->call.dtype, c->call.op,
                   c->call.divisor);
        if (streamed)
            core_copy(to + done, s->sum + done, bytes, 1);
        for (int i = 0; i < inputs; i++)
            c->combined[i] += bytes;
    }
}

/* Write a block into the results of a rank. Return 0 or an errno. ECANCELED means that the rank has left the call.
   WRITING is set, so a rank that leaves after the check waits for this write. */
static int write_results(nc *c, int rank, const segment *segments, int n)
{
    struct iovec here[MOST_SEGMENTS], there[MOST_SEGMENTS];
    int m = 0;
    for (int i = 0; i < n; i++) {
        int64_t location = location_of_result(c, rank, segments[i].array);
        if (location <= MAPPED)
            continue;
        here[m] = (struct iovec){segments[i].sum, segments[i].bytes};
        there[m++] = (struct iovec){(char *)(intptr_t)location + segments[i].offset, segments[i].bytes};
    }
    if (get(c, rank, ABANDONED))
        return ECANCELED;
    if (m && core_transfer(c->pids[rank], here, there, m, 1) < 0)
        return errno;
    for (int i = 0; i < n; i++) {
        int64_t location = location_of_result(c, rank, segments[i].array);
        if (location <= MAPPED)
            core_copy((char *)(intptr_t)address_at(c, rank, location) + segments[i].offset, segments[i].sum,
                      segments[i].bytes, streams(c) && !is_in_place(c, rank, segments[i].array));
    }
    return 0;
}

static int write_all(nc *c, const segment *segments, int n)
{
    int error = 0;
    set(c, WRITING, 1);
    for (int i = 1; i < c->ranks && !error; i++)
        error = write_results(c, (c->rank + i) % c->ranks, segments, n);
    set(c, WRITING, 0);
    return error;
}

/* Fail the call on all ranks. */
static nc_state fail(nc *c, int error)
{
    set(c, ABANDONED, FAILED + (uint64_t)error);
    c->phase = IDLE;
    errno = error;
    return NC_LOST;
}

/* Return NC_NOT_YET, or fail with the error of a failed rank. */
static nc_state check_peers(nc *c)
{
    for (int r = 0; r < c->ranks; r++) {
        uint64_t value = get(c, r, ABANDONED);
        if (value >= FAILED)
            return fail(c, (int)(value - FAILED));
    }
    return NC_NOT_YET;
}

/* Fail, unless a rank has left early. That rank may also have unmapped its arrays (EFAULT). Then wait for the deadline
   or for an error of that rank, as in other calls. */
static nc_state stop(nc *c, int error)
{
    int has_left = error == ECANCELED;
    for (int r = 0; r < c->ranks && error == EFAULT; r++)
        has_left = has_left || get(c, r, ABANDONED) != 0;
    if (!has_left)
        return fail(c, error);
    c->phase = CANCELED;
    return check_peers(c);
}

nc_state core_push(nc *c)
{
    segment segments[MOST_SEGMENTS];
    size_t end, at = 0;
    if (c->next_element == c->border[c->rank + 1]) {
        count(c, LEFT, ++c->exits);
        c->phase = PUSHED;
        return NC_MOVED;
    }
    if (get(c, c->rank, ABANDONED)) /* this rank has left, and its inputs may have changed */
        return stop(c, ECANCELED);
    int64_t since = c->call.flags & NC_WATCH ? now() : 0;
    int n = cut(c, segments, &end);
    if (read_all(c, segments, n) < 0)
        return stop(c, errno);
    for (int i = 0; i < n; at += segments[i++].bytes)
        combine(c, &segments[i], at);
    int error = write_all(c, segments, n);
    if (error)
        return stop(c, error);
    c->next_element = end;
    if (!(c->call.flags & NC_WATCH))
        return NC_MOVED;
    c->event = (nc_event){1, c->blocks_pushed++, now() - since};
    return NC_CHUNK;
}

nc_state core_end_push(nc *c)
{
    if (c->phase == CANCELED || !reached(c, LEFT, c->exits, c->ranks))
        return check_peers(c);
    c->phase = IDLE;
    return NC_DONE;
}

/* Leaving early ---------------------------------------------------------------------------------------------------- */

void nc_abandon(nc *c, int64_t nanoseconds, char *is_writing)
{
    uint64_t none = 0;
    atomic_compare_exchange_strong(&c->rows[c->rank].counters[ABANDONED].value, &none, LEFT_EARLY);
    int64_t end = now() + nanoseconds;
    for (int r = 0; r < c->ranks; r++)
        while ((is_writing[r] = r != c->rank && get(c, r, WRITING)) && now() < end)
            sched_yield();
}
