/* The native core of one node: what its ranks tell each other, and the data among them.

   Every rank maps one block of control memory, and later one segment of slots per rank. A collective is a call, which
   all ranks begin with the same id; it goes on in steps, none of which waits for long. Nothing here knows Python
   (python.c is the face for Python), is built with MPI (leaders.c calls it by address), or allocates memory once a core
   has been opened. Only nc_limit_finalize starts a thread.

   What nc_begin and nc_step return says what may follow. One thread at a time calls into a core. */

#ifndef MPIDIST_H
#define MPIDIST_H

#include <stddef.h>
#include <stdint.h>

/* Python calls these functions through ctypes. */
#define NC_EXPORT __attribute__((visibility("default")))

enum { NC_PIECES = 1024, NC_INPUTS = 8192, NC_WORDS = 2032, NC_MOST_RANKS = 1024, NC_SEGMENTS = 256 };

typedef enum {
    NC_I8, NC_I16, NC_I32, NC_I64, NC_U8, NC_U16, NC_U32, NC_U64, NC_F16, NC_BF16, NC_F32, NC_F64, NC_LONG,
    NC_C64, NC_C128, NC_CLONG, NC_BOOL, NC_DTYPES
} nc_dtype;

typedef enum { NC_SUM, NC_PROD, NC_MIN, NC_MAX, NC_LAND, NC_LOR, NC_LXOR, NC_BAND, NC_BOR, NC_BXOR, NC_OPS } nc_op;

/* ALL_GATHER concatenates what each rank gives, of any length; a broadcast is one to which only the root gives.
   ALL_TO_ALL concatenates the parts that each rank gives to this one, of any length; a scatter is one to which only the
   root gives, a gather one where all is given to the root. */
typedef enum { NC_MEET, NC_ALL_REDUCE, NC_REDUCE_SCATTER, NC_ALL_GATHER, NC_ALL_TO_ALL } nc_kind;

typedef enum {
    NC_DONE,
    NC_NOT_YET,  /* nothing moves until another rank does */
    NC_MOVED,    /* the time is over; call again */
    NC_MET,      /* all have come; say where the result goes: nc_targets */
    NC_SLICE,    /* a slice of this rank waits for other nodes: nc_get_slice, nc_crossed */
    NC_CHUNK,    /* watched: something was done with a chunk: nc_get_event */
    NC_MISMATCH, /* another id; the call has ended, and nothing was moved */
    NC_MPI,      /* over nodes, a function of MPI failed: nc_mpi_error; the core cannot be used any more */
    NC_LOST      /* The memory of a rank is inaccessible, or the call is too large. errno is the reason. The core cannot be
                    used any more. If the call is too large, all ranks get this state:
                    slots without room for an element of each stripe and replica (ENOBUFS), more than NC_INPUTS
                    replicas on the node, or than NC_MOST_OVER_NODES bytes over nodes (E2BIG) */
} nc_state;

/* Of a call. */
enum {
    NC_STOP = 1,       /* return NC_MET after the meeting: the memory of results is not known before */
    NC_SHARE = 2,      /* the same; where inputs lie in shared memory, so may the result, one for the node */
    NC_UNWANTED = 4,   /* this rank takes part, but does not want the result; not of REDUCE_SCATTER */
    NC_WATCH = 8,      /* return NC_CHUNK for every chunk */
    NC_OVER_NODES = 32, /* of MEET, and of ALL_REDUCE that is small: with the ranks of all nodes, see nc_lead */
    NC_EQUAL = 16      /* where bytes are moved: return NC_MET unless the result is as long as if all had given what
                          this rank gives, and of ALL_GATHER has that in the same place */
};

/* Elements of one array, contiguous. Its inputs, one per local replica, are at in[piece * replicas + replica]. */
typedef struct {
    char *out;
    size_t count;
} nc_piece;

