/* Meetings, what ranks tell each other before them, and calls that move data in chunks.

   The control memory has a row for each rank, which that rank alone writes. A row has counters that only grow, and two
   pages that take turns: what is written before one meeting is read after it, and overwritten only before the meeting
   after the next, to which nobody comes who has not read it. Small data lie on the page itself or in one of two small
   slots, which take turns with the pages: such a call has one meeting and nothing else.

   Larger data go in chunks. The elements are cut into stripes, one for each rank that has one, and chunk k is the k-th
   slice of every stripe. Each rank fills its slot with what the others need of its private inputs, reduces its own
   slice out of the inputs of all ranks in their order, into its result and a lane that the others read, and takes
   theirs. Chunks are numbered through all calls, so a slot or lane is free when the counters of all ranks say so.

   Assumes: counters of 8 bytes are lock-free; all ranks run this build; one thread at a time calls into a core. */

#define _GNU_SOURCE
#include "mpidist.h"

#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#define RELAX() _mm_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() ((void)0)
#endif

typedef _Atomic uint64_t counter;
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "the core needs lock-free counters of 64 bits");

/* Chunks whose inputs a rank has laid out, read, reduced for others to take, and taken; exits from calls in which ranks
   read one another's memory. */
enum { FILLED, READ, REDUCED, TAKEN, LEFT, COUNTERS };

/* Two lines of the cache, which travel together: to share one with another rank's costs more than its bytes do. */
enum { LINES = 128, IN_PAGE = LINES - 4 * 8 };

