/* The core with ranks as threads of this process, which make random calls and compare with the reference.

   check_threads WORLDS SEED BYTES reads|no: so many worlds of 2 to 8 ranks from this seed on, at most so many bytes in
   a call; "reads" lets ranks read one another's private memory. Ranks have nothing but the core between their calls,
   so that a thread sanitizer sees what the core alone orders. */

#define _GNU_SOURCE
#include "worlds.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { HANGS_SECONDS = 100 };

typedef struct {
    world *world;
    int node, rank;
    nc *core;
    dice dice;                            /* of delays alone */
    uint64_t posted, received;
    nc_slice on_wire[WIRE_SLOTS];         /* slices that have not crossed, in their order */
    int slices;
    char *shared;
} member;

typedef struct {
    call_plan plan;
    rank_plan own;
    char *private[MOST_PIECES * MOST_REPLICAS];
    char *in[MOST_PIECES * MOST_REPLICAS], *out[MOST_PIECES], *outs, *private_outs;
    size_t own_used;
} call;

static void report_and_fail(const member *m, const call *c, const char *what, size_t at)
{
    char text[600];
    describe(&m->world->plan, &c->plan, text, sizeof text);
    fail("rank %d of node %d: %s (%zu)\n  %s\n  its flags %d, place %d, %d %% in own memory", m->rank, m->node, what,
         at, text, c->own.flags, (int)c->own.place, c->own.in_own_memory);
}

static void delay(dice *d)
{
    if (chance(d, 85))
        return;
    if (chance(d, 30))
        sched_yield();
    else if (chance(d, 30))
        nanosleep(&(struct timespec){0, (long)below(d, 200000)}, NULL);
    else
        for (size_t i = below(d, 3000); i; i--)
            atomic_signal_fence(memory_order_seq_cst);
}

/* Memory of a call ------------------------------------------------------------------------------------------------ */

/* Bytes at any address that the dtype may have: in memory that all ranks map, where there is room, or private. */
static char *place(member *m, call *c, size_t bytes, int in_own, char **private)
{
    node_memory *node = &m->world->node[m->node];
    size_t shift = nc_itemsize(c->plan.call.dtype) * below(&m->dice, 9);
    if (in_own && c->own_used + bytes + shift + 64 <= node->own_bytes) {
        char *at = node->own[m->rank] + c->own_used + shift;
        c->own_used += (shift + bytes + 63) / 64 * 64;
        return at;
    }
    *private = memory(bytes + shift);
    return *private + shift;
}

/* Inputs in memory that all ranks map, but for small ones. */
static int may_share(const member *m, const call *c)
{
    int replicas = c->plan.replicas[m->rank], any = 0;
    for (int n = 0; n < c->plan.call.pieces * replicas; n++) {
        if (c->private[n] != NULL && input_bytes(&c->plan, m->rank, n / replicas) >= NC_SMALL_ARRAY)
            return 0;
        any = any || c->private[n] == NULL;
    }
    return any && c->own.flags & NC_SHARE && c->plan.call.pieces * replicas <= NC_WORDS;
}

/* What lies where all can read it has a shared result, unless it was small enough to be shown. */
static void check_sharing(const member *m, const call *c)
{
    const node_memory *node = &m->world->node[m->node];
    const nc_sizes *sizes = &m->world->plan.sizes;
    int all = 1;
    for (int r = 0; r < m->world->plan.ranks[m->node]; r++)
        all = all && node->may_share[c->plan.number % 2][r];
    size_t bytes = count_of(&c->plan) * nc_itemsize(c->plan.call.dtype);
    if (nc_report_of(m->core)->shares ? !all : all && bytes > 96 && bytes > sizes->small + 64)
        report_and_fail(m, c, all ? "no shared result" : "a shared result", bytes);
}

static void place_inputs(member *m, call *c)
{
    int replicas = c->plan.replicas[m->rank];
    for (int i = 0; i < c->plan.call.pieces; i++)
        for (int q = 0; q < replicas; q++) {
            int n = i * replicas + q, in_own = chance(&m->dice, c->own.in_own_memory);
            size_t bytes = input_bytes(&c->plan, m->rank, i);
            if (bytes < NC_SMALL_ARRAY && chance(&m->dice, 20))
                in_own = 0; /* which does not keep the result from being shared */
            c->in[n] = place(m, c, bytes, in_own, &c->private[n]);
            fill_input(&m->world->plan, &c->plan, m->node, m->rank, i, q, c->in[n]);
            nc_inputs(m->core)[n] = c->in[n];
        }
    m->world->node[m->node].may_share[c->plan.number % 2][m->rank] = may_share(m, c);
}

