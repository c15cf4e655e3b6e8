/* The core with ranks as processes, one of which is killed in the middle of its calls, or leaves one of them early.

   check_kills JOBS SEED: so many jobs of 2 to 8 ranks. Sums of whole numbers and gathered data follow from rank and call,
   so each rank checks them. In most jobs one rank is killed after a random time, or leaves a call early and uses the
   memory of its result again. No other rank may change that memory. The other ranks must return from the core in time,
   without wrong data. They end when they know of the victim, and their core has reported several times that it waits, or
   that memory of the victim is gone. */

#define _GNU_SOURCE
#include "reference.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST_RANKS = 8, MOST_COUNT = 200000, OWN_BYTES = MOST_COUNT * 8, CALLS_WITHOUT_KILL = 150 };
/* Of a step that was given a millisecond, on a machine that others use, too. */
enum { STEP_NS = 1000000, LATE_SECONDS = 20, JOB_SECONDS = 60, WAITS_IN_VAIN = 15 };

typedef struct {
    _Atomic int ready, may_begin, is_dead, ended;
    _Atomic uint64_t calls[MOST_RANKS];
} board;

typedef struct {
    int ranks, spins, reads_memory, pushes, victim;   /* victim: or -1 */
    uint64_t leaves_call;                             /* the first call that the victim may leave early; 0 if it is killed */
    uint64_t seed;
    nc_sizes sizes;
    board *board;
    char *control, *slots[MOST_RANKS], *own[MOST_RANKS], *own_result[MOST_RANKS];
    pid_t pid[MOST_RANKS];
} job;

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void *shared_memory(size_t bytes)
{
    void *found = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED)
        fail("no shared memory: %s", strerror(errno));
    return found;
}

static uint64_t element(uint64_t call, int rank, size_t i) { return (call * 31 + i) * (uint64_t)(rank + 1); }

static size_t result_bytes(const job *j, nc *core, const nc_call *call)
{
    size_t elements = nc_pieces(core)[0].count;
    return call->kind == NC_ALL_GATHER ? elements * (size_t)j->ranks : elements * sizeof(uint64_t);
}

static _Noreturn void end(const job *j)
{
    atomic_fetch_add(&j->board->ended, 1);
    exit(0);
}

/* Leave a call, and use the memory of its result for something else. */
static _Noreturn void leave_early(const job *j, nc *core, size_t bytes)
{
    unsigned char *result = (unsigned char *)nc_pieces(core)[0].out;
    char is_writing[MOST_RANKS];
    nc_abandon(core, (int64_t)LATE_SECONDS * 1000000000, is_writing);
    for (int r = 0; r < j->ranks; r++)
        if (is_writing[r])
            fail("rank %d does not end its write", r);
    memset(result, 0x5A, bytes);
    atomic_store(&j->board->is_dead, 1);
    while (atomic_load(&j->board->ended) < j->ranks - 1)
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    for (size_t i = 0; i < bytes; i++)
        if (result[i] != 0x5A)
            fail("byte %zu was written after the call was left", i);
    exit(0);
}

/* Whether the call ended; NC_LOST and waiting in vain end the process. */
static void finish(const job *j, nc *core, int rank, const nc_call *call, dice *d)
{
    int in_vain = 0;
    size_t steps = rank == j->victim && j->leaves_call && call->id >= j->leaves_call ? 1 + below(d, 20) : 0;
    double begin = seconds();
    nc_state state = nc_begin(core, call, chance(d, 50) ? 0 : STEP_NS);
    while (state != NC_DONE) {
        if (steps && --steps == 0)
            leave_early(j, core, result_bytes(j, core, call));
        double took = seconds() - begin;
        if (took > LATE_SECONDS)
            fail("rank %d: a step of a millisecond took %.1f s", rank, took);
        int error = nc_report_of(core)->error, is_gone = error == ESRCH || error == EFAULT || error == EPERM;
        if (state == NC_LOST && j->reads_memory && j->victim >= 0 && is_gone)
            end(j);
        if (state != NC_NOT_YET && state != NC_MOVED)
            fail("rank %d: state %d, errno %d", rank, (int)state, error);
        in_vain = state == NC_NOT_YET && atomic_load(&j->board->is_dead) ? in_vain + 1 : 0;
        if (in_vain == WAITS_IN_VAIN)
            end(j);
        begin = seconds();
        state = nc_step(core, steps ? 0 : STEP_NS);
    }
}

