/* Push: an all-reduce without slots, into results that every rank of the node can write.

   Each rank owns a stripe of the elements. It reads this stripe of all ranks' inputs, combines them in rank order, and
   writes the sum into all ranks' results. Mapped memory is accessed directly, private memory by the kernel
   (process_vm_readv, process_vm_writev). Ranks wait for each other only at the start and at the end of the call.

   Peers write to the memory of this rank, so a rank that leaves a call early must stop them first. WRITING and ABANDONED
   are a store-then-load pair: a writer sets WRITING and then reads ABANDONED, a leaving rank sets ABANDONED and then reads
   WRITING. At least one of the two sees the other. */

#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <sched.h>
#include <string.h>

/* MOST_READ: inputs of other ranks, so that a piece of each has at least 4 KiB of the scratch memory. */
enum { COMBINED_AT_ONCE = 32 << 10, MOST_PARTS = 64, MOST_READ = SCRATCH_BYTES / 4096 };
/* Cores that share a cache answer within 35 to 50 ns, others within 150 to 230 ns. The limit is for a rank whose core is
   taken away during a ping. */
enum { FAR_NANOSECONDS = 100, BATCHES = 2, PING_LIMIT = 200000, CALLS_BETWEEN_PINGS = 32 };
/* The values of ABANDONED, and 0. An errno is added to the second, with which the call fails on all ranks. */
enum { LEFT_EARLY = 1, FAILED = 2 };

/* Bytes of one array of the call. A piece of a stripe has at most MOST_PARTS. */
typedef struct {
    int array;
    size_t offset, bytes;
    char *sum; /* location of the combined elements in this process */
} part;

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

int core_may_push(const nc *c)
{
    size_t least = smaller(smaller(c->push_from.near, c->push_from.far), c->push_from.mapped);
    return c->call.kind == NC_ALL_REDUCE && !c->on_wire && c->ranks > 1 && c->ranks <= NC_MOST_PUSHING && least > 0 &&
           c->bytes >= least && !(c->call.flags & (NC_UNWANTED | NC_SHARE)) && c->piece[0].out != NULL &&
           c->inputs + 1 + c->call.pieces <= NC_WORDS;
}

/* Check that the kernel accesses the first and last byte of arrays of this process. It refuses some mappings, and
   would refuse them to other ranks in the middle of a call. */
