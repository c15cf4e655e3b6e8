/* Faults of process_vm_readv and process_vm_writev, for LD_PRELOAD.

   MEMORY_FAULT="RANK FUNCTION NUMBER FAULT" applies to call NUMBER (from 1, per thread) of FUNCTION on a rank. Only calls of
   at least 4 KiB with another process count.
   stop: the process stops itself (SIGSTOP) before the call
   kill: the process kills itself
   fail: the call returns EPERM
   slow: this call and all later ones take 0.3 s longer
   short: this call and all later ones copy a part of the data. */

#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { SMALLEST = 4096 };

static size_t bytes_of(const struct iovec *parts, unsigned long n)
{
    size_t bytes = 0;
    for (unsigned long i = 0; i < n; i++)
        bytes += parts[i].iov_len;
    return bytes;
}

static ssize_t call(long number, const char *name, pid_t pid, const struct iovec *here, unsigned long n,
                    const struct iovec *there, unsigned long m, unsigned long flags)
{
    static __thread int calls[2];
    int rank, target;
    char function[16], fault[16];
    const char *setting = getenv("MEMORY_FAULT"), *own_rank = getenv("OMPI_COMM_WORLD_RANK");
    struct iovec first;
    if (pid != getpid() && bytes_of(here, n) >= SMALLEST && setting != NULL && own_rank != NULL &&
        sscanf(setting, "%d %15s %d %15s", &rank, function, &target, fault) == 4 && rank == atoi(own_rank) && !strcmp(function, name)) {
        int now = ++calls[number == SYS_process_vm_writev];
        if (now == target && !strcmp(fault, "stop"))
            kill(getpid(), SIGSTOP);
        if (now == target && !strcmp(fault, "kill"))
            kill(getpid(), SIGKILL);
        if (now == target && !strcmp(fault, "fail"))
            return errno = EPERM, -1;
        if (now >= target && !strcmp(fault, "slow"))
            usleep(300000);
        if (now >= target && !strcmp(fault, "short")) {
            first = (struct iovec){here->iov_base, here->iov_len > 100 ? here->iov_len / 2 + 1 : here->iov_len};
            here = &first, n = 1;
        }
    }
    return syscall(number, (long)pid, here, n, there, m, flags);
}

ssize_t process_vm_readv(pid_t pid, const struct iovec *here, unsigned long n, const struct iovec *there,
                         unsigned long m, unsigned long flags)
{
    return call(SYS_process_vm_readv, "readv", pid, here, n, there, m, flags);
}

ssize_t process_vm_writev(pid_t pid, const struct iovec *here, unsigned long n, const struct iovec *there,
                          unsigned long m, unsigned long flags)
{
    return call(SYS_process_vm_writev, "writev", pid, here, n, there, m, flags);
}