static void check(int rank, uint64_t call, const uint64_t *out, size_t count, int ranks)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t expected = (call * 31 + i) * (uint64_t)(ranks * (ranks + 1) / 2);
        if (out[i] != expected)
            fail("rank %d: element %zu of call %llu is wrong", rank, i, (unsigned long long)call);
    }
}

static void check_gathered(int rank, uint64_t call, const uint64_t *out, size_t count, int ranks)
{
    for (int r = 0; r < ranks; r++)
        for (size_t i = 0; i < count; i++)
            if (out[(size_t)r * count + i] != element(call, r, i))
                fail("rank %d: element %zu of rank %d in call %llu is wrong", rank, i, r, (unsigned long long)call);
}

static void make_call(const job *j, nc *core, int rank, uint64_t number, uint64_t *out)
{
    dice common = dice_of(j->seed, number), d = dice_of(j->seed ^ number, (uint64_t)rank);
    int gathers = chance(&common, 35), in_own = chance(&d, 40);
    size_t count = below(&common, chance(&common, 50) ? 40 : chance(&common, 70) ? MOST_COUNT / 10 : MOST_COUNT);
    uint64_t *in = in_own ? (uint64_t *)j->own[rank] : memory(count * 8);
    if (chance(&d, 50) && !gathers)
        out = (uint64_t *)j->own_result[rank];
    for (size_t i = 0; i < count; i++)
        in[i] = element(number, rank, i);
    nc_call call = {.id = number, .kind = gathers ? NC_ALL_GATHER : NC_ALL_REDUCE, .dtype = gathers ? NC_U8 : NC_U64,
                    .op = NC_SUM, .pieces = 1, .replicas = 1};
    nc_inputs(core)[0] = (char *)in;
    nc_pieces(core)[0] = (nc_piece){(char *)out, gathers ? count * 8 : count};
    if (chance(&d, 20))
        nanosleep(&(struct timespec){0, (long)below(&d, 300000)}, NULL);
    finish(j, core, rank, &call, &d);
    if (gathers)
        check_gathered(rank, number, out, count, j->ranks);
    else
        check(rank, number, out, count, j->ranks);
    if (!in_own)
        free(in);
    atomic_store(&j->board->calls[rank], number);
}

static _Noreturn void live(job *j, int rank)
{
    int32_t pids[MOST_RANKS];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    atomic_fetch_add(&j->board->ready, 1);
    while (!atomic_load(&j->board->may_begin))
        nanosleep(&(struct timespec){0, 100000}, NULL);
    for (int r = 0; r < j->ranks; r++)
        pids[r] = (int32_t)j->pid[r];
    nc *core = nc_open(j->control, rank, j->ranks, j->spins, j->reads_memory ? pids : NULL, 0, j->ranks);
    uint64_t *out = memory((size_t)MOST_RANKS * MOST_COUNT * 8);
    nc_room(core, j->slots, &j->sizes);
    nc_segment(core, j->own, OWN_BYTES);
    nc_segment(core, j->own_result, OWN_BYTES);
    if (j->pushes)
        nc_allow_push(core, 1, 1);
    for (uint64_t number = 1; j->victim >= 0 || number <= CALLS_WITHOUT_KILL; number++)
        make_call(j, core, rank, number, out);
    free(out);
    nc_close(core);
    exit(0);
}

static void end_all(const job *j)
{
    for (int r = 0; r < j->ranks; r++)
        kill(j->pid[r], SIGKILL);
}

