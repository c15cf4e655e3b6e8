/* A deadline for MPI_Finalize, which blocks while another rank is stopped.

   Python has ended when MPI_Finalize runs, so none of its threads can watch. A thread of C does. */

#define _GNU_SOURCE
#include "mpidist.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static struct {
    int warn_seconds, limit_seconds;
    char *warning, *error;
} leaving;

static void print(const char *text)
{
    struct pollfd out = {STDERR_FILENO, POLLOUT, 0};
    /* A full pipe must not keep this process from ending, so a text that does not fit is dropped. */
    if (poll(&out, 1, 0) == 1 && write(STDERR_FILENO, text, strlen(text)) < 0)
        return;
}

static void *watch(void *unused)
{
    (void)unused;
    const struct timespec second = {1, 0};
    /* Seconds are counted one by one, so the time for which the job is suspended does not count. */
    for (int waited = 1;; waited++) {
        nanosleep(&second, NULL);
        if (waited == leaving.warn_seconds)
            print(leaving.warning);
        if (waited >= leaving.limit_seconds) {
            print(leaving.error);
            _exit(EXIT_FAILURE);
        }
    }
}

int nc_limit_finalize(int warn_seconds, const char *warning, int limit_seconds, const char *error)
{
    pthread_t thread;
    sigset_t all, before;
    leaving.warning = strdup(warning), leaving.error = strdup(error);
    if (leaving.warning == NULL || leaving.error == NULL)
        return ENOMEM;
    leaving.warn_seconds = warn_seconds, leaving.limit_seconds = limit_seconds;
    /* Signals of the process are for its other threads. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&thread, NULL, watch, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed ? failed : pthread_detach(thread);
}
