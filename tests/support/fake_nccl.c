/* A stand-in for libnccl.so.2 on machines without a GPU: the functions that CuPy's binding calls, on host memory.
 *
 * So CuPy's compiled binding itself can be driven, with the addresses of NumPy arrays for those of device memory: are
 * arguments in the right order, of the right type? The ranks of one machine meet in a file in /dev/shm. A call outside
 * of a group, and the end of a group, return when the data are there; streams are not looked at. 16-bit floating point
 * is moved, and not reduced.
 *
 * FAKE_NCCL_INIT_STATUS makes the start of a communicator fail with that status, FAKE_NCCL_ASYNC_STATUS is what
 * ncclCommGetAsyncError finds.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR };
enum { SUM, PROD, MAX, MIN, AVG };
enum { HALF = 6, BRAIN = 9 };
enum { MOST_RANKS = 8, CHUNK = 1 << 16, MOST_CALLS = 256, ID_BYTES = 128 };

typedef struct { char internal[ID_BYTES]; } UniqueId;

/* What the ranks share: one place per rank for collectives, one per pair of ranks for messages. */
typedef struct {
    atomic_int joined, is_ready;
    pthread_barrier_t barrier;
    char piece[MOST_RANKS][CHUNK];
    struct { atomic_int is_full; char piece[CHUNK]; } box[MOST_RANKS][MOST_RANKS];
} Board;

typedef struct { Board *board; int rank, size; } *Comm;

typedef enum { ALL_REDUCE, REDUCE, BROADCAST, REDUCE_SCATTER, ALL_GATHER, SEND, RECV } Kind;

typedef struct {
    Kind kind; Comm comm;
    const char *from; char *to;
    size_t count, done;
    int datatype, op, other;
} Call;

static _Thread_local int depth;
static _Thread_local int number_of_calls;
static _Thread_local Call calls[MOST_CALLS];

static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

/* Arithmetic ----------------------------------------------------------------------------------------------------- */

#define COMBINED(a, b, op) ((op) == PROD ? (a) * (b) : (op) == MAX ? ((a) > (b) ? (a) : (b)) \
                            : (op) == MIN ? ((a) < (b) ? (a) : (b)) : (a) + (b))
#define COMBINE(type) do { \
        type *into = (type *)target; const type *values = (const type *)source; \
        for (size_t i = 0; i < count; i++) into[i] = (type)COMBINED(into[i], values[i], op); \
    } while (0)
#define DIVIDE(type) do { type *into = (type *)target; for (size_t i = 0; i < count; i++) into[i] /= by; } while (0)

static void combine(char *target, const char *source, size_t count, int datatype, int op) {
    switch (datatype) {
    case 0: COMBINE(int8_t); break;
    case 1: COMBINE(uint8_t); break;
    case 2: COMBINE(int32_t); break;
    case 3: COMBINE(uint32_t); break;
    case 4: COMBINE(int64_t); break;
    case 5: COMBINE(uint64_t); break;
    case 7: COMBINE(float); break;
    case 8: COMBINE(double); break;
    }
}

static void divide(char *target, size_t count, int datatype, int by) {
    if (datatype == 7) DIVIDE(float);
    else if (datatype == 8) DIVIDE(double);
}

/* Calls ---------------------------------------------------------------------------------------------------------- */

/* Shows every rank a piece of all ranks' memory; the caller looks at it and then waits again. */
static void show(Comm comm, const char *from, size_t nbytes) {
    if (from) memcpy(comm->board->piece[comm->rank], from, nbytes);
    pthread_barrier_wait(&comm->board->barrier);
}

/* Reduces `count` elements at `from` of all ranks into `to`; only looks on where `to` is NULL. */
static void reduce(Comm comm, const char *from, char *to, size_t count, int datatype, int op) {
    size_t width = sizes[datatype], step = CHUNK / width;
    for (size_t start = 0; start < count; start += step) {
        size_t now = count - start < step ? count - start : step;
        show(comm, from + start * width, now * width);
        if (to) {
            char sum[CHUNK];
            memcpy(sum, comm->board->piece[0], now * width);
            for (int rank = 1; rank < comm->size; rank++) combine(sum, comm->board->piece[rank], now, datatype, op);
            if (op == AVG) divide(sum, now, datatype, comm->size);
            memcpy(to + start * width, sum, now * width);
        }
        pthread_barrier_wait(&comm->board->barrier);
    }
}

/* Copies `nbytes` of rank `root`, or of every rank one after the other where it is -1. */
static void spread(Comm comm, const char *from, char *to, size_t nbytes, int root) {
    for (size_t start = 0; start < nbytes; start += CHUNK) {
        size_t now = nbytes - start < CHUNK ? nbytes - start : CHUNK;
        show(comm, root == -1 || root == comm->rank ? from + start : NULL, now);
        for (int rank = 0; rank < comm->size; rank++)
            if (root == -1) memcpy(to + (size_t)rank * nbytes + start, comm->board->piece[rank], now);
            else if (root == rank) memcpy(to + start, comm->board->piece[rank], now);
        pthread_barrier_wait(&comm->board->barrier);
    }
}