/* One flat memory behind all pieces of the result; or the first replica's inputs. */
static void place_outs(member *m, call *c)
{
    const world_plan *w = &m->world->plan;
    size_t size = nc_itemsize(c->plan.call.dtype), at = 0, own = 0;
    if (c->own.place == IN_PLACE && !moves_bytes(&c->plan)) {
        for (int i = 0; i < c->plan.call.pieces; i++)
            c->out[i] = c->in[i * c->plan.replicas[m->rank]];
        return;
    }
    c->outs = place(m, c, result_bytes(w, &c->plan, m->node) + 64, c->own.out_in_own_memory, &c->private_outs);
    for (int i = 0; i < c->plan.call.pieces; at += c->plan.count[i] * size, i++)
        c->out[i] = c->outs + at;
    if (c->own.place != IN_PLACE || c->plan.call.kind != NC_ALL_GATHER)
        return;
    for (int r = 0; r < m->rank; r++)
        own += c->plan.length[r];
    memcpy(c->outs + own, c->in[0], c->plan.length[m->rank]);
    nc_inputs(m->core)[0] = c->in[0] = c->outs + own;
}

/* The wire -------------------------------------------------------------------------------------------------------- */

static char *slice_address(const member *m, const call *c, const nc_slice *s)
{
    return m->shared != NULL ? m->shared + s->start * nc_itemsize(c->plan.call.dtype)
                             : m->world->node[m->node].slots[m->rank] + s->lane;
}

static void post(member *m, const call *c)
{
    nc_slice *s = &m->on_wire[m->slices++];
    mailbox *mine = &m->world->wire[m->node][m->rank];
    *s = nc_report_of(m->core)->slice;
    if (s->count == 0) /* empty behind one that has not crossed */
        return;
    char **to = &mine->data[m->posted % WIRE_SLOTS];
    free(*to);
    *to = memory(s->count * nc_itemsize(c->plan.call.dtype));
    memcpy(*to, slice_address(m, c, s), s->count * nc_itemsize(c->plan.call.dtype));
    atomic_store_explicit(&mine->posted, ++m->posted, memory_order_release);
}

/* What has arrived is combined, node by node. */
static void receive(member *m, const call *c)
{
    while (m->slices) {
        nc_slice *s = &m->on_wire[0];
        if (s->count) {
            mailbox *all[NODES] = {&m->world->wire[0][m->rank], &m->world->wire[1][m->rank]};
            if (atomic_load_explicit(&all[1 - m->node]->posted, memory_order_acquire) <= m->received)
                return;
            const char *in[NODES] = {all[0]->data[m->received % WIRE_SLOTS], all[1]->data[m->received % WIRE_SLOTS]};
            nc_combine(slice_address(m, c, s), in, NODES, s->count, c->plan.call.dtype, c->plan.call.op, 0);
            m->received++;
        }
        nc_crossed(m->core, s->chunk);
        memmove(s, s + 1, sizeof *s * (size_t)--m->slices);
        delay(&m->dice);
    }
}

/* A call ---------------------------------------------------------------------------------------------------------- */

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int64_t some_time(member *m) { return chance(&m->dice, 30) ? 0 : (int64_t)below(&m->dice, 300000); }

static void met(member *m, call *c)
{
    node_memory *node = &m->world->node[m->node];
    int wants_one = c->own.flags & NC_SHARE && nc_report_of(m->core)->shares;
    if (c->own.flags & NC_SHARE)
        check_sharing(m, c);
    m->shared = wants_one ? node->common : NULL;
    if (!wants_one && c->own.place == LATER && !(c->own.flags & NC_UNWANTED))
        place_outs(m, c);
    for (int i = 0; i < c->plan.call.pieces && !wants_one; i++)
        nc_pieces(m->core)[i].out = c->out[i];
    nc_targets(m->core, m->shared);
}

/* Chunks come in their order, each once; those that go to the wire are slices instead. */
static void note_event(member *m, const call *c, size_t *events)
{
    nc_event event = nc_report_of(m->core)->event;
    if (event.what < 0 || event.what > 2 || event.nanoseconds < 0)
        report_and_fail(m, c, "a wrong event", (size_t)event.what);
    size_t *next = &events[event.what], may_skip = event.what == 1 && m->world->plan.nodes > 1;
    if (may_skip ? event.chunk < *next : event.chunk != *next)
        report_and_fail(m, c, "an event of a wrong chunk", event.chunk);
    *next = event.chunk + 1;
}

