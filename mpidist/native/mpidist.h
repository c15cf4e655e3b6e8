/* The native core of one node: handshakes and data movement between its ranks.

   Every rank maps one block of control memory, and later one segment of slots per rank. A collective is a call that all
   ranks begin with the same id. nc_begin and nc_step advance it and return its state. Neither waits for long. Only one
   thread at a time may call into a core.

   The core does not depend on Python (python.c is the Python interface) and is not linked with MPI (leaders.c calls MPI
   by address). It allocates no memory after nc_open and nc_lead. Only nc_limit_finalize starts a thread. */

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

typedef enum { NC_SUM, NC_PROD, NC_MIN, NC_MAX, NC_BAND, NC_BOR, NC_BXOR, NC_OPS } nc_op;

/* ALL_GATHER concatenates the contributions of all ranks, of any lengths. In a broadcast only the root contributes.
   ALL_TO_ALL concatenates the parts that each rank sends to this one, of any lengths. In a scatter only the root sends,
   in a gather all ranks send to the root only. */
typedef enum { NC_MEET, NC_ALL_REDUCE, NC_REDUCE_SCATTER, NC_ALL_GATHER, NC_ALL_TO_ALL } nc_kind;

typedef enum {
    NC_DONE,
    NC_NOT_YET,  /* waits for another rank: poll again with nc_step */
    NC_MOVED,    /* made progress until the time was over: call nc_step */
    NC_MET,      /* the handshake is complete: set the results, see nc_targets, and call nc_step */
    NC_SLICE,    /* a slice of this rank is ready for other nodes: see nc_report, later nc_crossed */
    NC_CHUNK,    /* NC_WATCH: a step of a chunk is complete, see nc_report */
    NC_MISMATCH, /* another rank passed another id. The call has ended without moving data. */
    NC_MPI,      /* an MPI function failed: its error code is in nc_report. The core has failed. */
    NC_LOST      /* The memory of a rank is inaccessible, or the call is too large. The errno is in nc_report. The core has
                    failed. All ranks get this state if the call is too large: slots have no room for an element of
                    each stripe and replica (ENOBUFS), or there are more than NC_INPUTS replicas on the node or more
                    than NC_MOST_OVER_NODES bytes over nodes (E2BIG) */
} nc_state;

/* Flags of a call. */
enum {
    NC_STOP = 1,       /* return NC_MET after the handshake, because the addresses of results are unknown before */
    NC_SHARE = 2,      /* like NC_STOP. If all inputs are in shared memory, the ranks may share one result. */
    NC_UNWANTED = 4,   /* this rank contributes, but needs no result. Not for REDUCE_SCATTER. */
    NC_WATCH = 8,      /* return NC_CHUNK for every chunk */
    NC_OVER_NODES = 32, /* MEET and small ALL_REDUCE only: include the ranks of all nodes, see nc_lead */
    NC_EQUAL = 16      /* ALL_GATHER and ALL_TO_ALL: expect equal contributions. Return NC_MET if the length of the
                          result, or this rank's offset in an ALL_GATHER, differs. */
};

/* One contiguous array of the result. Its inputs, one per local replica, are nc_inputs()[piece * replicas + replica].
   */
typedef struct {
    char *out;
    size_t count;
} nc_piece;

typedef struct {
    uint64_t id;      /* all ranks get NC_MISMATCH if ids, kinds or sizes differ */
    nc_kind kind;
    nc_op op;
    nc_dtype dtype;
    int flags;
    int pieces, replicas;
    double divisor;   /* divides every element of the result, 0 for none */
    size_t slice;     /* elements of a slice, at most. With 0 the core chooses, differently on nodes with different
                         numbers of replicas. */
    int64_t note;     /* a number published with the header */
    const int64_t *parts; /* ranks + 1 offsets. REDUCE_SCATTER: elements before those that each rank keeps. ALL_TO_ALL:
                             bytes before the part for each rank, or NULL for equal parts. */
} nc_call;

/* Sizes of the slots of each rank. They must be equal on all ranks, because each rank computes the addresses of the
   other ranks' slots from them. */
typedef struct {
    size_t small;     /* each of two slots for data published inline */
    size_t chunk;     /* each of NC_DEPTH slots for inputs of other ranks' slices */
    size_t slice;     /* each lane, for reduced slices */
    int lanes;        /* slices in flight, at most */
    size_t usual;     /* bytes of a slice in calls that specify no size */
} nc_sizes;

enum { NC_DEPTH = 2 };

typedef struct {
    size_t chunk, start, count; /* number in this call, first element, number of elements */
    size_t lane;                /* byte offset in this rank's segment of slots */
} nc_slice;

typedef struct {
    int what;                   /* 0: filled, 1: reduced, 2: copied out */
    size_t chunk;
    int64_t nanoseconds;
} nc_event;

/* Results of the current call, read in place. */
typedef struct {
    int error;                  /* after NC_MPI or NC_LOST */
    int shares;                 /* after the handshake: whether all ranks accept a shared result */
    nc_slice slice;             /* after NC_SLICE */
    nc_event event;             /* after NC_CHUNK */
} nc_report;

typedef struct nc nc;

size_t nc_itemsize(nc_dtype dtype);

/* Return whether an operation supports a dtype. */
int nc_combines(nc_dtype dtype, nc_op op);

/* Compute d = in[0] op in[1] op ... op in[n - 1] in this order, and divide by the divisor unless it is 0. 16-bit floats
   are combined as float and rounded once. d may be one of the inputs, but must not overlap them otherwise. */
void nc_combine(char *d, const char *const *in, int n, size_t count, nc_dtype dtype, nc_op op, double divisor);