static void collective(Call *call) {
    Comm comm = call->comm;
    size_t nbytes = call->count * sizes[call->datatype];
    switch (call->kind) {
    case ALL_REDUCE:
        reduce(comm, call->from, call->to, call->count, call->datatype, call->op);
        break;
    case REDUCE:
        reduce(comm, call->from, comm->rank == call->other ? call->to : NULL, call->count, call->datatype, call->op);
        break;
    case REDUCE_SCATTER: {
        /* In place the target is a part of the source, which must not change before all have seen it. */
        char *sum = malloc(nbytes + 1);
        for (int rank = 0; rank < comm->size; rank++)
            reduce(comm, call->from + (size_t)rank * nbytes, rank == comm->rank ? sum : NULL, call->count,
                   call->datatype, call->op);
        memcpy(call->to, sum, nbytes);
        free(sum);
        break;
    }
    case ALL_GATHER:
        spread(comm, call->from, call->to, nbytes, -1);
        break;
    default:
        spread(comm, call->from, call->to, nbytes, call->other);
    }
}

/* Moves a message on by one piece, if it can; whether it is over. */
static int move(Call *call) {
    Comm comm = call->comm;
    size_t nbytes = call->count * sizes[call->datatype];
    int is_send = call->kind == SEND, me = comm->rank;
    int from = is_send ? me : call->other, to = is_send ? call->other : me;
    if (call->done < nbytes && atomic_load(&comm->board->box[from][to].is_full) != is_send) {
        size_t now = nbytes - call->done < CHUNK ? nbytes - call->done : CHUNK;
        if (is_send) memcpy(comm->board->box[from][to].piece, call->from + call->done, now);
        else memcpy(call->to + call->done, comm->board->box[from][to].piece, now);
        atomic_store(&comm->board->box[from][to].is_full, is_send);
        call->done += now;
    }
    return call->done == nbytes;
}

static int comes_first(Call *all, int number) {
    for (int i = 0; i < number; i++)
        if (all[i].kind == all[number].kind && all[i].other == all[number].other
            && all[i].done < all[i].count * sizes[all[i].datatype])
            return 0;
    return 1;
}

typedef struct { Comm comm; Call calls[MOST_CALLS]; int number; pthread_t thread; } Group;

static void *run(void *argument) {
    Group *group = argument;
    int open = 1;
    while (open) {
        open = 0;
        for (int i = 0; i < group->number; i++)
            if (group->calls[i].kind >= SEND && !(comes_first(group->calls, i) && move(&group->calls[i]))) open = 1;
        if (open) usleep(20);
    }
    for (int i = 0; i < group->number; i++)
        if (group->calls[i].kind < SEND) collective(&group->calls[i]);
    return NULL;
}

int ncclGroupStart(void) {
    depth++;
    return SUCCESS;
}

int ncclGroupEnd(void) {
    if (depth == 0) return INVALID_USAGE;
    if (--depth) return SUCCESS;
    static _Thread_local Group groups[MOST_RANKS];
    int number = 0;
    for (int i = 0; i < number_of_calls; i++) {
        int at = 0;
        while (at < number && groups[at].comm != calls[i].comm) at++;
        if (at == number) {
            groups[number].comm = calls[i].comm;
            groups[number++].number = 0;
        }
        groups[at].calls[groups[at].number++] = calls[i];
    }
    number_of_calls = 0;
    for (int at = 0; at < number; at++) pthread_create(&groups[at].thread, NULL, run, &groups[at]);
    for (int at = 0; at < number; at++) pthread_join(groups[at].thread, NULL);
    return SUCCESS;
}

static int issue(Kind kind, const void *from, void *to, size_t count, int datatype, int op, int other, Comm comm) {
    if (!comm || datatype < 0 || datatype > 9 || op < SUM || op > AVG || other < 0 || other >= comm->size)
        return INVALID_ARGUMENT;
    int is_reduction = kind == ALL_REDUCE || kind == REDUCE || kind == REDUCE_SCATTER;
    if (is_reduction && (datatype == HALF || datatype == BRAIN)) return INVALID_ARGUMENT;
    if (number_of_calls == MOST_CALLS) return INTERNAL_ERROR;
    ncclGroupStart();
    calls[number_of_calls++] = (Call){kind, comm, from, to, count, 0, datatype, op, other};
    return ncclGroupEnd();
}

int ncclAllReduce(const void *from, void *to, size_t count, int datatype, int op, Comm comm, void *stream) {
    (void)stream;
    return issue(ALL_REDUCE, from, to, count, datatype, op, 0, comm);
}

int ncclReduce(const void *from, void *to, size_t count, int datatype, int op, int root, Comm comm, void *stream) {
    (void)stream;
    return issue(REDUCE, from, to, count, datatype, op, root, comm);
}