/* Whether a rank gets as much as if all gave what it gives, and of a gathering its own part in the same place. */
static int gets_its_share(const member *m, const call_plan *p)
{
    int ranks = m->world->plan.ranks[m->node];
    size_t own = p->length[m->rank], before = 0, dealt = 0;
    for (int r = 0; r < ranks && p->call.kind == NC_ALL_TO_ALL; r++)
        dealt += part_bytes(p, r, m->rank);
    for (int r = 0; r < m->rank; r++)
        before += p->length[r];
    if (p->call.kind == NC_ALL_TO_ALL)
        return dealt == own;
    return result_bytes(&m->world->plan, p, m->node) == own * (size_t)ranks && before == own * (size_t)m->rank;
}

static int has_to_stop(const member *m, const call *c)
{
    int differ = c->own.flags & NC_EQUAL && !gets_its_share(m, &c->plan);
    return c->plan.call.kind != NC_MEET && (differ || c->own.flags & (NC_STOP | NC_SHARE));
}

/* Take a call to its end; return whether the ranks did pass one id. */
static int carry_out(member *m, call *c)
{
    size_t events[3] = {0};
    int was_met = 0;
    double begin = seconds();
    nc_state state = nc_begin(m->core, &c->plan.call, some_time(m));
    while (state != NC_DONE) {
        if (state == NC_MISMATCH)
            return 0;
        if (state == NC_LOST)
            report_and_fail(m, c, "its core says that memory is lost", 0);
        if (state == NC_MET)
            was_met += 1, met(m, c);
        if (state == NC_SLICE)
            post(m, c);
        if (state == NC_CHUNK)
            note_event(m, c, events);
        if (seconds() - begin > HANGS_SECONDS)
            report_and_fail(m, c, "hangs", (size_t)state);
        receive(m, c);
        delay(&m->dice);
        state = nc_step(m->core, some_time(m));
    }
    if (m->slices)
        report_and_fail(m, c, "ended with slices on the wire", (size_t)m->slices);
    if (was_met != has_to_stop(m, c))
        report_and_fail(m, c, "stops after the meeting", (size_t)was_met);
    return 1;
}

static void compare(const member *m, const call *c, const char *found, const char *expected, size_t count)
{
    size_t at = first_difference(found, expected, count, c->plan.call.dtype);
    if (at != count)
        report_and_fail(m, c, "a wrong result, at", at);
}

static void verify(const member *m, const call *c, const char *expected)
{
    const call_plan *p = &c->plan;
    const world_plan *w = &m->world->plan;
    size_t size = nc_itemsize(p->call.dtype), ranks = (size_t)w->ranks[m->node];
    for (int r = 0; r < (int)ranks && moves_bytes(p); r++)
        if (nc_length(m->core, r) != (p->call.kind == NC_ALL_GATHER ? p->length[r] : part_bytes(p, r, m->rank)))
            report_and_fail(m, c, "a wrong length", nc_length(m->core, r));
    if (c->own.flags & NC_UNWANTED)
        return;
    if (m->shared != NULL) {
        compare(m, c, m->shared, expected, count_of(p));
    } else if (p->call.kind == NC_ALL_GATHER) {
        compare(m, c, c->out[0], expected, result_bytes(w, p, m->node));
    } else if (p->call.kind == NC_ALL_TO_ALL) {
        const char *found = c->out[0];
        for (size_t r = 0; r < ranks; found += part_bytes(p, (int)r, m->rank), expected += p->length[r], r++)
            compare(m, c, found, expected + p->parts[r][m->rank], part_bytes(p, (int)r, m->rank));
    } else if (p->call.kind == NC_REDUCE_SCATTER) {
        size_t begin = (size_t)p->parts[0][m->rank], end = (size_t)p->parts[0][m->rank + 1];
        compare(m, c, c->out[0], expected + begin * size, end - begin);
    } else {
        for (int i = 0; i < p->call.pieces; expected += p->count[i] * size, i++)
            compare(m, c, c->out[i], expected, p->count[i]);
    }
}

static void verify_notes(const member *m, const call *c)
{
    const world_plan *w = &m->world->plan;
    for (int r = 0; r < w->ranks[m->node]; r++)
        if (nc_note(m->core, r) != note_of(w, c->plan.number, r))
            report_and_fail(m, c, "a wrong note of rank", (size_t)r);
}