typedef struct {
    uint64_t id;      /* where ranks pass another one, kind or size, all get NC_MISMATCH */
    nc_kind kind;
    nc_op op;
    nc_dtype dtype;
    int flags;
    int pieces, replicas;
    double divisor;   /* of every element of the result; 0 for none */
    size_t unit;      /* stripes of the ranks are multiples of so many elements */
    size_t slice;     /* elements of a stripe that travel together, at most; 0 for what the core thinks best, which is
                         another one on nodes with other numbers of replicas */
    int64_t note;     /* a number for the others */
    const int64_t *parts; /* one more than ranks, NULL for equal parts. ALL_TO_ALL: bytes before what goes to each rank;
                             REDUCE_SCATTER: elements before what each rank keeps */
} nc_call;

/* The sizes of the slots of each rank. They must be equal on all ranks, because each rank computes from them where the
   others put their data. */
typedef struct {
    size_t small;     /* each of two, for what is shown before the ranks meet */
    size_t chunk;     /* each of NC_DEPTH, for inputs of other ranks' slices */
    size_t slice;     /* each of lanes, for reduced slices */
    int lanes;        /* how many slices may be on their way */
    size_t usual;     /* bytes of a slice in calls that name no size */
} nc_sizes;

enum { NC_DEPTH = 2 };

typedef struct {
    size_t chunk, start, count; /* number since the call began; elements of the whole */
    size_t lane;                /* where it lies in this rank's segment of slots, in bytes */
} nc_slice;

typedef struct {
    int what;                   /* 0 filled, 1 reduced, 2 taken */
    size_t chunk;
    int64_t nanoseconds;
} nc_event;

typedef struct nc nc;

size_t nc_itemsize(nc_dtype dtype);

/* Return whether elements of a dtype can be combined by an operation. */
int nc_combines(nc_dtype dtype, nc_op op);

/* Form d = in[0] op in[1] op ... op in[n - 1] in this order, and divide by the divisor unless it is 0. Sums of 16-bit
   floats are formed in float and rounded once. d may be one of the inputs, but must not overlap them otherwise. */
void nc_combine(char *d, const char *const *in, int n, size_t count, nc_dtype dtype, nc_op op, double divisor);

/* Divide elements in place. */
void nc_divide(char *d, size_t count, nc_dtype dtype, double divisor);

/* Copy bytes from or to another process (process_vm_readv, process_vm_writev). Return 0, or -1 with errno. */
NC_EXPORT int nc_read(int pid, void *to, const void *from, size_t bytes);
NC_EXPORT int nc_write(int pid, void *to, const void *from, size_t bytes);

NC_EXPORT size_t nc_control_bytes(int ranks);
NC_EXPORT size_t nc_segment_bytes(const nc_sizes *sizes);

/* Return a new core, or NULL without memory. `control` are nc_control_bytes that all ranks map, zero at first.
   `spins`: looks in vain before the processor is given away; 0 where there are more ranks than cores. `pids`: the
   process of each rank whose memory may be read (process_vm_readv), or NULL. `on_wire`: whether there are other
   nodes, so that slices of ALL_REDUCE return as NC_SLICE, and there is no REDUCE_SCATTER; `rails`: how many ranks of
   the node have a stripe, all where there are no other nodes. */
nc *nc_open(void *control, int rank, int ranks, int spins, const int32_t *pids, int on_wire, int rails);
void nc_close(nc *core);

/* MPI of this process: MPI_Isend, MPI_Irecv and MPI_Test, and the handles of a communicator and of MPI_BYTE, which are as
   large as pointers or as ints. */
typedef struct {
    void *isend, *irecv, *test;
    intptr_t comm, byte;
    int handle_bytes;
} nc_mpi;

/* Of an ALL_REDUCE over nodes. */
enum { NC_MOST_OVER_NODES = 64 << 10 };

/* Make this rank, the first of its node, the leader in calls OVER_NODES: `ranks` of all leaders in the communicator, by
   node; the number of this node; a tag that no other messages have. 0, or -1 without memory. */
NC_EXPORT int nc_lead(nc *core, const nc_mpi *mpi, const int32_t *ranks, int nodes, int me, int tag);
NC_EXPORT void nc_halve_from(nc *core, size_t bytes); /* as a leader: use recursive halving from this size on; equal on all */
NC_EXPORT int nc_mpi_error(const nc *core);             /* the code of the function that failed, after NC_MPI */
int nc_is_on_wire(const nc *core);            /* whether there are other nodes */

