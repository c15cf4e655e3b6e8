/* Small all-reduces and handshakes between nodes, for calls with NC_OVER_NODES.

   The ranks of a node publish their inputs inline. The first rank of each node, its leader, reduces them and exchanges
   the sum with the leaders of the other nodes. Small data use recursive doubling: after round k a leader has the sum of
   2^k nodes. Larger data use recursive halving: each round forth halves the part that a leader reduces, and as many
   rounds back collect the parts. Nodes beyond a power of two send their sum to a partner first, and receive the result
   last. (Thakur, Rabenseifner and Gropp, doi:10.1177/1094342005051521)

   The id of the call travels with the data. A leader that receives another id refuses the call, and says so in its
   later messages. After the rounds forth all leaders know, because every pair of nodes is connected by then. A refused
   call has no rounds back, because leaders in other calls may have none either, and would not answer.

   The library is not linked with MPI and calls it by address. Handles are pointers in some implementations, and ints in
   others. */

#define _GNU_SOURCE
#include "core.h"

#include <stdlib.h>
#include <string.h>

typedef int send_pointers(const void *, int, void *, int, int, void *, void *);
typedef int send_ints(const void *, int, int, int, int, int, void *);
typedef int receive_pointers(void *, int, void *, int, int, void *, void *);
typedef int receive_ints(void *, int, int, int, int, int, void *);
typedef int test(void *, int *, void *);

enum { ALIGNED = 64, STATUS_BYTES = 256 };

/* Header of a message. */
typedef struct {
    uint64_t id;
    uint64_t bytes_refused; /* bytes << 1, and whether the call is refused */
} head;

enum { SENT, RECEIVED, REQUESTS };

enum { MOST_ROUNDS = 31 };

struct nc_leader {
    nc_mpi mpi;
    int nodes, me, power, rounds, tag;
    const int32_t *ranks;
    size_t halved_from;
    char *sum, *out, *in; /* data, with a head before the last two */
    int step, is_posted, refused, error, halves;
    size_t begin[MOST_ROUNDS + 1], end[MOST_ROUNDS + 1]; /* elements of this node's part after each round forth */
    int under_way[REQUESTS];
    _Alignas(8) char request[REQUESTS][8];
};

static head *head_of(char *data) { return (head *)(void *)(data - sizeof(head)); }

int nc_lead(nc *c, const nc_mpi *mpi, const int32_t *ranks, int nodes, int me, int tag)
{
    leader *l = calloc(1, sizeof *l + sizeof *ranks * (size_t)nodes);
    size_t each = ALIGNED + NC_MOST_OVER_NODES;
    char *memory = aligned_alloc(ALIGNED, 3 * each);
    if (l == NULL || memory == NULL) {
        free(l), free(memory);
        return -1;
    }
    memset(memory, 0, 3 * each);
    memcpy(l + 1, ranks, sizeof *ranks * (size_t)nodes);
    l->mpi = *mpi, l->nodes = nodes, l->me = me, l->tag = tag, l->halved_from = SIZE_MAX;
    l->ranks = (const int32_t *)(l + 1);
    l->sum = memory + ALIGNED, l->out = l->sum + each, l->in = l->out + each;
    for (l->power = 1; 2 * l->power <= nodes; l->power *= 2)
        l->rounds++;
    c->leader = l;
    return 0;
}

void nc_halve_from(nc *c, size_t bytes) { c->leader->halved_from = bytes; }

void leader_close(leader *l)
{
    /* Leak the memory if messages are in flight, because MPI may still access it. */
    if (l == NULL || l->under_way[SENT] || l->under_way[RECEIVED])
        return;
    free(l->sum - ALIGNED);
    free(l);
}

/* Messages ------------------------------------------------------------------------------------------------------ */

static void send_to(nc *c, leader *l, int node, size_t begin, size_t end)
{
    const nc_mpi *m = &l->mpi;
    head *h = head_of(l->out);
    size_t data = l->refused ? 0 : (end - begin) * c->itemsize;
    *h = (head){c->call.id, (uint64_t)c->bytes << 1 | (uint64_t)l->refused};
    if (data)
        memcpy(l->out, l->sum + begin * c->itemsize, data);
    int bytes = (int)(sizeof *h + data);
    if (m->handle_bytes == sizeof(int))
        l->error = ((send_ints *)m->isend)(h, bytes, (int)m->byte, l->ranks[node], l->tag, (int)m->comm,
                                           l->request[SENT]);
    else
        l->error = ((send_pointers *)m->isend)(h, bytes, (void *)m->byte, l->ranks[node], l->tag, (void *)m->comm,
                                               l->request[SENT]);
    l->under_way[SENT] = !l->error;
}

static void receive_from(leader *l, int node)
{
    const nc_mpi *m = &l->mpi;
    head *h = head_of(l->in);
    int bytes = (int)sizeof *h + NC_MOST_OVER_NODES; /* the maximum, because the sender may be in another call */
    if (m->handle_bytes == sizeof(int))
        l->error = ((receive_ints *)m->irecv)(h, bytes, (int)m->byte, l->ranks[node], l->tag, (int)m->comm,
                                              l->request[RECEIVED]);
    else
        l->error = ((receive_pointers *)m->irecv)(h, bytes, (void *)m->byte, l->ranks[node], l->tag, (void *)m->comm,
                                                  l->request[RECEIVED]);
    l->under_way[RECEIVED] = !l->error;
}

