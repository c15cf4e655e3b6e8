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
#include <sys/uio.h>

/* MOST_READ: inputs of other ranks, so that a block of each has at least 4 KiB of the scratch memory. */
enum { COMBINED_AT_ONCE = 32 << 10, MOST_READ = SCRATCH_BYTES / 4096 };
/* Cores that share a cache answer within 35 to 50 ns, others within 150 to 230 ns. The limit ends a ping when the peer
   is descheduled. */
enum { FAR_NANOSECONDS = 100, BATCHES = 2, PING_LIMIT_NANOSECONDS = 200000, CALLS_BETWEEN_PINGS = 32 };
enum { ROUNDS_PER_BATCH = 10, POLLS_BETWEEN_CLOCK_READS = 64 };
/* Each private array costs system calls, so it must have this fraction of the bytes from which a call is pushed. */
enum { LEAST_FRACTION = 8 };
/* The word between the locations of inputs and results has these flags. */
enum { IS_FAR = 1, IS_MAPPED = 2 };
/* ABANDONED is 0, LEFT_EARLY, or FAILED + errno. Every rank fails with that errno. */
enum { LEFT_EARLY = 1, FAILED = 2 };

/* A part of one array. A stripe is pushed block by block. */
typedef struct {
    int array;
    size_t offset, bytes;
} block;

static void set(nc *c, int which, uint64_t value)
{
    atomic_store_explicit(&c->rows[c->rank].counters[which].value, value, memory_order_seq_cst);
}

static uint64_t get(const nc *c, int rank, int which)
{
    return atomic_load_explicit(&c->rows[rank].counters[which].value, memory_order_seq_cst);
}

static int64_t push_flags(const nc *c, int rank) { return words_of(c, rank)[c->call.pieces * replicas_of(c, rank)]; }

/* Latency --------------------------------------------------------------------------------------------------------- */

/* Two ranks increment their counters in turn, each after reading the other's. A hypervisor may move ranks between cores
   that share a cache and others while a program runs, and only a measurement detects it. The fastest of several batches
   counts, because an interrupt slows one of them. */
int64_t nc_ping(nc *c, int other, int batches, int64_t limit)
{
    uint64_t rounds = (uint64_t)batches * ROUNDS_PER_BATCH + 1, before = c->pings;
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
        if (i % ROUNDS_PER_BATCH == 1) { /* the first time, both ranks have only just arrived */
            int64_t end = now();
            if (i > 1 && end - start < fastest)
                fastest = end - start;
            start = end;
        }
    }
    return fastest / (2 * ROUNDS_PER_BATCH);
}

void core_update_latency(nc *c)
{
    c->any_far = 0;
    for (int r = 0; r < c->ranks; r++)
        c->any_far = c->any_far || push_flags(c, r) & IS_FAR;
    if (c->push_candidates++ % CALLS_BETWEEN_PINGS != 0)
        return;
    /* Pairs (0, 1), (2, 3) and so on, then (1, 2), (3, 4) and so on. nc_ping returns 0 for a missing rank. */
    int64_t first = nc_ping(c, c->rank ^ 1, BATCHES, PING_LIMIT_NANOSECONDS);
    int64_t second = nc_ping(c, ((c->rank + 1) ^ 1) - 1, BATCHES, PING_LIMIT_NANOSECONDS);
    if (first || second)
        c->latency = first > second ? first : second;
}

/* Publishing ------------------------------------------------------------------------------------------------------ */

void nc_allow_push(nc *c, size_t from, int always)
{
    c->push_from = from, c->pushes_always = always;
}

int core_is_push_candidate(const nc *c)
{
    return c->call.kind == NC_ALL_REDUCE && !c->on_wire && c->ranks > 1 && c->ranks <= NC_MOST_PUSHING &&
           c->push_from > 0 && c->bytes >= c->push_from && !(c->call.flags & (NC_UNWANTED | NC_SHARE)) &&
           c->piece[0].out != NULL && c->inputs + 1 + c->call.pieces <= NC_WORDS;
}