/* Bound the time until this process ends: print a warning after some seconds, and an error at the limit, which also
   ends the process. Returns 0, or an error number. */
NC_EXPORT int nc_limit_finalize(int warn_seconds, const char *warning, int limit_seconds, const char *error);

/* Sizes in bytes from which a rank agrees to push. Push is used if all ranks agree. `near` applies if all neighbours share a
   cache, `far` if some do not, and `mapped` if all arrays are in memory that all ranks map. */
typedef struct {
    size_t near, far, mapped;
} nc_push_sizes;

enum { NC_MOST_PUSHING = 8 };

/* Allow to write results directly into the results of other ranks. `may_write`: whether all ranks may write into each
   other's private memory. */
NC_EXPORT void nc_allow_push(nc *core, int may_write, const nc_push_sizes *from);

/* Stop other ranks from writing into the results of this rank. Used after a call has failed; no call may follow. Waits up to
   `nanoseconds` for running writes. Sets is_writing[rank] to 1 if the rank is still inside a write, and to 0 otherwise. */
NC_EXPORT void nc_abandon(nc *core, int64_t nanoseconds, char *is_writing);

/* Give a core the slots of all ranks. */
NC_EXPORT void nc_room(nc *core, char *const *segments, const nc_sizes *sizes);

/* Make memory known that all ranks map: `bases` of each rank's part, all the same for a common one. Inputs that lie
   there are read in place. Returns its number, the same on all ranks that make the same calls, or -1. */
NC_EXPORT int nc_segment(nc *core, char *const *bases, size_t bytes);

/* Arrays smaller than this need not lie in shared memory for a result to be shared. */
enum { NC_SMALL_ARRAY = 32 << 10 };

/* Results smaller than this are not worth sharing: each rank had better have one of its own. */
enum { NC_SHARED_BYTES = 2 << 20 };

/* Whether bytes lie in such memory. */
int nc_is_shared(const nc *core, const void *address, size_t bytes);

/* Memory from begin to end, of a piece. */
typedef struct {
    const char *begin, *end;
    int piece;
} nc_range;

/* Whether any input may overlap a result, unless it is that of the same piece and begins where that does. Exact where
   results are apart. Changes the list of results. */
int nc_overlap(const nc_range *inputs, int n, nc_range *outs, int m);

/* The latency between this rank and another one of the node, in nanoseconds one way: the least of several batches of
   turns; 0 if the other did not answer within the limit. All ranks call it, in pairs, equally often and with equal
   batches. */
NC_EXPORT int64_t nc_ping(nc *core, int other, int batches, int64_t limit_nanoseconds);

nc_piece *nc_pieces(nc *core);
const char **nc_inputs(nc *core);

/* Begin a call, whose pieces and inputs have been put into the arrays above; returns as nc_step. */
nc_state nc_begin(nc *core, const nc_call *call, int64_t nanoseconds);
nc_state nc_step(nc *core, int64_t nanoseconds);

/* After NC_MET: set the arrays of the result, or `shared`, one flat memory that all ranks map. Without NC_SHARE, arrays that
   were passed to nc_begin must not change, because other ranks may already write to them. */
void nc_targets(nc *core, char *const *outs, char *shared);

void nc_get_slice(const nc *core, nc_slice *slice);
void nc_crossed(nc *core, size_t chunk); /* in their order */
NC_EXPORT void nc_get_event(const nc *core, nc_event *event);

/* Whole numbers that this rank tells the others at the next meeting, and what they told at the last one. */
NC_EXPORT int64_t *nc_tell(nc *core);
NC_EXPORT const int64_t *nc_told(const nc *core, int rank);
size_t nc_length(const nc *core, int rank);   /* bytes that a rank gave to this one */
NC_EXPORT int nc_shares(const nc *core);                /* whether all ranks take a shared result */
int64_t nc_note(const nc *core, int rank);    /* that a rank gave */

#endif
