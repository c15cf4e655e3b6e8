/* A deadline for MPI_Finalize, which blocks while another rank is stopped.

   Python threads cannot run after the interpreter has ended, so a C thread watches MPI_Finalize. */

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
    /* A full pipe must not block this process, so the text is dropped then. */
    if (poll(&out, 1, 0) == 1 && write(STDERR_FILENO, text, strlen(text)) < 0)
        return;
}

static void *watch(void *unused)
{
    (void)unused;
    const struct timespec second = {1, 0};
    /* Count seconds, because a clock would include the time while the job is suspended. */
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
    /* Block all signals in the new thread, because other threads handle them. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&thread, NULL, watch, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed ? failed : pthread_detach(thread);
}