/* Divide elements in place. */
void nc_divide(char *d, size_t count, nc_dtype dtype, double divisor);

/* Copy bytes from or to another process (process_vm_readv, process_vm_writev). Return 0, or -1 with errno. */
NC_EXPORT int nc_read(int pid, void *to, const void *from, size_t bytes);
NC_EXPORT int nc_write(int pid, void *to, const void *from, size_t bytes);

NC_EXPORT size_t nc_control_bytes(int ranks);
NC_EXPORT size_t nc_segment_bytes(const nc_sizes *sizes);

/* Return a new core, or NULL without memory. `control`: zeroed memory of nc_control_bytes that all ranks map. `spins`:
   failed polls before sched_yield, 0 if there are more ranks than cores. `pids`: processes for process_vm_readv and
   process_vm_writev, or NULL. `on_wire`: there are other nodes, so ALL_REDUCE returns
   NC_SLICE and REDUCE_SCATTER is not supported. `rails`: number of ranks of this node with a stripe, all ranks if there
   is one node. */
nc *nc_open(void *control, int rank, int ranks, int spins, const int32_t *pids, int on_wire, int rails);
void nc_close(nc *core);

/* MPI_Isend, MPI_Irecv and MPI_Test of this process, and the handles of a communicator and of MPI_BYTE. handle_bytes is
   the size of a pointer (Open MPI) or of an int (MPICH). */
typedef struct {
    void *isend, *irecv, *test;
    intptr_t comm, byte;
    int handle_bytes;
} nc_mpi;

/* Bytes of an ALL_REDUCE over nodes, at most. */
enum { NC_MOST_OVER_NODES = 64 << 10 };

/* Make this rank, the first of its node, the leader in calls with NC_OVER_NODES. `ranks`: rank of each node's leader in
   the communicator. `me`: number of this node. `tag`: used by no other messages. Return 0, or -1 without memory. */
NC_EXPORT int nc_lead(nc *core, const nc_mpi *mpi, const int32_t *ranks, int nodes, int me, int tag);
NC_EXPORT void nc_halve_from(nc *core, size_t bytes); /* use recursive halving from this size on, equal on all */
int nc_is_on_wire(const nc *core);            /* whether there are other nodes */

/* Limit the time until this process ends. Print a warning after warn_seconds, and an error before exiting after
   limit_seconds. Return 0, or an error number. */
NC_EXPORT int nc_limit_finalize(int warn_seconds, const char *warning, int limit_seconds, const char *error);

enum { NC_MOST_PUSHING = 8 };

/* Agree to write results of `from` bytes and more directly into the results of other ranks. All ranks must agree.
   `always`: also private memory of ranks that share a cache. */
NC_EXPORT void nc_allow_push(nc *core, size_t from, int always);

/* Stop other ranks from writing into the results of this rank after a failed call. No call may follow. Waits up to
   `nanoseconds` for running writes. Sets is_writing[rank] to 1 if the rank is still inside a write, and to 0 otherwise.
   */
NC_EXPORT void nc_abandon(nc *core, int64_t nanoseconds, char *is_writing);

/* Set the slots of all ranks. */
NC_EXPORT void nc_room(nc *core, char *const *segments, const nc_sizes *sizes);

/* Register memory that all ranks map. `bases`: address of each rank's part, all equal for common memory. Other ranks
   read inputs there in place. Return its number, or -1. Ranks must register in the same order, to get equal numbers. */
NC_EXPORT int nc_segment(nc *core, char *const *bases, size_t bytes);

/* Arrays smaller than this need not be in shared memory for the result to be shared. */
enum { NC_SMALL_ARRAY = 32 << 10 };

/* Smaller results are not shared, because a copy costs less than the agreement. */
enum { NC_SHARED_BYTES = 2 << 20 };

/* Whether bytes are in registered memory. */
int nc_is_shared(const nc *core, const void *address, size_t bytes);

/* Memory of a piece. */
typedef struct {
    const char *begin, *end;
    int piece;
} nc_range;

/* Whether any input may overlap a result, except at the start of its own piece. Exact if results do not overlap each
   other. Reorders and extends `outs`. */
int nc_overlap(const nc_range *inputs, int n, nc_range *outs, int m);

/* Return the one-way latency to another rank of the node in nanoseconds: the minimum of several batches, or 0 after the
   limit. All ranks must call this in pairs, equally often and with equal batches. */
NC_EXPORT int64_t nc_ping(nc *core, int other, int batches, int64_t limit_nanoseconds);

nc_piece *nc_pieces(nc *core);
const char **nc_inputs(nc *core);

/* Begin a call. nc_pieces and nc_inputs must be filled before. */
nc_state nc_begin(nc *core, const nc_call *call, int64_t nanoseconds);
nc_state nc_step(nc *core, int64_t nanoseconds);

/* After NC_MET: set `shared`, one flat array for the result that all ranks map, or NULL. The arrays of the result may
   be set in nc_pieces, unless they were set before nc_begin, because other ranks may already write to those. */
void nc_targets(nc *core, char *shared);

NC_EXPORT const nc_report *nc_report_of(const nc *core);
NC_EXPORT int64_t nc_waited(const nc *core); /* nanoseconds of all calls from this rank's arrival to the last one's */
NC_EXPORT void nc_crossed(nc *core, size_t chunk); /* other nodes have reduced the slice, in the order of chunks */

/* Results of the last handshake. */
size_t nc_length(const nc *core, int rank);   /* bytes that a rank sends to this one */
int64_t nc_note(const nc *core, int rank);    /* the note of a rank */

#endif
