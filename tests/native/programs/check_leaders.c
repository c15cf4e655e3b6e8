/* Calls over nodes, with ranks as threads and an MPI of this file's own: random nodes, sizes and delays, and calls in
   which some rank differs, which all ranks have to find, and go on.

   check_leaders WORLDS SEED */

#include "mpidist.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_NODES = 9, MOST_RANKS = 3, CALLS = 60, ROOM = 4096, MOST_MESSAGES = 64, TAG = 7 };

#define CHECK(ok, ...)                                                                                                 \
    do {                                                                                                               \
        if (!(ok)) {                                                                                                   \
            printf(__VA_ARGS__);                                                                                       \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* MPI ------------------------------------------------------------------------------------------------------------ */

typedef struct {
    char data[ROOM + 64];
    int bytes, looks; /* in vain, until it is there */
} message;

typedef struct {
    message queue[MOST_MESSAGES];
    int first, count;
} wire;

typedef struct {
    int is_receive, from;
    void *into;
    int room, looks;
} request;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static wire wires[MOST_NODES][MOST_NODES];
static request requests[MOST_NODES][2];
static _Thread_local int my_node;
static _Thread_local unsigned draws;
static int ranks_of_leaders[MOST_NODES], nodes_in_world;

static unsigned draw(void) { return draws = draws * 1664525U + 1013904223U, draws >> 8; }

static int node_of(int rank)
{
    for (int n = 0; n < nodes_in_world; n++)
        if (ranks_of_leaders[n] == rank)
            return n;
    CHECK(0, "no leader has rank %d\n", rank);
    return -1;
}

static int put(const void *data, int bytes, int to)
{
    pthread_mutex_lock(&lock);
    wire *w = &wires[my_node][node_of(to)];
    CHECK(w->count < MOST_MESSAGES, "too many messages on their way\n");
    message *m = &w->queue[(w->first + w->count++) % MOST_MESSAGES];
    memcpy(m->data, data, (size_t)bytes);
    m->bytes = bytes, m->looks = (int)(draw() % 4);
    requests[my_node][0] = (request){.looks = (int)(draw() % 3)};
    pthread_mutex_unlock(&lock);
    return 0;
}

static int take(void *into, int room, int from)
{
    requests[my_node][1] = (request){1, node_of(from), into, room, 0};
    return 0;
}

static int send_pointers(const void *data, int bytes, void *byte, int to, int tag, void *comm, void *number)
{
    CHECK(byte == (void *)11 && comm == (void *)13 && tag == TAG, "wrong handles\n");
    *(void **)number = (void *)1;
    return put(data, bytes, to);
}

static int receive_pointers(void *into, int room, void *byte, int from, int tag, void *comm, void *number)
{
    CHECK(byte == (void *)11 && comm == (void *)13 && tag == TAG, "wrong handles\n");
    *(void **)number = (void *)2;
    return take(into, room, from);
}

static int send_ints(const void *data, int bytes, int byte, int to, int tag, int comm, void *number)
{
    CHECK(byte == 11 && comm == 13 && tag == TAG, "wrong handles\n");
    *(int *)number = 1;
    return put(data, bytes, to);
}

static int receive_ints(void *into, int room, int byte, int from, int tag, int comm, void *number)
{
    CHECK(byte == 11 && comm == 13 && tag == TAG, "wrong handles\n");
    *(int *)number = 2;
    return take(into, room, from);
}

static int test(void *number, int *done, void *status)
{
    request *r = &requests[my_node][*(int *)number - 1];
    memset(status, 0, 24);
    *done = 0;
    pthread_mutex_lock(&lock);
    if (!r->is_receive)
        *done = r->looks-- <= 0;
    else {
        wire *w = &wires[r->from][my_node];
        message *m = &w->queue[w->first];
        if (w->count && m->looks-- <= 0) {
            CHECK(m->bytes <= r->room, "a message of %d bytes for %d\n", m->bytes, r->room);
            memcpy(r->into, m->data, (size_t)m->bytes);
            w->first = (w->first + 1) % MOST_MESSAGES, w->count--;
            *done = 1;
        }
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

/* Ranks ---------------------------------------------------------------------------------------------------------- */

typedef struct {
    unsigned seed;
    int nodes, ranks[MOST_NODES], has_ints;
    size_t halved_from;
    void *control[MOST_NODES];
    char *segments[MOST_NODES][MOST_RANKS];
} world;

typedef struct {
    const world *w;
    int node, rank, number;
} place;

static double value_of(unsigned call, int number, size_t i) { return (double)((call * 7 + (unsigned)number * 5 + i) % 64); }

static void *live(void *argument)
{
    const place *at = argument;
    const world *w = at->w;
    int ranks = w->ranks[at->node], all = 0;
    nc *core = nc_open(w->control[at->node], at->rank, ranks, 0, NULL, 1, 1);
    nc_sizes sizes = {ROOM, 64, 64, 1, 64};
    my_node = at->node;
    nc_room(core, (char *const *)w->segments[at->node], &sizes);
    for (int n = 0; n < w->nodes; n++)
        all += w->ranks[n];
    if (at->rank == 0) {
        nc_mpi mpi = {(void *)(w->has_ints ? (void (*)(void))send_ints : (void (*)(void))send_pointers),
                      (void *)(w->has_ints ? (void (*)(void))receive_ints : (void (*)(void))receive_pointers),
                      (void *)(void (*)(void))test, 13, 11, w->has_ints ? sizeof(int) : sizeof(void *)};
        CHECK(nc_lead(core, &mpi, ranks_of_leaders, w->nodes, at->node, TAG) == 0, "no memory\n");
        nc_halve_from(core, w->halved_from);
    }
    for (unsigned number = 0; number < CALLS; number++) {
        draws = w->seed * 7919 + number; /* the same call on all ranks */
        unsigned what = draw(), differs = draw() % 5, odd_one = draw() % (unsigned)all, how = draw();
        size_t count = what % 4 == 0 ? 0 : draw() % (ROOM / sizeof(double) + 1);
        int is_odd = differs == 0 && odd_one == (unsigned)at->number, pieces = (int)(draw() % 3) + 1;
        if (is_odd && how & 1)
            count = (count + 1 + draw() % 100) % (ROOM / sizeof(double) + 1);
        nc_call call = {.id = number + 1 + (is_odd && !(how & 1) ? 1000 : 0), .kind = what % 4 ? NC_ALL_REDUCE : NC_MEET,
                        .op = what & 8 ? NC_SUM : NC_MAX, .dtype = NC_F64, .flags = NC_OVER_NODES, .replicas = 1};
        call.divisor = what & 16 ? 4 : 0;
        draws += (unsigned)at->number * 977; /* from here on other delays */
        double given[ROOM / sizeof(double) + 1], got[ROOM / sizeof(double) + 1];
        for (size_t i = 0; i < count; i++)
            given[i] = value_of(number, at->number, i);
        size_t start = 0;
        for (int p = 0; p < pieces && call.kind == NC_ALL_REDUCE; p++) {
            size_t end = p == pieces - 1 ? count : count * (size_t)(p + 1) / 4;
            nc_inputs(core)[p] = (const char *)(given + start);
            nc_pieces(core)[p] = (nc_piece){(char *)(got + start), end - start};
            start = end, call.pieces = p + 1;
        }
        nc_state state = nc_begin(core, &call, 0);
        while (state == NC_NOT_YET || state == NC_MOVED)
            state = nc_step(core, 100000);
        int differ = differs == 0 && (!(how & 1) || call.kind == NC_ALL_REDUCE); /* a meeting has no size */
        CHECK(state == (differ ? NC_MISMATCH : NC_DONE), "seed %u, call %u, rank %d: state %d\n", w->seed, number,
              at->number, (int)state);
        for (size_t i = 0; i < count && call.kind == NC_ALL_REDUCE && state == NC_DONE; i++) {
            double expected = value_of(number, 0, i);
            for (int n = 1; n < all; n++) {
                double other = value_of(number, n, i);
                expected = call.op == NC_SUM ? expected + other : other > expected ? other : expected;
            }
            expected = call.divisor != 0 ? expected / call.divisor : expected;
            CHECK(got[i] == expected, "seed %u, call %u, rank %d, element %zu of %zu: %g, expected %g\n", w->seed, number,
                  at->number, i, count, got[i], expected);
        }
    }
    nc_close(core);
    return NULL;
}

int main(int n, char **arguments)
{
    CHECK(n == 3, "check_leaders WORLDS SEED\n");
    int worlds = atoi(arguments[1]);
    for (int k = 0; k < worlds; k++) {
        world w = {.seed = (unsigned)atoi(arguments[2]) * 1000 + (unsigned)k, .has_ints = k & 1};
        draws = w.seed;
        w.nodes = nodes_in_world = 2 + (int)(draw() % (MOST_NODES - 1));
        w.halved_from = draw() % 3 ? draw() % ROOM : SIZE_MAX;
        place places[MOST_NODES * MOST_RANKS];
        pthread_t threads[MOST_NODES * MOST_RANKS];
        int all = 0;
        for (int node = 0; node < w.nodes; node++) {
            w.ranks[node] = 1 + (int)(draw() % MOST_RANKS);
            ranks_of_leaders[node] = all;
            size_t bytes = (nc_control_bytes(w.ranks[node]) + 127) / 128 * 128;
            w.control[node] = memset(aligned_alloc(128, bytes), 0, bytes);
            nc_sizes sizes = {ROOM, 64, 64, 1, 64};
            for (int r = 0; r < w.ranks[node]; r++) {
                w.segments[node][r] = aligned_alloc(128, (nc_segment_bytes(&sizes) + 127) / 128 * 128);
                places[all] = (place){&w, node, r, all};
                all++;
            }
        }
        for (int r = 0; r < all; r++)
            pthread_create(&threads[r], NULL, live, &places[r]);
        for (int r = 0; r < all; r++)
            pthread_join(threads[r], NULL);
        for (int node = 0; node < w.nodes; node++) {
            free(w.control[node]);
            for (int r = 0; r < w.ranks[node]; r++)
                free(w.segments[node][r]);
            for (int other = 0; other < w.nodes; other++)
                CHECK(wires[node][other].count == 0, "seed %u: a message is left over\n", w.seed);
        }
    }
    printf("%d worlds: right\n", worlds);
    return 0;
}
