/* Internal declarations of the core.

   The control memory has a row for each rank. Only that rank writes it. A row has counters that only grow, and two
   pages for headers, used alternately. A header is written before a handshake and read after it. The page is written
   again before the handshake after the next. A rank that has arrived at the next handshake has finished reading, so the
   page is free then.

   A file calls only files before it in this order: kernels.c, memory.c, leaders.c, push.c and chunks.c, core.c, the
   Python interface.

   Assumptions: 8-byte counters are lock-free, all ranks run the same build, one thread at a time calls into a core. */

#ifndef MPIDIST_CORE_H
#define MPIDIST_CORE_H

#include "mpidist.h"

#include <stdatomic.h>
#include <time.h>

typedef _Atomic uint64_t counter;
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "the core needs lock-free counters of 64 bits");

/* The counters of a rank. FILLED, READ, REDUCED and TAKEN count chunks: the rank has written the chunk's input, read
   the inputs of other ranks, written the result, and copied the result. LEFT counts the calls with direct access to
   other ranks' memory that the rank has finished. SETTLED is used by the leader of a node. It is 2 * m after the
   inter-node call of handshake m, and 2 * m + 1 if that call was refused. PINGED counts the pings of the latency
   measurement. WRITING is 1 while the rank writes into the results of others, and 0 otherwise. ABANDONED is set when
   the rank has left a call early or failed, see push.c: no rank may write into its results any more. */
enum { FILLED, READ, REDUCED, TAKEN, LEFT, SETTLED, PINGED, WRITING, ABANDONED, COUNTERS };

/* Two cache lines, because the processor prefetches them in pairs. Counters of different ranks must not share a pair.
   */
enum { LINES = 128, IN_PAGE = LINES - 4 * 8 };

typedef struct {
    counter met;         /* the number of the handshake that this header belongs to */
    uint64_t id;
    uint64_t flags : 6, kind : 3, replicas : 15, bytes : 40; /* bytes of one replica */
    int64_t note;
    char data[IN_PAGE];
    int64_t words[NC_WORDS];
} page;

typedef struct {
    _Alignas(LINES) counter value;
} padded;

typedef struct {
    padded counters[COUNTERS];
    _Alignas(LINES) page pages[2];
} row;

/* Flags of a header. SHOWN: the data are published inline. TOLD_PLACES: the words are the locations of the inputs, see
   below. ALL_MAPPED: all of them are in registered memory. SHARES: the rank accepts a shared result. */
enum { SHOWN = 1, TOLD_PLACES = 2, ALL_MAPPED = 4, SHARES = 8, PUSH_READY = 16, PUSH_CANDIDATE = 32 };
/* With TOLD_PLACES the words are the location of each input: an address in this rank's private memory that peers may
   read, PRIVATE if they may not, or MAPPED - (number << SEGMENT_SHIFT | offset) in registered memory. In ALL_TO_ALL the
   offsets of the parts follow the first word. With PUSH_CANDIDATE the inputs are followed by flags (push.c) and by the
   locations of this rank's results. With PUSH_READY, peers may use these. */
enum { PRIVATE = -1, MAPPED = -2 };
enum { SEGMENT_SHIFT = 44 };

/* Larger results are written with non-temporal stores, because they would evict the cache. */
enum { STREAMED_BYTES = 8 << 20 };

/* Offset of the slots in a segment. No allocator places an array at this offset within a page: glibc uses 16 for large
   arrays, others use 0 or 64. If the low 12 bits of a load equal those of a store just before it, the processor waits
   for the store and repeats the load. Copies between an array and a slot would do so for each cache line. */
enum { PAGE = 4096, SKEW = 2112 };

/* Memory for inputs that this rank reads from other ranks. It is small enough to stay in the cache. */
enum { SCRATCH_BYTES = 256 << 10 };

typedef struct nc_leader leader;