typedef struct {
    counter met;         /* the number of the meeting for which this page was written */
    uint64_t id;
    uint64_t info;       /* flags, replicas << 8, bytes << 24 */
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

/* What a rank tells with the id: where its data lie. */
enum { SHOWN = 1, TOLD_PLACES = 2, SHARES = 4, KIND_SHIFT = 4 };
/* With TOLD_PLACES the words are the place of each input: an address of this rank's own memory, from which others read;
   PRIVATE, which nobody reads; or below that, counted down, number of and offset in memory that all ranks map. */
enum { PRIVATE = -1, MAPPED = -2 };
enum { SEGMENT_SHIFT = 44 };

/* Private data this small is shown rather than read out of the memory of another rank. */
enum { SMALLEST_READ = 8 << 10, READ_AT_ONCE = 2 << 20 };
/* Elements of one slice, in bytes: small enough to stay in the cache from one rank to the next. Ranks that take turns
   on a processor had better have fewer turns. */
enum { SLICE_BYTES = 128 << 10, SLICE_BYTES_IN_TURNS = 256 << 10 };
/* From here on results are written past the cache, which they would only empty. */
enum { STREAMED_BYTES = 8 << 20 };
enum { SHOWN_BY_ALL = 256 << 10 };
enum { REDUCED_AT_ONCE = 32 << 10 };
enum { LOOKS_BETWEEN_CLOCK_READS = 32 };

typedef enum { IDLE, MEETING, SHOWN_ONCE, CHUNKS, DIRECT, LEAVING } phase;

struct nc {
    row *rows;
    int rank, ranks, spins, rails, on_wire;
    const int32_t *pids;
    int32_t pid[NC_MOST_RANKS];
    uint64_t meeting, exits;
    char *slots[NC_MOST_RANKS];
    nc_sizes sizes;
    int has_room;
    int segments;
    size_t segment_bytes[NC_SEGMENTS];
    char *base[NC_SEGMENTS][NC_MOST_RANKS];
    /* The call. */
    nc_call call;
    phase phase;
    int came, shares, all_shown, any_private, most_replicas, inputs;
    size_t itemsize, count, bytes, slice;
    size_t whole;                      /* bytes of the result */
    size_t first[NC_PIECES + 1];       /* elements before each piece */
    size_t border[NC_MOST_RANKS + 1];  /* elements before each stripe */
    char *shared;
    uint64_t begin, end, filled, reduced, crossed, taken; /* chunks */
    uint64_t chunks;                   /* of all calls before */
    int reader;                        /* DIRECT: whose data are read next, and from where */
    size_t reader_at;
    nc_event event;
    nc_piece piece[NC_PIECES];
    const char *in[NC_INPUTS], *combined[NC_INPUTS]; /* of this rank; of all */
};

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static page *page_of(const nc *c, int rank) { return &c->rows[rank].pages[c->meeting & 1]; }
static page *next_page(nc *c) { return &c->rows[c->rank].pages[(c->meeting + 1) & 1]; }
static uint64_t info_of(const nc *c, int rank) { return page_of(c, rank)->info; }
static int flags_of(const nc *c, int rank) { return (int)(info_of(c, rank) & 0xff); }
static int replicas_of(const nc *c, int rank) { return (int)(info_of(c, rank) >> 8 & 0xffff); }
size_t nc_length(const nc *c, int rank) { return (size_t)(info_of(c, rank) >> 24); }
int64_t *nc_tell(nc *c) { return next_page(c)->words; }
const int64_t *nc_told(const nc *c, int rank) { return page_of(c, rank)->words; }
int64_t nc_note(const nc *c, int rank) { return page_of(c, rank)->note; }
int nc_shares(const nc *c) { return c->shares; }
nc_piece *nc_pieces(nc *c) { return c->piece; }
const char **nc_inputs(nc *c) { return c->in; }
void nc_get_event(const nc *c, nc_event *event) { *event = c->event; }
size_t nc_control_bytes(int ranks) { return sizeof(row) * (size_t)ranks; }

static void count(nc *c, int which, uint64_t value)
{
    atomic_store_explicit(&c->rows[c->rank].counters[which].value, value, memory_order_release);
}

static uint64_t counted(const nc *c, int rank, int which)
{
    return atomic_load_explicit(&c->rows[rank].counters[which].value, memory_order_acquire);
}

static int reached(const nc *c, int which, uint64_t value, int ranks)
{
    for (int r = 0; r < ranks; r++)
        if (r != c->rank && counted(c, r, which) < value)
            return 0;
    return 1;
}

nc *nc_open(void *control, int rank, int ranks, int spins, const int32_t *pids, int on_wire, int rails)
{
    nc *c = calloc(1, sizeof *c);
    if (c == NULL)
        return NULL;
    c->rows = control;
    c->rank = rank, c->ranks = ranks, c->spins = spins, c->on_wire = on_wire, c->rails = rails;
    if (pids != NULL) {
        memcpy(c->pid, pids, sizeof *pids * (size_t)ranks);
        c->pids = c->pid;
    }
    return c;
}

void nc_close(nc *c) { free(c); }

static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

size_t nc_segment_bytes(const nc_sizes *s)
{
    return 2 * rounded(s->small) + NC_DEPTH * rounded(s->chunk) + (size_t)s->lanes * rounded(s->slice);
}

void nc_room(nc *c, char *const *segments, const nc_sizes *sizes)
{
    memcpy(c->slots, segments, sizeof *segments * (size_t)c->ranks);
    c->sizes = (nc_sizes){rounded(sizes->small), rounded(sizes->chunk), rounded(sizes->slice), sizes->lanes};
    c->has_room = 1;
}

int nc_segment(nc *c, char *const *bases, size_t bytes)
{
    if (c->segments == NC_SEGMENTS)
        return -1;
    memcpy(c->base[c->segments], bases, sizeof *bases * (size_t)c->ranks);
    c->segment_bytes[c->segments] = bytes;
    return c->segments++;
}

/* The places of slots in a segment. */
static size_t small_at(const nc *c) { return (c->meeting & 1) * c->sizes.small; }
static size_t chunk_at(const nc *c, uint64_t chunk) { return 2 * c->sizes.small + chunk % NC_DEPTH * c->sizes.chunk; }

static size_t lane_at(const nc *c, uint64_t chunk)
{
    return 2 * c->sizes.small + NC_DEPTH * c->sizes.chunk + chunk % (uint64_t)c->sizes.lanes * c->sizes.slice;
}

static char *lane(const nc *c, int rank, uint64_t chunk) { return c->slots[rank] + lane_at(c, chunk); }

static int64_t place_of(const nc *c, const char *address, size_t bytes)
{
    for (int s = 0; s < c->segments; s++) {
        const char *base = c->base[s][c->rank];
        if (address >= base && address + bytes <= base + c->segment_bytes[s])
            return MAPPED - ((int64_t)s << SEGMENT_SHIFT | (address - base));
    }
    return PRIVATE;
}

int nc_is_shared(const nc *c, const void *address, size_t bytes) { return place_of(c, address, bytes) != PRIVATE; }

static const char *at_place(const nc *c, int rank, int64_t place)
{
    int64_t location = MAPPED - place;
    return c->base[location >> SEGMENT_SHIFT][rank] + (location & (((int64_t)1 << SEGMENT_SHIFT) - 1));
}

/* Copies, past the cache where the whole is large: nobody on this core reads the target soon. */
static void copy(char *to, const char *from, size_t bytes, int streamed)
{
#if defined(__x86_64__)
    if (streamed && bytes >= 256) {
        size_t head = (16 - (uintptr_t)to % 16) % 16;
        memcpy(to, from, head);
        to += head, from += head, bytes -= head;
        for (; bytes >= 64; to += 64, from += 64, bytes -= 64) {
            __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)(from + 16));
            __m128i d = _mm_loadu_si128((const __m128i *)(from + 32));
            __m128i e = _mm_loadu_si128((const __m128i *)(from + 48));
            _mm_stream_si128((__m128i *)to, a);
            _mm_stream_si128((__m128i *)(to + 16), b);
            _mm_stream_si128((__m128i *)(to + 32), d);
            _mm_stream_si128((__m128i *)(to + 48), e);
        }
        _mm_sfence();
    }
