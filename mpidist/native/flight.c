/* The flight record of short calls, as mpidist/collectives/watch/flight_record.py lays it out. */

#define _GNU_SOURCE
#include "short.h"

#include <string.h>
#include <time.h>

/* Serial number, number on the communicator, begin and end on the clock of the wall, state and lengths of the texts
   without padding; the texts. */
enum { FLIGHT_HEAD = 512, FLIGHT_ENTRIES = 1000, FLIGHT_NAME = 80, FLIGHT_TEXT = 280, FLIGHT_LINE = 100 };
enum { FLIGHT_END = 24, FLIGHT_STATE = 32, FLIGHT_LENGTHS = 33, FLIGHT_FIXED = 39 };
enum { FLIGHT_ENTRY = FLIGHT_FIXED + FLIGHT_NAME + FLIGHT_TEXT + FLIGHT_LINE };
enum { FLIGHT_RUNNING, FLIGHT_DONE };

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static char *flight_entry(const face *f, int64_t serial)
{
    return f->flight.memory + FLIGHT_HEAD + (serial - 1) % FLIGHT_ENTRIES * FLIGHT_ENTRY;
}

/* Of a line too long it is the rest. */
int64_t flight_begin(face *f, const signature *k, PyObject *line)
{
    ssize_t length = 0;
    const char *site = PyUnicode_AsUTF8AndSize(line, &length);
    if (site == NULL)
        PyErr_Clear(), site = "", length = 0; /* a path that is no text */
    size_t cut = length > FLIGHT_LINE ? (size_t)length - FLIGHT_LINE : 0;
    PyObject *text = f->known[k->number].text;
    const char *texts[3] = {PyBytes_AsString(f->flight.name), PyBytes_AsString(text), site + cut};
    size_t lengths[3] = {(size_t)PyBytes_Size(f->flight.name), (size_t)PyBytes_Size(text), (size_t)length - cut};
    int64_t serial = ++*f->flight.serial;
    f->flight.last[0]++, f->flight.last[1] = serial;
    double begin = seconds(), end = 0;
    char *to = flight_entry(f, serial), *at = to + FLIGHT_FIXED;
    memcpy(to, &serial, 8), memcpy(to + 8, f->flight.last, 8), memcpy(to + 16, &begin, 8);
    memcpy(to + FLIGHT_END, &end, 8), to[FLIGHT_STATE] = FLIGHT_RUNNING;
    for (size_t i = 0; i < 3; i++) {
        uint16_t n = (uint16_t)lengths[i];
        memcpy(to + FLIGHT_LENGTHS + sizeof n * i, &n, sizeof n), memcpy(at, texts[i], n);
        at += n;
    }
    Py_DecRef(line);
    return serial;
}

void flight_finish(const face *f, int64_t serial)
{
    char *to = flight_entry(f, serial);
    double end = seconds();
    if (!memcmp(to, &serial, 8)) /* another thread may have gone round meanwhile */
        memcpy(to + FLIGHT_END, &end, 8), to[FLIGHT_STATE] = FLIGHT_DONE;
}

/* flight(the file's memory, serial of its last entry, number and serial of the communicator's last, name of the
   communicator, function that returns the line of the program) */
PyObject *flight_keep(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    Py_buffer views[3];
    for (int i = 0; i < 3; i++)
        if (memory_of(a[i], WRITABLE, &views[i]) < 0)
            return NULL;
    if (f->flight.memory != NULL || views[0].len != FLIGHT_HEAD + FLIGHT_ENTRIES * FLIGHT_ENTRY)
        return PyErr_Format(PyExc_ValueError, "flight is called once, with %d bytes",
                            (int)(FLIGHT_HEAD + FLIGHT_ENTRIES * FLIGHT_ENTRY));
    for (int i = 0; i < 5; i++)
        Py_IncRef(f->flight.kept[i] = a[i]);
    f->flight.memory = views[0].buf, f->flight.serial = views[1].buf, f->flight.last = views[2].buf;
    f->flight.name = a[3], f->flight.line = a[4];
    return none();
}