int ncclBroadcast(const void *from, void *to, size_t count, int datatype, int root, Comm comm, void *stream) {
    (void)stream;
    return issue(BROADCAST, from, to, count, datatype, SUM, root, comm);
}

int ncclBcast(void *memory, size_t count, int datatype, int root, Comm comm, void *stream) {
    return ncclBroadcast(memory, memory, count, datatype, root, comm, stream);
}

int ncclReduceScatter(const void *from, void *to, size_t count, int datatype, int op, Comm comm, void *stream) {
    (void)stream;
    return issue(REDUCE_SCATTER, from, to, count, datatype, op, 0, comm);
}

int ncclAllGather(const void *from, void *to, size_t count, int datatype, Comm comm, void *stream) {
    (void)stream;
    return issue(ALL_GATHER, from, to, count, datatype, SUM, 0, comm);
}

int ncclSend(const void *from, size_t count, int datatype, int peer, Comm comm, void *stream) {
    (void)stream;
    return issue(SEND, from, NULL, count, datatype, SUM, peer, comm);
}

int ncclRecv(void *to, size_t count, int datatype, int peer, Comm comm, void *stream) {
    (void)stream;
    return issue(RECV, NULL, to, count, datatype, SUM, peer, comm);
}

/* Communicators -------------------------------------------------------------------------------------------------- */

static int status_from(const char *variable) {
    const char *text = getenv(variable);
    return text ? atoi(text) : SUCCESS;
}

int ncclGetVersion(int *version) {
    *version = 22809;
    return SUCCESS;
}

int ncclGetUniqueId(UniqueId *id) {
    static atomic_int number;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, ID_BYTES, "/dev/shm/fake-nccl-%d-%d", (int)getpid(), atomic_fetch_add(&number, 1));
    return SUCCESS;
}

static void start_board(Board *board, int size) {
    pthread_barrierattr_t attributes;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&board->barrier, &attributes, (unsigned)size);
    atomic_store(&board->is_ready, 1);
}

static Comm new_comm(Board *board, int size, int rank) {
    Comm comm = calloc(1, sizeof *comm);
    comm->board = board;
    comm->rank = rank;
    comm->size = size;
    return comm;
}

int ncclCommInitRankConfig(Comm *made, int size, UniqueId id, int rank, void *config) {
    (void)config;
    *made = NULL;
    if (status_from("FAKE_NCCL_INIT_STATUS")) return status_from("FAKE_NCCL_INIT_STATUS");
    if (size < 1 || size > MOST_RANKS || rank < 0 || rank >= size) return INVALID_ARGUMENT;
    int file = open(id.internal, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof(Board))) return SYSTEM_ERROR;
    Board *board = mmap(NULL, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (board == MAP_FAILED) return SYSTEM_ERROR;
    if (atomic_fetch_add(&board->joined, 1) == 0) start_board(board, size);
    while (!atomic_load(&board->is_ready)) usleep(50);
    pthread_barrier_wait(&board->barrier);
    unlink(id.internal);
    *made = new_comm(board, size, rank);
    return SUCCESS;
}

int ncclCommInitAll(Comm *made, int size, const int *devices) {
    (void)devices;
    if (size < 1 || size > MOST_RANKS) return INVALID_ARGUMENT;
    Board *board = mmap(NULL, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (board == MAP_FAILED) return SYSTEM_ERROR;
    start_board(board, size);
    for (int rank = 0; rank < size; rank++) made[rank] = new_comm(board, size, rank);
    return SUCCESS;
}

int ncclCommDestroy(Comm comm) {
    /* The board stays mapped: another end in this process may still use it. */
    free(comm);
    return SUCCESS;
}

int ncclCommAbort(Comm comm) { return ncclCommDestroy(comm); }

int ncclCommSplit(Comm comm, int color, int key, Comm *made, void *config) {
    (void)comm, (void)color, (void)key, (void)config;
    *made = NULL;
    return INVALID_USAGE;
}

int ncclCommGetAsyncError(Comm comm, int *status) {
    *status = status_from("FAKE_NCCL_ASYNC_STATUS");
    return comm ? SUCCESS : INVALID_ARGUMENT;
}

int ncclCommCount(Comm comm, int *count) {
    if (!comm) return INVALID_ARGUMENT;
    *count = comm->size;
    return SUCCESS;
}

int ncclCommUserRank(Comm comm, int *rank) {
    if (!comm) return INVALID_ARGUMENT;
    *rank = comm->rank;
    return SUCCESS;
}

int ncclCommCuDevice(Comm comm, int *device) {
    *device = 0;
    return comm ? SUCCESS : INVALID_ARGUMENT;
}

const char *ncclGetErrorString(int status) {
    static const char *texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                  "invalid argument", "invalid usage", "remote process exited"};
    return status >= SUCCESS && status <= REMOTE_ERROR ? texts[status] : "unknown result code";
}