#else
    (void)streamed;
#endif
    memcpy(to, from, bytes);
}

/* Shell's sort: that of the C library may allocate memory. */
static void sort_by_address(nc_range *ranges, int n)
{
    int gap = 1;
    while (gap < n / 3)
        gap = 3 * gap + 1;
    for (; gap > 0; gap /= 3)
        for (int i = gap; i < n; i++) {
            nc_range moved = ranges[i];
            int at = i;
            for (; at >= gap && ranges[at - gap].begin > moved.begin; at -= gap)
                ranges[at] = ranges[at - gap];
            ranges[at] = moved;
        }
}

int nc_overlap(const nc_range *inputs, int n, nc_range *outs, int m)
{
    sort_by_address(outs, m);
    for (int i = 1; i < m; i++) /* inside the one before: together they reach no further */
        if (outs[i].end < outs[i - 1].end)
            outs[i].end = outs[i - 1].end;
    for (int i = 0; i < n; i++) {
        int low = 0, high = m; /* the first result that ends behind where the input begins */
        while (low < high) {
            int middle = (low + high) / 2;
            if (outs[middle].end <= inputs[i].begin)
                low = middle + 1;
            else
                high = middle;
        }
        for (; low < m && outs[low].begin < inputs[i].end; low++)
            if (outs[low].piece != inputs[i].piece || outs[low].begin != inputs[i].begin)
                return 1;
    }
    return 0;
}

/* Before the meeting ------------------------------------------------------------------------------------------- */

/* Every rank reads all of what is shown. */
static size_t most_shown(const nc *c)
{
    size_t most = (size_t)SHOWN_BY_ALL / (size_t)c->ranks;
    return most < c->sizes.small ? most : c->sizes.small;
}