struct nc {
    row *rows;
    int rank, ranks, spins, rails, on_wire;
    const int32_t *pids;
    int32_t pid[NC_MOST_RANKS];
    uint64_t meeting, exits, pings;
    char *slots[NC_MOST_RANKS];
    nc_sizes sizes; /* 0 before nc_room */
    leader *leader; /* on the first rank, if there are other nodes */
    int segments;
    size_t segment_bytes[NC_SEGMENTS];
    char *base[NC_SEGMENTS][NC_MOST_RANKS];
    /* The current call. */
    nc_call call;
    nc_state (*next)(nc *); /* the next step of the call */
    int came, any_private, most_replicas, inputs;
    int waits;                         /* this rank arrived before others */
    int64_t arrived, waited;           /* in ticks: arrival at the current handshake, waits in all */
    int64_t opened, opened_ticks;      /* nanoseconds and ticks when the core was opened */
    size_t itemsize, count, bytes, slice;
    size_t whole;                      /* bytes of the result */
    size_t first[NC_PIECES + 1];       /* elements before each piece */
    size_t border[NC_MOST_RANKS + 1];  /* elements before each stripe, or before each rank's contribution */
    char *shared, *sum;                /* shared result of the node, sum of the node and later of all nodes */
    uint64_t begin, end, filled, reduced, crossed, taken; /* numbers of chunks */
    uint64_t chunks;                   /* chunks of all earlier calls */
    int reader;                        /* DIRECT: the rank to read from next, and the offset */
    size_t reader_at;
    int pushes_always;                 /* push: see nc_allow_push */
    size_t push_from;                  /* 0 if it is not allowed */
    int64_t latency;                   /* in nanoseconds, to the more distant of two neighbours, or 0 if unknown */
    int any_far;                       /* a rank published a high latency in the last call with PUSH_CANDIDATE */
    uint64_t push_candidates;          /* calls in which all ranks published PUSH_CANDIDATE */
    size_t next_element, blocks_pushed;
    char *scratch, memory[PAGE + SCRATCH_BYTES];
    nc_report report;
    nc_piece piece[NC_PIECES];
    const char *in[NC_INPUTS], *combined[NC_INPUTS]; /* inputs of this rank, of all ranks */
};

static inline int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* A clock with the least cost, about 10 ns. Its unit is unknown, see nc_waited. */
static inline int64_t ticks(void)
{
#if defined(__x86_64__)
    return (int64_t)__builtin_ia32_rdtsc();
#elif defined(__aarch64__)
    int64_t t;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(t));
    return t;
#else
    return now();
#endif
}

/* End the call. */
static inline nc_state core_end(nc *c, nc_state state)
{
    c->next = NULL;
    return state;
}

/* End the call on an error. The core has failed. */
static inline nc_state core_fail(nc *c, int error)
{
    c->report.error = error;
    return core_end(c, NC_LOST);
}

static inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

static inline page *page_of(const nc *c, int rank) { return &c->rows[rank].pages[c->meeting & 1]; }
static inline const int64_t *words_of(const nc *c, int rank) { return page_of(c, rank)->words; }
static inline int flags_of(const nc *c, int rank) { return (int)page_of(c, rank)->flags; }
static inline int replicas_of(const nc *c, int rank) { return (int)page_of(c, rank)->replicas; }
static inline size_t bytes_of(const nc *c, int rank) { return (size_t)page_of(c, rank)->bytes; }

static inline size_t in_cache_line(const nc *c) { return 64 / c->itemsize; }

/* Whether the call moves bytes without reducing them. */
static inline int moves(const nc *c) { return c->call.kind >= NC_ALL_GATHER; }

/* The bytes that a rank sends to this one: their number, and their offset in its input. */
static inline size_t part_from(const nc *c, int rank, size_t *begin)
{
    if (c->call.kind != NC_ALL_TO_ALL) {
        *begin = 0;
        return bytes_of(c, rank);
    }
    const int64_t *part = words_of(c, rank) + 1 + c->rank;
    *begin = (size_t)part[0];
    return (size_t)(part[1] - part[0]);
}

static inline void count(nc *c, int which, uint64_t value)
{
    atomic_store_explicit(&c->rows[c->rank].counters[which].value, value, memory_order_release);
}