/* Whether all messages are complete. Not MPI_Testall, whose error does not identify the failed rank. */
static int all_done(leader *l)
{
    _Alignas(8) char status[STATUS_BYTES];
    for (int i = 0; i < REQUESTS && !l->error; i++)
        if (l->under_way[i]) {
            int done = 0;
            l->error = ((test *)l->mpi.test)(l->request[i], &done, status);
            if (!done)
                return 0;
            l->under_way[i] = 0;
        }
    return !l->error;
}

/* Rounds -------------------------------------------------------------------------------------------------------- */

/* Steps: in step 0 nodes beyond the power of two send their sum. The rounds forth and, if any, the rounds back follow.
   In the last step those nodes receive the result. */
static int last_step(const leader *l) { return 1 + l->rounds * (l->halves && !l->refused ? 2 : 1); }

typedef enum { HAND_OVER, FORTH, BACK, HAND_BACK } kind;

static kind kind_of(const leader *l)
{
    return l->step == 0 ? HAND_OVER : l->step <= l->rounds ? FORTH : l->step < last_step(l) ? BACK : HAND_BACK;
}

/* The round of a step, forth or back. */
static int round_of(const leader *l) { return l->step <= l->rounds ? l->step : 2 * l->rounds + 1 - l->step; }

static int partner_in(const leader *l) { return l->me ^ 1 << (round_of(l) - 1); }

/* Post the messages of a step, if it has any. */
static void post(nc *c, leader *l)
{
    int me = l->me, extra = l->nodes - l->power, round = round_of(l);
    kind what = kind_of(l);
    l->is_posted = 1;
    if (what == HAND_OVER || what == HAND_BACK) {
        int sends = (what == HAND_OVER) == (me >= l->power), other = me >= l->power ? me - l->power : me + l->power;
        if (me < l->power && me >= extra)
            return;
        if (sends)
            send_to(c, l, other, 0, c->count);
        else
            receive_from(l, other);
        return;
    }
    if (me >= l->power)
        return;
    receive_from(l, partner_in(l));
    if (l->error)
        return;
    size_t begin = l->begin[round - 1], end = l->end[round - 1], middle = begin + (end - begin) / 2;
    int keeps_high = me >> (round - 1) & 1;
    l->begin[round] = l->halves && keeps_high ? middle : begin;
    l->end[round] = l->halves && !keeps_high ? middle : end;
    /* Forth sends the half that is not kept, back sends the kept half. */
    if (l->halves)
        *(keeps_high == (what == FORTH) ? &end : &begin) = middle;
    send_to(c, l, partner_in(l), begin, end);
}

/* Combine or copy the received data of a step. */
static void apply_received(nc *c, leader *l)
{
    int me = l->me, extra = l->nodes - l->power, round = round_of(l);
    kind what = kind_of(l);
    if (what == HAND_BACK ? me < l->power : me >= l->power || (what == HAND_OVER && me >= extra))
        return; /* nothing received in this step */
    const head *theirs = head_of(l->in);
    l->refused |= theirs->id != c->call.id || theirs->bytes_refused != (uint64_t)c->bytes << 1;
    if (l->refused || c->bytes == 0)
        return;
    size_t begin = 0, end = c->count;
    if (what == FORTH)
        begin = l->begin[round], end = l->end[round];
    else if (what == BACK && (me >> (round - 1) & 1))
        begin = l->begin[round - 1], end = l->begin[round];
    else if (what == BACK)
        begin = l->end[round], end = l->end[round - 1];
    char *at = l->sum + begin * c->itemsize;
    if (what == BACK || what == HAND_BACK) {
        memcpy(at, l->in, (end - begin) * c->itemsize);
        return;
    }
    int other = what == HAND_OVER ? me + l->power : partner_in(l);
    /* In the order of nodes, so that both partners compute the same bits, also of NaN. */
    const char *in[2] = {other < me ? l->in : at, other < me ? at : l->in};
    nc_combine(at, in, 2, end - begin, c->call.dtype, c->call.op, 0);
}

char *leader_begin(nc *c, int refused)
{
    leader *l = c->leader;
    l->step = l->is_posted = l->error = 0;
    l->refused = refused;
    l->halves = c->bytes >= l->halved_from;
    l->begin[0] = 0, l->end[0] = c->count;
    return l->sum;
}

nc_state leader_go_on(nc *c, int *refused)
{
    leader *l = c->leader;
    while (l->step <= last_step(l)) {
        if (!l->is_posted)
            post(c, l);
        if (!all_done(l)) {
            c->report.error = l->error;
            return l->error ? NC_MPI : NC_NOT_YET;
        }
        apply_received(c, l);
        l->step++;
        l->is_posted = 0;
    }
    *refused = l->refused;
    return NC_MOVED;
}