/* Show what is small: on the page, or in the small slot of the next meeting. */
static int show(nc *c, page *p)
{
    size_t all = c->bytes * (size_t)c->call.replicas;
    char *to = p->data;
    if (c->on_wire)
        return 0;
    if (all > IN_PAGE) {
        size_t most = c->call.kind == NC_ALL_REDUCE ? most_shown(c) : c->sizes.small;
        if (c->call.kind == NC_ALL_GATHER && c->pids != NULL && most > SMALLEST_READ)
            most = SMALLEST_READ;
        if (!c->has_room || all > most)
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

/* Tell where inputs lie that are read in place, and whether the result may be shared: where all arrays, but for small
   ones, lie in memory that all ranks map. */
static int tell_places(nc *c, page *p)
{
    int any = 0, share = c->call.flags & NC_SHARE;
    if (c->inputs > NC_WORDS)
        return 0;
    for (int i = 0; i < c->inputs; i++) {
        size_t bytes = c->piece[i / c->call.replicas].count * c->itemsize;
        int64_t place = place_of(c, c->in[i], bytes);
        if (place == PRIVATE && c->call.kind == NC_ALL_GATHER && c->pids != NULL)
            place = (int64_t)(intptr_t)c->in[i];
        p->words[i] = place;
        any = any || place != PRIVATE;
        share = share && (place <= MAPPED || bytes < NC_SMALL_ARRAY);
    }
    return any ? TOLD_PLACES | (share ? SHARES : 0) : 0;
}

static void announce(nc *c)
{
    page *p = next_page(c);
    int flags = 0;
    if (c->call.kind != NC_MEET) {
        flags = show(c, p);
        if (!flags)
            flags = tell_places(c, p);
    }
    p->id = c->call.id;
    p->note = c->call.note;
    flags |= (int)c->call.kind << KIND_SHIFT;
    p->info = (uint64_t)flags | (uint64_t)c->call.replicas << 8 | (uint64_t)c->bytes << 24;
    c->meeting++;
    atomic_store_explicit(&p->met, c->meeting, memory_order_release);
    c->came = 0;
    c->phase = MEETING;
}

static int all_came(nc *c)
{
    for (; c->came < c->ranks; c->came++)
        if (atomic_load_explicit(&page_of(c, c->came)->met, memory_order_acquire) != c->meeting)
            return 0;
    return 1;
}

/* After the meeting -------------------------------------------------------------------------------------------- */

/* What is shown lies on the page or in the slot, replica after replica. */
static const char *shown_by(const nc *c, int rank)
{
    size_t all = nc_length(c, rank) * (size_t)replicas_of(c, rank);
    if (rank == c->rank && c->inputs == 1)
        return c->in[0]; /* which is nearer */
    return all <= IN_PAGE ? page_of(c, rank)->data : c->slots[rank] + small_at(c);
}

static int has_lanes(const nc *c) { return c->call.kind != NC_REDUCE_SCATTER && c->shared == NULL; }

static int stripes(const nc *c) { return c->call.kind == NC_ALL_GATHER ? c->ranks : c->rails; }

static void cut_stripes(nc *c)
{
    size_t ranks = (size_t)c->rails, unit = c->call.unit ? c->call.unit : 1;
    if (c->call.kind == NC_ALL_GATHER) {
        for (int r = 0; r < c->ranks; r++)
            c->border[r + 1] = c->border[r] + nc_length(c, r);
        c->whole = c->border[c->ranks];
        return;
    }
    c->whole = c->bytes;
    size_t units = (c->count + unit - 1) / unit, each = units / ranks, more = units % ranks;
    for (size_t r = 0; r <= ranks; r++) {
        size_t before = (r * each + (r < more ? r : more)) * unit;
        c->border[r] = before < c->count ? before : c->count;
    }
}

static size_t longest_stripe(const nc *c)
{
    size_t longest = 0;
    for (int r = 0; r < stripes(c); r++)
        if (c->border[r + 1] - c->border[r] > longest)
            longest = c->border[r + 1] - c->border[r];
    return longest;
}

/* Returns 0 where a slice has no room for an element. */
static int start_chunks(nc *c)
{
    size_t fits = c->sizes.chunk / ((size_t)c->rails * (size_t)c->most_replicas * c->itemsize);
    size_t usual = (size_t)(c->spins ? SLICE_BYTES : SLICE_BYTES_IN_TURNS);
    size_t slice = c->call.slice ? c->call.slice : usual / c->itemsize;
    if (c->call.kind == NC_ALL_GATHER)
        fits = c->sizes.slice;
    if (slice > c->sizes.slice / c->itemsize)
        slice = c->sizes.slice / c->itemsize;
    c->slice = slice < fits ? slice : fits;
    if (c->slice == 0)
        return 0;
    /* Slices of one slot lie side by side, each aligned. */
    size_t aligned = 64 / c->itemsize ? 64 / c->itemsize : 1;
    if (c->slice > aligned)
        c->slice -= c->slice % aligned;
    c->begin = c->filled = c->reduced = c->crossed = c->taken = c->chunks;
    c->end = c->begin + (longest_stripe(c) + c->slice - 1) / c->slice;
    c->phase = CHUNKS;
    return 1;
}

/* All ranks have met, and find the same. */
static nc_state refuse(nc *c, int error)
{
    c->phase = IDLE;
    errno = error;
    return NC_LOST;
}

/* Which way the data take, from what all ranks told. */
static nc_state decide(nc *c)
{
    int all_share = 1, readable = 1, replicas_of_all = 0;
    c->any_private = 0, c->all_shown = 1, c->most_replicas = 1;
    for (int r = 0; r < c->ranks; r++) {
        page *p = page_of(c, r);
        int flags = flags_of(c, r), replicas = replicas_of(c, r);
        int is_reduction = c->call.kind == NC_ALL_REDUCE || c->call.kind == NC_REDUCE_SCATTER;
        if (p->id != c->call.id || flags >> KIND_SHIFT != (int)c->call.kind ||
            (is_reduction && nc_length(c, r) != c->bytes)) {
            c->phase = IDLE;
            return NC_MISMATCH;
        }
        c->all_shown = c->all_shown && flags & SHOWN;
        all_share = all_share && flags & SHARES;
        readable = readable && flags & (SHOWN | TOLD_PLACES);
        replicas_of_all += replicas;
        if (replicas > c->most_replicas)
            c->most_replicas = replicas;
    }
    c->shares = all_share;
    if (c->call.kind == NC_MEET) {
        c->phase = IDLE;
        return NC_DONE;
    }
    if (replicas_of_all > NC_INPUTS)
        return refuse(c, E2BIG);
    cut_stripes(c);
    if (c->all_shown) {
        c->phase = SHOWN_ONCE;
    } else if (c->call.kind == NC_ALL_GATHER && readable) {
        c->phase = DIRECT;
        c->reader = (c->rank + 1) % c->ranks, c->reader_at = 0;
    } else {
        for (int r = 0; r < c->ranks && c->call.kind != NC_ALL_GATHER; r++)
            for (int i = 0; i < c->call.pieces * replicas_of(c, r) && !c->any_private; i++)
                c->any_private = !(flags_of(c, r) & TOLD_PLACES) || nc_told(c, r)[i] == PRIVATE;
        if (!start_chunks(c))
            return refuse(c, ENOBUFS);
    }
    int differ = c->call.flags & NC_EQUAL && c->whole != c->bytes * (size_t)c->ranks;
    return differ || c->call.flags & (NC_STOP | NC_SHARE) ? NC_MET : NC_MOVED;
}

void nc_targets(nc *c, char *const *outs, char *shared)
{
    for (int i = 0; i < c->call.pieces && outs != NULL; i++)
        c->piece[i].out = outs[i];
    c->shared = shared;
}

/* Elements of the whole ---------------------------------------------------------------------------------------- */

static int piece_with(const nc *c, size_t element)
{
    int low = 0, high = c->call.pieces - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (c->first[middle] <= element)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* A slice of a stripe. */
static size_t slice_of(const nc *c, int stripe, uint64_t chunk, size_t *start)
{
    size_t a = c->border[stripe] + (size_t)(chunk - c->begin) * c->slice, end = c->border[stripe + 1];
    *start = a < end ? a : end;
    size_t left = end - *start;
    return left < c->slice ? left : c->slice;
}

static int streams(const nc *c) { return c->whole >= STREAMED_BYTES; }

/* Copy flat elements to the pieces of the result. */
static void deliver(nc *c, const char *from, size_t start, size_t n)
{
    int i = piece_with(c, start);
    while (n) {
        size_t offset = start - c->first[i], m = c->piece[i].count - offset;
        if (m > n)
            m = n;
        copy(c->piece[i].out + offset * c->itemsize, from, m * c->itemsize, streams(c));
        from += m * c->itemsize, start += m, n -= m, i++;
    }
}

/* The first of elements that a rank's replica contributes, and how many more lie behind it: `slot` is where its private
   elements begin in its slot for this rank's slice, which begins at element `start`. */
static const char *input_at(const nc *c, int r, int q, int piece, size_t element, size_t start, const char *slot)
{
    size_t offset = (element - c->first[piece]) * c->itemsize;
    int number = piece * replicas_of(c, r) + q;
    if (r == c->rank)
        return c->in[number] + offset;
    if (flags_of(c, r) & TOLD_PLACES) {
        int64_t place = nc_told(c, r)[number];
        if (place != PRIVATE)
            return at_place(c, r, place) + offset;
    }
    return slot + (size_t)q * c->slice * c->itemsize * (size_t)c->rails + (element - start) * c->itemsize;
}

static char *target(nc *c, int piece, size_t element, size_t start, uint64_t chunk)
{
    if (c->shared != NULL)
        return c->shared + element * c->itemsize;
    if (c->call.kind == NC_REDUCE_SCATTER)
        return c->piece[0].out + (element - c->border[c->rank]) * c->itemsize;
    if (c->on_wire || c->call.flags & NC_UNWANTED)
        return lane(c, c->rank, chunk) + (element - start) * c->itemsize;
    return c->piece[piece].out + (element - c->first[piece]) * c->itemsize;
}

/* Reduce this rank's slice, block by block, so that a second copy is written out of the cache. */
static void reduce_slice(nc *c, uint64_t chunk)
{
    _Alignas(64) char streamed[REDUCED_AT_ONCE];
    size_t start, n = slice_of(c, c->rank, chunk, &start), block = REDUCED_AT_ONCE / c->itemsize;
    char *own_lane = has_lanes(c) ? lane(c, c->rank, chunk) : NULL;
    double divisor = c->on_wire ? 0 : c->call.divisor;
    for (size_t e = start; e < start + n;) {
        int piece = piece_with(c, e);
        size_t m = c->first[piece + 1] - e, left = start + n - e;
        m = m < left ? m : left;
        m = m < block ? m : block;
        int inputs = 0;
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
            copy(to, shown, m * c->itemsize, 1);
        } else if (c->whole >= 4 * (size_t)STREAMED_BYTES && own_lane == NULL && !in_place) {
            nc_combine(streamed, c->combined, inputs, m, c->call.dtype, c->call.op, divisor);
            copy(to, streamed, m * c->itemsize, 1);
        } else {
            nc_combine(to, c->combined, inputs, m, c->call.dtype, c->call.op, divisor);
            if (shown != to)
                memcpy(shown, to, m * c->itemsize);
        }
        e += m;
    }
}

/* One step of a chunk ------------------------------------------------------------------------------------------- */

static void fill_slot(nc *c, uint64_t chunk)
{
    char *slot = c->slots[c->rank] + chunk_at(c, chunk);
    const int64_t *places = flags_of(c, c->rank) & TOLD_PLACES ? nc_told(c, c->rank) : NULL;
    for (int stripe = 0; stripe < c->rails; stripe++) {
        size_t start, n = slice_of(c, stripe, chunk, &start);
        if (stripe == c->rank || n == 0)
            continue;
        for (int q = 0; q < c->call.replicas; q++) {
            char *to = slot + (size_t)(q * c->rails + stripe) * c->slice * c->itemsize;
            for (size_t e = start; e < start + n;) {
                int piece = piece_with(c, e), number = piece * c->call.replicas + q;
                size_t m = c->first[piece + 1] - e, left = start + n - e;
                m = m < left ? m : left;
                if (places == NULL || places[number] == PRIVATE)
                    memcpy(to + (e - start) * c->itemsize, c->in[number] + (e - c->first[piece]) * c->itemsize,
                           m * c->itemsize);
                e += m;
            }
        }
    }
}

static int try_fill(nc *c)
{
    /* The slot is free when all have read what was in it before. */
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
    uint64_t free = k + 1 - depth; /* chunks that all have to have taken before this one has a lane */
    if ((has_lanes(c) || c->on_wire) && k >= depth && !(c->taken >= free && reached(c, TAKEN, free, c->ranks)))
        return NC_NOT_YET;
    c->reduced++;
    if (c->call.kind == NC_ALL_GATHER) {
        size_t start, n = slice_of(c, c->rank, k, &start);
        if (n)
            memcpy(lane(c, c->rank, k), c->in[0] + (start - c->border[c->rank]), n);
    } else if (c->rank < c->rails) {
        reduce_slice(c, k);
        if (c->on_wire) {
            size_t start;
            count(c, READ, c->reduced);
            if (slice_of(c, c->rank, k, &start))
                return NC_SLICE;
        }
    }
    if (c->on_wire) {
        count(c, READ, c->reduced);
        if (c->crossed != k) /* an empty slice behind one that is still on its way */
            return NC_SLICE;
        c->crossed = c->reduced;
    }
    count(c, REDUCED, c->reduced);
    return NC_MOVED;
}

static int try_take(nc *c)
{
    uint64_t k = c->taken, own = c->on_wire ? c->crossed : c->reduced;
    if (k == c->end || own <= k || !reached(c, REDUCED, k + 1, stripes(c)))
        return 0;
    if (has_lanes(c) && !(c->call.flags & NC_UNWANTED)) {
        for (int s = 0; s < stripes(c); s++) {
            size_t start, n = slice_of(c, s, k, &start);
            if (n == 0 || (s == c->rank && !c->on_wire && c->call.kind != NC_ALL_GATHER))
                continue;
            if (c->call.kind == NC_ALL_GATHER)
                copy(c->piece[0].out + start, lane(c, s, k), n, streams(c));
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
    c->event = (nc_event){what, (size_t)(chunk - c->begin), now() - since};
    return NC_CHUNK;
}

/* Ends a call in chunks; what others still read of this rank lies in slots and lanes, which the next call waits for.
   Inputs that were read in place have been: all chunks are reduced. */
static nc_state end_chunks(nc *c)
{
    c->chunks = c->end;
    c->phase = IDLE;
    return NC_DONE;
}

static nc_state move_chunks(nc *c)
{
    int64_t since = c->call.flags & NC_WATCH ? now() : 0;
    if (c->taken == c->end)
        return end_chunks(c);
    if (try_fill(c))
        return watched(c, 0, c->filled - 1, since, NC_MOVED);
    nc_state state = try_reduce(c);
    if (state != NC_NOT_YET)
        return watched(c, 1, c->reduced - 1, since, state);
    if (try_take(c))
        return watched(c, 2, c->taken - 1, since, NC_MOVED);
    return NC_NOT_YET;
}

/* The other ways ------------------------------------------------------------------------------------------------ */

static void reduce_shown(nc *c)
{
    size_t start = 0, end = c->count;
    if (c->call.kind == NC_REDUCE_SCATTER)
        start = c->border[c->rank], end = c->border[c->rank + 1];
    for (size_t e = start; e < end;) {
        int piece = piece_with(c, e);
        size_t m = c->first[piece + 1] < end ? c->first[piece + 1] - e : end - e;
        int inputs = 0;
        for (int r = 0; r < c->ranks; r++)
            for (int q = 0; q < replicas_of(c, r); q++)
                c->combined[inputs++] = shown_by(c, r) + (size_t)q * c->bytes + e * c->itemsize;
        char *to = c->call.kind == NC_REDUCE_SCATTER ? c->piece[0].out + (e - start) * c->itemsize
                                                     : c->piece[piece].out + (e - c->first[piece]) * c->itemsize;
        nc_combine(to, c->combined, inputs, m, c->call.dtype, c->call.op, c->call.divisor);
        e += m;
    }
}

static nc_state take_shown(nc *c)
{
    c->phase = IDLE;
    if (c->call.flags & NC_UNWANTED)
        return NC_DONE;
    if (c->call.kind != NC_ALL_GATHER) {
        reduce_shown(c);
        return NC_DONE;
    }
    for (int r = 0; r < c->ranks; r++)
        if (c->piece[0].out + c->border[r] != shown_by(c, r))
            memcpy(c->piece[0].out + c->border[r], shown_by(c, r), nc_length(c, r));
    return NC_DONE;
}

int nc_read(int pid, void *to, const void *from, size_t bytes)
{
    char *here = to;
    for (const char *there = from; bytes;) {
        struct iovec target = {here, bytes}, source = {(void *)(intptr_t)there, bytes};
        ssize_t done = process_vm_readv(pid, &target, 1, &source, 1, 0);
        if (done <= 0) {
            errno = done < 0 ? errno : EFAULT;
            return -1;
        }
        here += done, there += done, bytes -= (size_t)done;
    }
    return 0;
}

static nc_state read_next(nc *c)
{
    int r = c->reader;
    size_t length = nc_length(c, r), n = length - c->reader_at;
    char *to = c->piece[0].out + c->border[r] + c->reader_at;
    n = n < READ_AT_ONCE ? n : READ_AT_ONCE;
    if (n && !(c->call.flags & NC_UNWANTED)) {
        int64_t place = nc_told(c, r)[0];
        if (r == c->rank) {
            if (to != c->in[0] + c->reader_at)
                copy(to, c->in[0] + c->reader_at, n, streams(c));
        } else if (flags_of(c, r) & SHOWN) {
            memcpy(to, shown_by(c, r) + c->reader_at, n);
        } else if (place <= MAPPED) {
            copy(to, at_place(c, r, place) + c->reader_at, n, streams(c));
        } else if (nc_read(c->pids[r], to, (const char *)(intptr_t)place + c->reader_at, n) < 0) {
            return NC_LOST;
        }
    }
    c->reader_at += n;
    if (c->reader_at < length && n)
        return NC_MOVED;
    c->reader_at = 0, c->reader = (r + 1) % c->ranks;
    if (r == c->rank) { /* the last */
        count(c, LEFT, ++c->exits);
        c->phase = LEAVING;
    }
    return NC_MOVED;
}

/* Wait until nobody reads this rank's memory any more. */
static nc_state leave(nc *c)
{
    if (!(flags_of(c, c->rank) & SHOWN) && !reached(c, LEFT, c->exits, c->ranks))
        return NC_NOT_YET;
    c->phase = IDLE;
    return NC_DONE;
}

/* Calls ---------------------------------------------------------------------------------------------------------- */

static nc_state move(nc *c)
{
    switch (c->phase) {
    case MEETING:
        return all_came(c) ? decide(c) : NC_NOT_YET;
    case SHOWN_ONCE:
        return take_shown(c);
    case CHUNKS:
        return move_chunks(c);
    case DIRECT:
        return read_next(c);
    case LEAVING:
        return leave(c);
    default:
        return NC_DONE;
    }
}

nc_state nc_step(nc *c, int64_t nanoseconds)
{
    int64_t end = 0;
    int idle = 0;
    for (unsigned looks = 1;; looks++) {
        nc_state state = move(c);
        if (state == NC_MOVED)
            idle = 0;
        else if (state != NC_NOT_YET)
            return state;
        else if (idle == c->spins)
            sched_yield();
        else {
            RELAX();
            idle++;
        }
        /* Without spins each look may take as long as others work. */
        if (looks % LOOKS_BETWEEN_CLOCK_READS == 0 || state == NC_MOVED || idle == c->spins) {
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
    announce(c);
    return nc_step(c, nanoseconds);
}

void nc_get_slice(const nc *c, nc_slice *slice)
{
    uint64_t k = c->reduced - 1;
    slice->chunk = (size_t)(k - c->begin);
    slice->start = 0;
    slice->count = c->rank < c->rails ? slice_of(c, c->rank, k, &slice->start) : 0;
    slice->lane = lane_at(c, k);
}

void nc_crossed(nc *c, size_t chunk)
{
    uint64_t k = c->begin + chunk;
    size_t start = 0, n = c->rank < c->rails ? slice_of(c, c->rank, k, &start) : 0;
    if (c->call.divisor != 0 && n) {
        char *at = c->shared != NULL ? c->shared + start * c->itemsize : lane(c, c->rank, k);
        nc_divide(at, n, c->call.dtype, c->call.divisor);
    }
    c->crossed = k + 1;
    count(c, REDUCED, c->crossed);
}