static void prepare(member *m, call *c, int number)
{
    const world_plan *w = &m->world->plan;
    plan_call(w, m->node, number, &c->plan);
    c->own = plan_rank(w, &c->plan, m->node, m->rank);
    c->plan.call.flags = c->own.flags;
    c->plan.call.note = note_of(w, number, m->rank);
    c->plan.call.replicas = c->plan.call.kind == NC_MEET ? 1 : c->plan.replicas[m->rank];
    c->plan.call.id += m->rank == c->plan.stranger;
    if ((c->plan.call.kind == NC_ALL_TO_ALL && !c->plan.deals_equally[m->rank]) || c->plan.has_parts)
        c->plan.call.parts = c->plan.parts[c->plan.has_parts ? 0 : m->rank];
    place_inputs(m, c);
    m->shared = NULL;
    if (c->own.place != LATER && c->plan.call.kind != NC_MEET && !(c->own.flags & NC_UNWANTED))
        place_outs(m, c);
    for (int i = 0; i < c->plan.call.pieces; i++)
        nc_pieces(m->core)[i] = (nc_piece){
            c->out[i], moves_bytes(&c->plan) ? c->plan.length[m->rank] : c->plan.count[i]};
}

/* Each rank in turn forms what all expect, before it begins: that they have met orders it before they look. */
static void make_call(member *m, int number)
{
    call *c = memory(sizeof *c);
    const world_plan *w = &m->world->plan;
    char *expected = m->world->node[m->node].expected[number % 2];
    prepare(m, c, number);
    if (number % w->ranks[m->node] == m->rank && c->plan.call.kind != NC_MEET)
        expect(w, &c->plan, m->node, expected);
    delay(&m->dice);
    int is_one_id = carry_out(m, c);
    if (is_one_id != (c->plan.stranger < 0))
        report_and_fail(m, c, is_one_id ? "did not see another id" : "saw another id where all are the same", 0);
    verify_notes(m, c);
    if (is_one_id && c->plan.call.kind != NC_MEET)
        verify(m, c, expected);
    /* Nobody may read them any more. */
    for (int i = 0; i < MOST_PIECES * MOST_REPLICAS; i++)
        if (c->private[i] != NULL) {
            memset(c->private[i], 0xEE, input_bytes(&c->plan, m->rank, i / (c->plan.call.replicas)));
            free(c->private[i]);
        }
    memset(m->world->node[m->node].own[m->rank], 0x77, c->own_used);
    free(c->private_outs);
    free(c);
}

static void *live(void *argument)
{
    member *m = argument;
    for (int number = 0; number < m->world->plan.calls; number++)
        make_call(m, number);
    return NULL;
}

/* Worlds ---------------------------------------------------------------------------------------------------------- */

static void open_core(member *m)
{
    const world_plan *p = &m->world->plan;
    node_memory *node = &m->world->node[m->node];
    int32_t pids[MOST_RANKS];
    char *common[MOST_RANKS];
    /* Each rank knows only its own processor cores. */
    int spins = m->rank % 2 ? 0 : p->spins;
    for (int r = 0; r < MOST_RANKS; r++)
        pids[r] = (int32_t)getpid(), common[r] = node->common;
    m->core = nc_open(node->control, m->rank, p->ranks[m->node], spins, p->reads_memory ? pids : NULL, p->nodes > 1,
                      p->rails);
    if (m->core == NULL)
        fail("no memory for a core");
    nc_allow_push(m->core, p->push_from[m->rank], p->pushes_always[m->rank]);
    nc_room(m->core, node->slots, &p->sizes);
    if (nc_segment(m->core, common, p->most_bytes) != 0 || nc_segment(m->core, node->own, node->own_bytes) != 1)
        fail("segments have wrong numbers");
}

static void run_world(uint64_t seed, size_t most_bytes, int reads_memory)
{
    member members[NODES * MOST_RANKS];
    pthread_t threads[NODES * MOST_RANKS];
    int n = 0;
    world *w = make_world(plan_world(seed, most_bytes, reads_memory));
    for (int node = 0; node < w->plan.nodes; node++)
        for (int r = 0; r < w->plan.ranks[node]; r++, n++) {
            members[n] = (member){.world = w, .node = node, .rank = r, .dice = dice_of(seed, 77 + (uint64_t)n)};
            open_core(&members[n]);
        }
    for (int i = 0; i < n; i++)
        if (pthread_create(&threads[i], NULL, live, &members[i]))
            fail("no thread for a rank");
    for (int i = 0; i < n; i++) {
        pthread_join(threads[i], NULL);
        nc_close(members[i].core);
    }
    free_world(w);
}

int main(int argc, char **argv)
{
    if (argc != 5)
        fail("usage: check_threads WORLDS SEED BYTES reads|no");
    int worlds = atoi(argv[1]), reads_memory = !strcmp(argv[4], "reads");
    uint64_t seed = strtoull(argv[2], NULL, 10);
    for (int i = 0; i < worlds; i++)
        run_world(seed + (uint64_t)i, strtoull(argv[3], NULL, 10), reads_memory);
    printf("%d worlds: right\n", worlds);
    return 0;
}