static int can_access(const nc *c, int arrays, int writes)
{
    char ends[2 * MOST_PARTS];
    struct iovec array[2 * MOST_PARTS];
    for (int i = 0, n = 0; i < arrays; i++) {
        int replicas = writes ? 1 : c->call.replicas;
        size_t bytes = c->piece[i / replicas].count * c->itemsize;
        char *at = writes ? c->piece[i].out : (char *)(intptr_t)c->in[i];
        if (bytes) {
            ends[n] = *at, ends[n + 1] = at[bytes - 1];
            array[n++] = (struct iovec){at, 1}, array[n++] = (struct iovec){at + bytes - 1, 1};
        }
        if (n && (n == 2 * MOST_PARTS || i + 1 == arrays)) {
            struct iovec all = {ends, (size_t)n};
            ssize_t done = writes ? process_vm_writev(c->pids[c->rank], &all, 1, array, (unsigned long)n, 0)
                                  : process_vm_readv(c->pids[c->rank], &all, 1, array, (unsigned long)n, 0);
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
        return MAY_PUSH;
    if (!mapped && !(c->may_write && can_access(c, c->inputs, 0) && can_access(c, c->call.pieces, 1)))
        return MAY_PUSH;
    return MAY_PUSH | CAN_PUSH;
}

/* Every rank of the node takes part in the measurement, to up to two neighbours. */
void core_update_latency(nc *c)
{
    c->any_far = 0;
    for (int r = 0; r < c->ranks; r++)
        c->any_far = c->any_far || nc_told(c, r)[c->call.pieces * replicas_of(c, r)];
    if (c->pushable++ % CALLS_BETWEEN_PINGS != 0)
        return;
    int64_t even = nc_ping(c, c->rank ^ 1, BATCHES, PING_LIMIT);
    int64_t odd = nc_ping(c, ((c->rank + 1) ^ 1) - 1, BATCHES, PING_LIMIT);
    if (even || odd)
        c->latency = even > odd ? even : odd;
}

/* The location of an input or a result that a rank has published. */
static int64_t place_of_input(const nc *c, int rank, int array, int replica)
{
    return nc_told(c, rank)[array * replicas_of(c, rank) + replica];
}

static int64_t place_of_result(const nc *c, int rank, int array)
{
    return nc_told(c, rank)[c->call.pieces * replicas_of(c, rank) + 1 + array];
}

static int all_are_mapped(const nc *c)
{
    for (int r = 0; r < c->ranks; r++)
        for (int i = 0; i < c->call.pieces; i++) {
            if (place_of_result(c, r, i) > MAPPED)
                return 0;
            for (int q = 0; q < replicas_of(c, r); q++)
                if (place_of_input(c, r, i, q) > MAPPED)
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
    c->pushed = c->border[c->rank];
    c->pieces_pushed = 0;
    c->phase = PUSHING;
    return 1;
}

/* Pieces ---------------------------------------------------------------------------------------------------------- */

/* Cut a piece that starts at an element into parts; return their number, and the element behind them. */
static int cut(const nc *c, part *parts, size_t *end)
{
    size_t e = c->pushed, stop = c->border[c->rank + 1];
    int n = 0;
    stop = stop - e < c->slice ? stop : e + c->slice;
    for (int i = core_piece_with(c, e); e < stop && n < MOST_PARTS; i++) {
        size_t m = smaller(c->first[i + 1], stop) - e;
        if (m)
            parts[n++] = (part){i, (e - c->first[i]) * c->itemsize, m * c->itemsize, NULL};
        e += m;
    }
    *end = e;
    return n;
}

/* Scratch memory for a replica of another rank: they are numbered in the order of ranks, without this rank. */
static char *scratch_of(const nc *c, int number) { return c->scratch + (size_t)number * c->slice * c->itemsize; }

/* Read the private inputs of a rank into scratch memory. */
static int read_inputs(nc *c, int rank, int number, const part *parts, int n)
{
    for (int q = 0; q < replicas_of(c, rank); q++, number++) {
        struct iovec here[MOST_PARTS], there[MOST_PARTS];
        char *to = scratch_of(c, number);
        int m = 0;
        for (int i = 0; i < n; to += parts[i++].bytes) {
            int64_t place = place_of_input(c, rank, parts[i].array, q);
            if (place <= MAPPED)
                continue;
            here[m] = (struct iovec){to, parts[i].bytes};
            there[m++] = (struct iovec){(char *)(intptr_t)place + parts[i].offset, parts[i].bytes};
        }
        if (m && core_transfer(c->pids[rank], here, there, m, 0) < 0)
            return -1;
    }
    return 0;
}

static int read_all(nc *c, const part *parts, int n)
{
    int first[NC_MOST_PUSHING], number = 0;
    for (int r = 0; r < c->ranks; r++) {
        first[r] = number;
        number += r == c->rank ? 0 : replicas_of(c, r);
    }
    for (int i = 1; i < c->ranks; i++) { /* not all ranks read the memory of rank 0 first */
        int r = (c->rank + i) % c->ranks;
        if (read_inputs(c, r, first[r], parts, n) < 0)
            return -1;
    }
    return 0;
}

/* Collect the inputs of a part, in rank order; return their number. `at`: bytes of the piece before the part. */
static int collect(nc *c, const part *p, size_t at)
{
    int inputs = 0, number = 0;
    for (int r = 0; r < c->ranks; r++)
        for (int q = 0; q < replicas_of(c, r); q++) {
            int64_t place = place_of_input(c, r, p->array, q);
            if (r == c->rank)
                c->combined[inputs++] = c->in[p->array * c->call.replicas + q] + p->offset;
            else
                c->combined[inputs++] =
                    place <= MAPPED ? at_place(c, r, place) + p->offset : scratch_of(c, number) + at;
            number += r != c->rank;
        }
    return inputs;
}

/* Whether a rank's result of an array is one of its inputs. */
static int is_in_place(const nc *c, int rank, int array)
{
    for (int q = 0; q < replicas_of(c, rank); q++)
        if (place_of_input(c, rank, array, q) == place_of_result(c, rank, array))
            return 1;
    return 0;
}

/* Combine a part into the result of this rank, block by block, so that second copies are written out of the cache.
   Stores past the cache pay unless the lines are in the cache, as those of an input are. */
static void combine(nc *c, part *p, size_t at)
{
    int inputs = collect(c, p, at), streamed = streams(c) && !is_in_place(c, c->rank, p->array);
    char *to = c->piece[p->array].out + p->offset;
    p->sum = streamed ? scratch_of(c, 0) + at : to;
    for (size_t done = 0; done < p->bytes; done += COMBINED_AT_ONCE) {
        size_t bytes = smaller(p->bytes - done, COMBINED_AT_ONCE);
        nc_combine(p->sum + done, c->combined, inputs, bytes / c->itemsize, c->call.dtype, c->call.op,
                   c->call.divisor);
        if (streamed)
            core_copy(to + done, p->sum + done, bytes, 1);
        for (int i = 0; i < inputs; i++)
            c->combined[i] += bytes;
    }
}

/* Write a piece into the result of a rank. Nothing lies between the check and the write. Fails with ECANCELED if the rank
   has left the call. */
static int write_result(nc *c, int rank, const part *parts, int n)
{
    struct iovec here[MOST_PARTS], there[MOST_PARTS];
    int m = 0;
    for (int i = 0; i < n; i++) {
        int64_t place = place_of_result(c, rank, parts[i].array);
        if (place <= MAPPED)
            continue;
        here[m] = (struct iovec){parts[i].sum, parts[i].bytes};
        there[m++] = (struct iovec){(char *)(intptr_t)place + parts[i].offset, parts[i].bytes};
    }
    if (get(c, rank, ABANDONED)) {
        errno = ECANCELED;
        return -1;
    }
    if (m && core_transfer(c->pids[rank], here, there, m, 1) < 0)
        return -1;
    for (int i = 0; i < n && m < n; i++) {
        int64_t place = place_of_result(c, rank, parts[i].array);
        if (place <= MAPPED)
            core_copy((char *)(intptr_t)at_place(c, rank, place) + parts[i].offset, parts[i].sum, parts[i].bytes,
                      streams(c) && !is_in_place(c, rank, parts[i].array));
    }
    return 0;
}

static int write_all(nc *c, const part *parts, int n)
{
    int failed = 0;
    set(c, WRITING, 1);
    for (int i = 1; i < c->ranks && !failed; i++)
        failed = write_result(c, (c->rank + i) % c->ranks, parts, n) < 0;
    int error = errno;
    set(c, WRITING, 0);
    errno = error;
    return failed ? -1 : 0;
}

/* Fail the call on all ranks. */
static nc_state fail(nc *c, int error)
{
    set(c, ABANDONED, FAILED + (uint64_t)error);
    c->phase = IDLE;
    errno = error;
    return NC_LOST;
}

/* Wait for other ranks, or fail with the error of one that has failed. */
static nc_state check_peers(nc *c)
{
    for (int r = 0; r < c->ranks; r++) {
        uint64_t value = get(c, r, ABANDONED);
        if (value >= FAILED)
            return fail(c, (int)(value - FAILED));
    }
    return NC_NOT_YET;
}

/* Fail, unless the reason is that a rank has left early; that rank may also have unmapped its arrays. This rank then
   waits, as in other calls: it will learn that the rank has ended, or reach its deadline. */
static nc_state stop(nc *c, int error)
{
    int has_left = error == ECANCELED;
    for (int r = 0; r < c->ranks && error == EFAULT; r++)
        has_left = has_left || get(c, r, ABANDONED) == LEFT_EARLY;
    if (!has_left)
        return fail(c, error);
    c->phase = STOPPED;
    return check_peers(c);
}

nc_state core_push(nc *c)
{
    part parts[MOST_PARTS];
    size_t end, at = 0;
    if (c->pushed == c->border[c->rank + 1]) {
        count(c, LEFT, ++c->exits);
        c->phase = PUSHED;
        return NC_MOVED;
    }
    if (get(c, c->rank, ABANDONED)) /* the program may have changed the inputs since */
        return stop(c, ECANCELED);
    int64_t since = c->call.flags & NC_WATCH ? now() : 0;
    int n = cut(c, parts, &end);
    if (read_all(c, parts, n) < 0)
        return stop(c, errno);
    for (int i = 0; i < n; at += parts[i++].bytes)
        combine(c, &parts[i], at);
    if (write_all(c, parts, n) < 0)
        return stop(c, errno);
    c->pushed = end;
    if (!(c->call.flags & NC_WATCH))
        return NC_MOVED;
    c->event = (nc_event){1, c->pieces_pushed++, now() - since};
    return NC_CHUNK;
}

nc_state core_end_push(nc *c)
{
    if (c->phase == STOPPED || !reached(c, LEFT, c->exits, c->ranks))
        return check_peers(c);
    c->phase = IDLE;
    return NC_DONE;
}

/* Leaving early ---------------------------------------------------------------------------------------------------- */

void nc_abandon(nc *c, int64_t nanoseconds, char *is_writing)
{
    uint64_t none = 0;
    atomic_compare_exchange_strong(&c->rows[c->rank].counters[ABANDONED].value, &none, LEFT_EARLY);
    for (int r = 0; r < c->ranks; r++) {
        int64_t end = now() + nanoseconds;
        while ((is_writing[r] = r != c->rank && get(c, r, WRITING)) && now() < end)
            sched_yield();
    }
}