static inline uint64_t counted(const nc *c, int rank, int which)
{
    return atomic_load_explicit(&c->rows[rank].counters[which].value, memory_order_acquire);
}

static inline int reached(const nc *c, int which, uint64_t value, int ranks)
{
    for (int r = 0; r < ranks; r++)
        if (r != c->rank && counted(c, r, which) < value)
            return 0;
    return 1;
}

/* Offsets of slots in a segment. */
static inline size_t small_at(const nc *c) { return (c->meeting & 1) * c->sizes.small; }

static inline size_t chunk_at(const nc *c, uint64_t chunk)
{
    return 2 * c->sizes.small + chunk % NC_DEPTH * c->sizes.chunk;
}

static inline size_t lane_at(const nc *c, uint64_t chunk)
{
    return 2 * c->sizes.small + NC_DEPTH * c->sizes.chunk + chunk % (uint64_t)c->sizes.lanes * c->sizes.slice;
}

static inline char *lane(const nc *c, int rank, uint64_t chunk) { return c->slots[rank] + lane_at(c, chunk); }

/* The location of an input that a rank has published. */
static inline int64_t location_of_input(const nc *c, int rank, int piece, int replica)
{
    return flags_of(c, rank) & TOLD_PLACES ? words_of(c, rank)[piece * replicas_of(c, rank) + replica] : PRIVATE;
}

/* Address in this process of a location in registered memory that another rank has published. */
static inline const char *address_at(const nc *c, int rank, int64_t location)
{
    int64_t at = MAPPED - location;
    return c->base[at >> SEGMENT_SHIFT][rank] + (at & (((int64_t)1 << SEGMENT_SHIFT) - 1));
}

static inline int streams(const nc *c) { return c->whole >= STREAMED_BYTES; }

/* The piece with an element of the call, and the number of elements from there to the end of the piece or to `end`. */
static inline int piece_with(const nc *c, size_t element, size_t end, size_t *elements)
{
    int low = 0, high = c->call.pieces - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (c->first[middle] <= element)
            low = middle;
        else
            high = middle - 1;
    }
    *elements = smaller(c->first[low + 1], end) - element;
    return low;
}

/* The address of an element in this rank's result. REDUCE_SCATTER has one array with this rank's stripe. */
static inline char *output_at(const nc *c, int piece, size_t element)
{
    if (c->call.kind == NC_REDUCE_SCATTER)
        return c->piece[0].out + (element - c->border[c->rank]) * c->itemsize;
    return c->piece[piece].out + (element - c->first[piece]) * c->itemsize;
}

/* The address of an element in this rank's input. */
static inline const char *own_input_at(const nc *c, int replica, int piece, size_t element)
{
    return c->in[piece * c->call.replicas + replica] + (element - c->first[piece]) * c->itemsize;
}

/* memory.c */
int64_t core_place_of(const nc *c, const char *address, size_t bytes);
/* Copy bytes, with non-temporal stores if `streamed`. */
void core_copy(char *to, const char *from, size_t bytes, int streamed);

/* push.c */
int core_is_push_candidate(const nc *c);
/* Publish this rank's latency class and the locations of its results in the words after its inputs. Return the flags
   for the header. */
int core_publish_push(nc *c, int64_t *words, int inputs_are_mapped);
/* Read the latency classes of all ranks. Every 32nd call also measures the latency to the neighbours. Collective:
   called after a handshake in which every rank published PUSH_CANDIDATE. A measurement takes effect two such calls
   later. */
void core_update_latency(nc *c);
int core_start_push(nc *c, int replicas_of_all); /* 0 if there are too many replicas */

/* leaders.c */
void leader_close(leader *l);
/* Begin an exchange. Return the buffer for the sum of the node, which becomes the sum of all nodes. */
char *leader_begin(nc *c, int refused);
nc_state leader_go_on(nc *c, int *refused); /* NC_MOVED when the exchange is complete */

/* chunks.c */
int core_start_chunks(nc *c); /* 0 if a slot has no room for one element of each input */

#endif
