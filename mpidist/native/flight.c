/* The flight record of the fast path, with the entries of mpidist/collectives/observe/record.py. */

#define _GNU_SOURCE
#include "core.h"
#include "python.h"

#include <string.h>

enum { ENTRIES = 1000, NOTE = 40, NAME = 80, TEXT = 280, LINE = 100 };
enum { RUNNING, DONE };

/* The entry of a collective. kind and track are 0. */
typedef struct {
    int64_t serial, number, nbytes, begin, end;
    char note[NOTE], state, kind;
    uint16_t track;
    char name[NAME], text[TEXT], line[LINE];
} entry;

static entry *entry_of(const face *f, int64_t serial)
{
    return (entry *)f->flight.memory + (serial - 1) % ENTRIES;
}

static void copy(char *to, size_t room, const char *text, size_t length)
{
    memcpy(to, text, length < room ? length : room);
}

int64_t flight_begin(face *f, const signature *k, PyObject *line)
{
    ssize_t length = 0;
    const char *site = PyUnicode_AsUTF8AndSize(line, &length);
    if (site == NULL)
        PyErr_Clear(), site = "", length = 0; /* the path has invalid characters */
    size_t cut = length > LINE ? (size_t)length - LINE : 0;
    PyObject *text = f->known[k->number].text;
    int64_t serial = ++*f->flight.serial;
    f->flight.last[0]++, f->flight.last[1] = serial;
    entry *e = entry_of(f, serial);
    *e = (entry){.serial = serial, .number = f->flight.last[0], .begin = now(), .state = RUNNING};
    copy(e->name, NAME, PyBytes_AsString(f->flight.name), (size_t)PyBytes_Size(f->flight.name));
    copy(e->text, TEXT, PyBytes_AsString(text), (size_t)PyBytes_Size(text));
    copy(e->line, LINE, site + cut, (size_t)length - cut);
    Py_DecRef(line);
    return serial;
}

void flight_finish(const face *f, int64_t serial)
{
    entry *e = entry_of(f, serial);
    if (e->serial == serial) /* not overwritten by other threads since */
        e->end = now(), e->state = DONE;
}

/* flight(ring, serial number of its newest entry, number and serial number of the communicator's last collective, name
   of the communicator, function that returns the line of the program) */
PyObject *flight_keep(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    Py_buffer views[3];
    for (int i = 0; i < 3; i++)
        if (memory_of(a[i], WRITABLE, &views[i]) < 0)
            return NULL;
    if (f->flight.memory != NULL || views[0].len != (ssize_t)(ENTRIES * sizeof(entry)))
        return PyErr_Format(PyExc_ValueError, "flight is called once, with %zu bytes", ENTRIES * sizeof(entry));
    for (int i = 0; i < FLIGHT_OBJECTS; i++)
        Py_IncRef(f->flight.kept[i] = a[i]);
    f->flight.memory = views[0].buf, f->flight.serial = views[1].buf, f->flight.last = views[2].buf;
    f->flight.name = a[3], f->flight.line = a[4];
    return none();
}