/* Wait for a rank, which has to end by itself. */
static void await(const job *j, int rank, double until)
{
    int status;
    pid_t done;
    while ((done = waitpid(j->pid[rank], &status, WNOHANG)) == 0 && seconds() < until)
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    if (done == 0 || !WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        end_all(j);
        fail("seed %llu: rank %d of %d %s; its last call was %llu, the victim %d", (unsigned long long)j->seed, rank,
             j->ranks, done == 0 ? "hangs" : "failed", (unsigned long long)atomic_load(&j->board->calls[rank]),
             j->victim);
    }
}

/* Whether processes of one parent may read one another's memory, which systems can forbid. */
static int may_read(void)
{
    char here, there = 1;
    pid_t child = fork();
    if (child == 0) {
        struct iovec to = {&here, 1}, from = {&there, 1};
        _exit(process_vm_readv(getppid(), &to, 1, &from, 1, 0) != 1);
    }
    int status;
    waitpid(child, &status, 0);
    return status == 0;
}

static void release_job(job *j)
{
    for (int r = 0; r < j->ranks; r++)
        munmap(j->slots[r], nc_segment_bytes(&j->sizes)), munmap(j->own[r], OWN_BYTES),
            munmap(j->own_result[r], OWN_BYTES);
    munmap(j->control, nc_control_bytes(j->ranks));
    munmap(j->board, 4096);
}

static void run_job(uint64_t seed, int can_read)
{
    dice d = dice_of(seed, 5);
    job *j = shared_memory(sizeof *j);
    *j = (job){.seed = seed, .ranks = 2 + (int)below(&d, MOST_RANKS - 1), .spins = chance(&d, 50) ? 0 : 100};
    j->reads_memory = can_read && chance(&d, 50);
    j->pushes = chance(&d, 60);
    j->victim = chance(&d, 80) ? (int)below(&d, (size_t)j->ranks) : -1;
    j->leaves_call = j->victim >= 0 && chance(&d, 50) ? 1 + below(&d, 60) : 0;
    j->sizes = (nc_sizes){4096, 16384, 4096, 1 + (int)below(&d, 4), 4096};
    j->board = shared_memory(4096);
    j->control = shared_memory(nc_control_bytes(j->ranks));
    for (int r = 0; r < j->ranks; r++) {
        j->slots[r] = shared_memory(nc_segment_bytes(&j->sizes));
        j->own[r] = shared_memory(OWN_BYTES), j->own_result[r] = shared_memory(OWN_BYTES);
    }
    for (int r = 0; r < j->ranks; r++) {
        pid_t child = fork();
        if (child == 0)
            live(j, r);
        j->pid[r] = child;
    }
    while (atomic_load(&j->board->ready) < j->ranks)
        nanosleep(&(struct timespec){0, 100000}, NULL);
    atomic_store(&j->board->may_begin, 1);
    double until = seconds() + JOB_SECONDS;
    if (j->leaves_call) {
        await(j, j->victim, until);
    } else if (j->victim >= 0) {
        int status;
        nanosleep(&(struct timespec){0, (long)below(&d, 30000000)}, NULL);
        kill(j->pid[j->victim], SIGKILL);
        waitpid(j->pid[j->victim], &status, 0);
        if (!WIFSIGNALED(status))
            end_all(j), fail("seed %llu: rank %d failed before it was killed", (unsigned long long)seed, j->victim);
        atomic_store(&j->board->is_dead, 1);
    }
    for (int r = 0; r < j->ranks; r++)
        if (r != j->victim)
            await(j, r, until);
    release_job(j);
    munmap(j, sizeof *j);
}

int main(int argc, char **argv)
{
    if (argc != 3)
        fail("usage: check_kills JOBS SEED");
    int jobs = atoi(argv[1]), can_read = may_read();
    for (int i = 0; i < jobs; i++)
        run_job(strtoull(argv[2], NULL, 10) + (uint64_t)i, can_read);
    printf("%d jobs: right%s\n", jobs, can_read ? "" : "; here no process may read another one's memory");
    return 0;
}