/* Probe both ends of each input or result, because the kernel rejects some mappings and peers would fail in the middle
   of a call. Writes store the same bytes back. */
static int can_access(const nc *c, int count, int are_results)
{
    enum { PROBES = 128 };
    char ends[PROBES];
    struct iovec remote[PROBES];
    for (int i = 0, n = 0; i < count; i++) {
        size_t bytes = c->piece[are_results ? i : i / c->call.replicas].count * c->itemsize;
        char *at = are_results ? c->piece[i].out : (char *)(intptr_t)c->in[i];
        if (bytes) {
            ends[n] = *at, ends[n + 1] = at[bytes - 1];
            remote[n++] = (struct iovec){at, 1}, remote[n++] = (struct iovec){at + bytes - 1, 1};
        }
        if (n && (n == PROBES || i + 1 == count)) {
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
    for (int i = 0; i < c->call.pieces; i++) {
        words[1 + i] = core_place_of(c, c->piece[i].out, c->piece[i].count * c->itemsize);
        if (words[1 + i] == PRIVATE) {
            words[1 + i] = (int64_t)(intptr_t)c->piece[i].out;
            mapped = 0;
        }
    }
    words[0] = (c->latency > FAR_NANOSECONDS ? IS_FAR : 0) | (mapped ? IS_MAPPED : 0);
    /* Between cores that share a cache, slots are faster at every size. */
    int suits = c->pids != NULL && (c->any_far || c->pushes_always) &&
                c->bytes / (size_t)c->call.pieces >= c->push_from / LEAST_FRACTION;
    if (!mapped && !(suits && can_access(c, c->inputs, 0) && can_access(c, c->call.pieces, 1)))
        return PUSH_CANDIDATE;
    return PUSH_CANDIDATE | PUSH_READY;
}

/* The location of a result that a rank has published. */
static int64_t location_of_result(const nc *c, int rank, int array)
{
    return words_of(c, rank)[c->call.pieces * replicas_of(c, rank) + 1 + array];
}

/* Blocks ---------------------------------------------------------------------------------------------------------- */

static nc_state push_block(nc *c);

int core_start_push(nc *c, int replicas_of_all)
{
    if (replicas_of_all > MOST_READ)
        return 0;
    int mapped = 1;
    for (int r = 0; r < c->ranks; r++)
        mapped = mapped && push_flags(c, r) & IS_MAPPED;
    size_t bytes = mapped ? COMBINED_AT_ONCE : SCRATCH_BYTES / (size_t)(replicas_of_all - c->call.replicas);
    size_t unit = in_cache_line(c), elements = bytes / c->itemsize;
    c->slice = elements > unit ? elements - elements % unit : elements;
    c->next_element = c->border[c->rank];
    c->blocks_pushed = 0;
    c->next = push_block;
    return 1;
}

/* Collect this rank's inputs of a block in rank order, and read the private ones of other ranks into scratch memory.
   Return their number, or -1 with errno. */
static int collect(nc *c, const block *b)
{
    int first[NC_MOST_PUSHING + 1] = {0};
    for (int r = 0; r < c->ranks; r++)
        first[r + 1] = first[r] + replicas_of(c, r);
    for (int i = 0; i < c->ranks; i++) { /* from this rank on, so that not all ranks read the memory of rank 0 first */
        int r = (c->rank + i) % c->ranks, skipped = r > c->rank ? c->call.replicas : 0;
        for (int number = first[r]; number < first[r + 1]; number++) {
            int64_t location = location_of_input(c, r, b->array, number - first[r]);
            char *scratch = c->scratch + (size_t)(number - skipped) * c->slice * c->itemsize;
            if (r == c->rank) {
                c->combined[number] = c->in[b->array * c->call.replicas + number - first[r]] + b->offset;
            } else if (location <= MAPPED) {
                c->combined[number] = address_at(c, r, location) + b->offset;
            } else {
                if (nc_read(c->pids[r], scratch, (const char *)(intptr_t)location + b->offset, b->bytes) < 0)
                    return -1;
                c->combined[number] = scratch;
            }
        }
    }
    return first[c->ranks];
}

/* Whether a rank's result of an array is one of its inputs. */
static int is_in_place(const nc *c, int rank, int array)
{
    for (int q = 0; q < replicas_of(c, rank); q++)
        if (location_of_input(c, rank, array, q) == location_of_result(c, rank, array))
            return 1;
    return 0;
}

/* Combine a block into the result of this rank, COMBINED_AT_ONCE bytes at a time, so that copies read from the cache.
   Large results bypass the cache, except in place, because the lines are cached already. Return the address of the
   combined elements. */
static char *combine(nc *c, const block *b, int inputs)
{
    int streamed = streams(c) && !is_in_place(c, c->rank, b->array);
    char *to = c->piece[b->array].out + b->offset;
    char *sum = streamed ? c->scratch : to; /* may overwrite the first input, which nc_combine allows */
    for (size_t done = 0; done < b->bytes; done += COMBINED_AT_ONCE) {
        size_t bytes = smaller(b->bytes - done, COMBINED_AT_ONCE);
        nc_combine(sum + done, c->combined, inputs, bytes / c->itemsize, c->call.dtype, c->call.op, c->call.divisor);
        if (streamed)
            core_copy(to + done, sum + done, bytes, 1);
        for (int i = 0; i < inputs; i++)
            c->combined[i] += bytes;
    }
    return sum;
}

/* Write a block into the result of a rank. Return 0 or an errno. ECANCELED means that the rank has left the call.
   WRITING is set, so a rank that leaves after the check waits for this write. */
static int write_result(nc *c, int rank, const block *b, const char *sum)
{
    int64_t location = location_of_result(c, rank, b->array);
    if (get(c, rank, ABANDONED))
        return ECANCELED;
    if (location > MAPPED)
        return nc_write(c->pids[rank], (char *)(intptr_t)location + b->offset, sum, b->bytes) < 0 ? errno : 0;
    core_copy((char *)(intptr_t)address_at(c, rank, location) + b->offset, sum, b->bytes,
              streams(c) && !is_in_place(c, rank, b->array));
    return 0;
}

static int write_all(nc *c, const block *b, const char *sum)
{
    int error = 0;
    set(c, WRITING, 1);
    for (int i = 1; i < c->ranks && !error; i++)
        error = write_result(c, (c->rank + i) % c->ranks, b, sum);
    set(c, WRITING, 0);
    return error;
}

/* Fail the call on all ranks. */
static nc_state fail(nc *c, int error)
{
    set(c, ABANDONED, FAILED + (uint64_t)error);
    return core_fail(c, error);
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
    c->next = check_peers;
    return check_peers(c);
}

static nc_state end_push(nc *c)
{
    return reached(c, LEFT, c->exits, c->ranks) ? core_end(c, NC_DONE) : check_peers(c);
}

static nc_state push_block(nc *c)
{
    size_t element = c->next_element, end = c->border[c->rank + 1];
    if (element == end) {
        count(c, LEFT, ++c->exits);
        c->next = end_push;
        return NC_MOVED;
    }
    if (get(c, c->rank, ABANDONED)) /* this rank has left, and its inputs may have changed */
        return stop(c, ECANCELED);
    int64_t since = c->call.flags & NC_WATCH ? now() : 0;
    size_t elements;
    int array = piece_with(c, element, end, &elements);
    elements = smaller(elements, c->slice);
    block b = {array, (element - c->first[array]) * c->itemsize, elements * c->itemsize};
    int inputs = collect(c, &b);
    if (inputs < 0)
        return stop(c, errno);
    int error = write_all(c, &b, combine(c, &b, inputs));
    if (error)
        return stop(c, error);
    c->next_element += elements;
    if (!(c->call.flags & NC_WATCH))
        return NC_MOVED;
    c->report.event = (nc_event){1, c->blocks_pushed++, now() - since};
    return NC_CHUNK;
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
