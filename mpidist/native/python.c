/* The face of the core for Python: builtin functions, without Python's headers. Here is the long way, one function for
   each of mpidist.h, and what opens a core; the short way has a file of its own. */

#include "python.h"

#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

/* Memory of arrays ------------------------------------------------------------------------------------------------ */

/* Put the memory of a list of arrays into the pieces of a call; inputs come replica by replica of each piece. */
static int read_inputs(face *f, PyObject *list, int replicas, size_t itemsize)
{
    ssize_t n = PyList_Size(list);
    if (n < 0 || n > NC_INPUTS || n / replicas > NC_PIECES) {
        if (n >= 0)
            PyErr_Format(PyExc_ValueError, "%zd arrays in one call; expected at most %d", n, (int)NC_PIECES);
        return -1;
    }
    for (ssize_t i = 0; i < n; i++) {
        Py_buffer view;
        if (memory_of(PyList_GetItem(list, i), C_CONTIGUOUS, &view) < 0)
            return -1;
        nc_inputs(f->core)[i] = view.buf;
        nc_pieces(f->core)[i / replicas] = (nc_piece){NULL, (size_t)view.len / itemsize};
    }
    return (int)(n / replicas);
}

static int read_outs(face *f, PyObject *list)
{
    ssize_t n = PyList_Size(list);
    for (ssize_t i = 0; i < n; i++) {
        Py_buffer view;
        if (memory_of(PyList_GetItem(list, i), C_CONTIGUOUS | WRITABLE, &view) < 0)
            return -1;
        nc_pieces(f->core)[i].out = view.buf;
    }
    return n < 0 ? -1 : 0;
}

/* Borders of as many parts as there are ranks, which make up all elements. */
static int read_parts(face *f, PyObject *list)
{
    int64_t before = 0, all = (int64_t)nc_pieces(f->core)[0].count;
    int fit = PyList_Size(list) == f->ranks + 1;
    for (int r = 0; r <= f->ranks && fit; r++) {
        f->parts[r] = whole(PyList_GetItem(list, r));
        fit = f->parts[r] >= before && (r > 0 || f->parts[r] == 0) && (r < f->ranks || f->parts[r] == all);
        before = f->parts[r];
    }
    if (!fit && !PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "parts are not the borders of %d parts of %lld", f->ranks, (long long)all);
    return PyErr_Occurred() ? -1 : 0;
}

static int results_overlap(face *f, const nc_call *call)
{
    size_t itemsize = nc_itemsize(call->dtype);
    int n = call->pieces * call->replicas, m = 0;
    for (int i = 0; i < n; i++) {
        const char *begin = nc_inputs(f->core)[i];
        int piece = i / call->replicas;
        f->given[i] = (nc_range){begin, begin + nc_pieces(f->core)[piece].count * itemsize, piece};
    }
    for (int i = 0; i < call->pieces; i++) {
        nc_piece p = nc_pieces(f->core)[i];
        if (p.out != NULL && p.count)
            f->results[m++] = (nc_range){p.out, p.out + p.count * itemsize, i};
    }
    return nc_overlap(f->given, n, f->results, m);
}

/* The long way: one function for each of mpidist.h ---------------------------------------------------------------- */

/* begin(id, kind, op, dtype, divisor, flags, replicas, unit, slice, note, inputs, outs or None, parts or None,
   nanoseconds) -> state, or -1 where nothing has begun as results overlap inputs that are still to be read */
static PyObject *begin(PyObject *self, PyObject *const *a, ssize_t n)
{
    face *f = face_of(self);
    if (n != 14)
        return PyErr_Format(PyExc_ValueError, "begin takes 14 arguments, not %zd", n);
    nc_call call = {.id = (uint64_t)whole(a[0]), .kind = (nc_kind)whole(a[1]), .op = (nc_op)whole(a[2]),
                    .dtype = (nc_dtype)whole(a[3]), .divisor = PyFloat_AsDouble(a[4]), .flags = (int)whole(a[5]),
                    .replicas = (int)whole(a[6]), .unit = (size_t)whole(a[7]), .slice = (size_t)whole(a[8]),
                    .note = whole(a[9])};
    int64_t nanoseconds = whole(a[13]);
    if (PyErr_Occurred())
        return NULL;
    int reduces = call.kind == NC_ALL_REDUCE || call.kind == NC_REDUCE_SCATTER;
    int unknown = (unsigned)call.dtype >= NC_DTYPES || (unsigned)call.op >= NC_OPS;
    if (unknown || (reduces && !nc_combines(call.dtype, call.op)))
        return PyErr_Format(PyExc_ValueError, "no operation %d of dtype %d", (int)call.op, (int)call.dtype);
    call.pieces = read_inputs(f, a[10], call.replicas, nc_itemsize(call.dtype));
    if (call.pieces < 0 || (a[11] != NONE && read_outs(f, a[11]) < 0))
        return NULL;
    /* Over nodes all that is given is shown before results are written. */
    if (call.kind == NC_ALL_REDUCE && a[11] != NONE && !(call.flags & NC_OVER_NODES) && results_overlap(f, &call))
        return PyLong_FromLongLong(-1);
    if (call.kind == NC_ALL_TO_ALL ? read_parts(f, a[12]) < 0 : a[12] != NONE && read_parts(f, a[12]) < 0)
        return NULL;
    call.parts = a[12] == NONE ? NULL : f->parts;
    void *thread = PyEval_SaveThread();
    nc_state state = nc_begin(f->core, &call, nanoseconds);
    f->lost = errno;
    PyEval_RestoreThread(thread);
    return PyLong_FromLongLong(state);
}

/* meet(id, flags) -> state, without waiting longer than ranks need that come together */
static PyObject *meet(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    nc_call call = {.id = (uint64_t)whole(a[0]), .kind = NC_MEET, .replicas = 1, .flags = (int)whole(a[1])};
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(nc_begin(face_of(self)->core, &call, KEEPS_LOCK / 3));
}

static PyObject *step(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    int64_t nanoseconds = whole(a[0]);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(go_on(face_of(self), NC_NOT_YET, nanoseconds));
}

/* targets(outs or None, address of a shared result or 0) */
static PyObject *targets(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    if (a[0] != NONE && read_outs(f, a[0]) < 0)
        return NULL;
    nc_targets(f->core, NULL, (char *)(intptr_t)whole(a[1]));
    return PyErr_Occurred() ? NULL : none();
}

static PyObject *slice(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)a, (void)n;
    nc_slice s;
    nc_get_slice(face_of(self)->core, &s);
    PyObject *tuple = PyTuple_New(4);
    size_t values[4] = {s.chunk, s.start, s.count, s.lane};
    for (int i = 0; i < 4 && tuple != NULL; i++)
        PyTuple_SetItem(tuple, i, PyLong_FromLongLong((long long)values[i]));
    return tuple;
}

static PyObject *crossed(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    long long chunk = whole(a[0]);
    if (PyErr_Occurred())
        return NULL;
    nc_crossed(face_of(self)->core, (size_t)chunk);
    return none();
}

static PyObject *event(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)a, (void)n;
    nc_event e;
    nc_get_event(face_of(self)->core, &e);
    PyObject *tuple = PyTuple_New(3);
    if (tuple != NULL) {
        PyTuple_SetItem(tuple, 0, PyLong_FromLongLong(e.what));
        PyTuple_SetItem(tuple, 1, PyLong_FromLongLong((long long)e.chunk));
        PyTuple_SetItem(tuple, 2, PyLong_FromLongLong(e.nanoseconds));
    }
    return tuple;
}

static PyObject *tell(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    int64_t *words = nc_tell(face_of(self)->core);
    ssize_t count = PyList_Size(a[0]);
    if (count > NC_WORDS)
        return PyErr_Format(PyExc_ValueError, "%zd numbers to tell; expected at most %d", count, (int)NC_WORDS);
    for (ssize_t i = 0; i < count; i++)
        words[i] = whole(PyList_GetItem(a[0], i));
    return PyErr_Occurred() ? NULL : none();
}

/* told(count) -> a list for each rank */
static PyObject *told(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    ssize_t count = (ssize_t)whole(a[0]);
    PyObject *all = PyErr_Occurred() ? NULL : PyList_New(f->ranks);
    for (int r = 0; r < f->ranks && all != NULL; r++) {
        PyObject *of_rank = PyList_New(count);
        for (ssize_t i = 0; i < count && of_rank != NULL; i++)
            PyList_SetItem(of_rank, i, PyLong_FromLongLong(nc_told(f->core, r)[i]));
        PyList_SetItem(all, r, of_rank);
    }
    return all;
}

/* notes() -> what each rank gave with its call */
static PyObject *notes(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)a, (void)n;
    face *f = face_of(self);
    PyObject *all = PyList_New(f->ranks);
    for (int r = 0; r < f->ranks && all != NULL; r++)
        PyList_SetItem(all, r, PyLong_FromLongLong(nc_note(f->core, r)));
    return all;
}

/* lengths() -> the bytes that each rank gives to this one */
static PyObject *lengths(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)a, (void)n;
    face *f = face_of(self);
    PyObject *all = PyList_New(f->ranks);
    for (int r = 0; r < f->ranks && all != NULL; r++)
        PyList_SetItem(all, r, PyLong_FromLongLong((long long)nc_length(f->core, r)));
    return all;
}

/* shares() -> whether all ranks take a shared result */
static PyObject *shares(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)a, (void)n;
    return PyLong_FromLongLong(nc_shares(face_of(self)->core));
}

static int addresses(face *f, PyObject *list, char **to)
{
    for (int r = 0; r < f->ranks; r++) {
        PyObject *item = PyList_GetItem(list, r);
        if (item == NULL)
            return -1;
        to[r] = (char *)(intptr_t)whole(item);
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* room(addresses, small, chunk, slice, lanes, usual) */
static PyObject *room(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    char *segments[NC_MOST_RANKS];
    nc_sizes sizes = {(size_t)whole(a[1]), (size_t)whole(a[2]), (size_t)whole(a[3]), (int)whole(a[4]),
                      (size_t)whole(a[5])};
    if (PyErr_Occurred() || addresses(f, a[0], segments) < 0)
        return NULL;
    nc_room(f->core, segments, &sizes);
    return PyLong_FromLongLong((long long)nc_segment_bytes(&sizes));
}

/* segment(addresses, bytes) -> number */
static PyObject *segment(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    char *bases[NC_MOST_RANKS];
    size_t bytes = (size_t)whole(a[1]);
    if (PyErr_Occurred() || addresses(f, a[0], bases) < 0)
        return NULL;
    return PyLong_FromLongLong(nc_segment(f->core, bases, bytes));
}

/* lead(addresses of MPI_Isend, MPI_Irecv and MPI_Test, handles of communicator and MPI_BYTE, their size, list of ranks,
   number of this node, tag) */
static PyObject *lead(PyObject *self, PyObject *const *a, ssize_t n)
{
    ssize_t nodes = n == 9 ? PyList_Size(a[6]) : -1;
    if (nodes < 1)
        return PyErr_Format(PyExc_ValueError, "lead takes 9 arguments, of which one is a list of ranks");
    nc_mpi mpi = {(void *)(intptr_t)whole(a[0]), (void *)(intptr_t)whole(a[1]), (void *)(intptr_t)whole(a[2]),
                  (intptr_t)whole(a[3]), (intptr_t)whole(a[4]), (int)whole(a[5])};
    int32_t *ranks = malloc(sizeof *ranks * (size_t)nodes);
    for (ssize_t i = 0; i < nodes && ranks != NULL; i++)
        ranks[i] = (int32_t)whole(PyList_GetItem(a[6], i));
    int me = (int)whole(a[7]), tag = (int)whole(a[8]), failed = 0;
    if (!PyErr_Occurred())
        failed = ranks == NULL || nc_lead(face_of(self)->core, &mpi, ranks, (int)nodes, me, tag) < 0;
    free(ranks);
    if (PyErr_Occurred())
        return NULL;
    return failed ? PyErr_Format(PyExc_MemoryError, "no memory for the leader of a node") : none();
}

/* halve_from(bytes) */
static PyObject *halve_from(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    size_t bytes = (size_t)whole(a[0]);
    if (PyErr_Occurred())
        return NULL;
    nc_halve_from(face_of(self)->core, bytes);
    return none();
}

/* mpi_error() -> the code of the function of MPI that failed */
static PyObject *mpi_error(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)a, (void)n;
    return PyLong_FromLongLong(nc_mpi_error(face_of(self)->core));
}

/* ping(other rank, batches, limit) -> nanoseconds, 0 if the other rank did not answer */
static PyObject *ping(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    int other = (int)whole(a[0]), batches = (int)whole(a[1]);
    int64_t limit = whole(a[2]);
    face *f = face_of(self);
    if (PyErr_Occurred())
        return NULL;
    if (other < 0 || other >= f->ranks || batches < 1)
        return PyErr_Format(PyExc_ValueError, "ping of rank %d in %d batches", other, batches);
    return PyLong_FromLongLong(nc_ping(f->core, other, batches, limit));
}

/* allow_push(may write, bytes from which near, far and mapped arrays are pushed) */
static PyObject *allow_push(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    int may_write = (int)whole(a[0]);
    nc_push_sizes from = {(size_t)whole(a[1]), (size_t)whole(a[2]), (size_t)whole(a[3])};
    if (PyErr_Occurred())
        return NULL;
    nc_allow_push(face_of(self)->core, may_write, &from);
    return none();
}

/* abandon(nanoseconds) -> the ranks that are still inside a write */
static PyObject *abandon(PyObject *self, PyObject *const *a, ssize_t n)
{
    char is_writing[NC_MOST_RANKS];
    face *f = face_of(self);
    int64_t nanoseconds = whole(a[0]);
    if (PyErr_Occurred())
        return NULL;
    void *thread = PyEval_SaveThread();
    nc_abandon(f->core, nanoseconds, is_writing);
    PyEval_RestoreThread(thread);
    n = 0;
    for (int r = 0; r < f->ranks; r++)
        n += is_writing[r];
    PyObject *writing = PyList_New(n);
    for (int r = f->ranks - 1; r >= 0 && writing != NULL; r--)
        if (is_writing[r])
            PyList_SetItem(writing, --n, PyLong_FromLongLong(r));
    return writing;
}

static PyMethodDef of_core[] = {
    {"ping", ping, METH_FASTCALL, NULL},
    {"allow_push", allow_push, METH_FASTCALL, NULL},
    {"abandon", abandon, METH_FASTCALL, NULL},
    {"begin", begin, METH_FASTCALL, NULL},
    {"meet", meet, METH_FASTCALL, NULL},
    {"step", step, METH_FASTCALL, NULL},
    {"targets", targets, METH_FASTCALL, NULL},
    {"slice", slice, METH_FASTCALL, NULL},
    {"crossed", crossed, METH_FASTCALL, NULL},
    {"event", event, METH_FASTCALL, NULL},
    {"tell", tell, METH_FASTCALL, NULL},
    {"told", told, METH_FASTCALL, NULL},
    {"notes", notes, METH_FASTCALL, NULL},
    {"lengths", lengths, METH_FASTCALL, NULL},
    {"shares", shares, METH_FASTCALL, NULL},
    {"room", room, METH_FASTCALL, NULL},
    {"segment", segment, METH_FASTCALL, NULL},
    {"lead", lead, METH_FASTCALL, NULL},
    {"halve_from", halve_from, METH_FASTCALL, NULL},
    {"mpi_error", mpi_error, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

/* Opening --------------------------------------------------------------------------------------------------------- */

static void close_face(PyObject *capsule)
{
    face *f = PyCapsule_GetPointer(capsule, CAPSULE);
    short_close(f);
    nc_close(f->core);
    free(f);
}

static int add(PyObject *dict, const char *name, PyObject *value)
{
    int failed = value == NULL || PyDict_SetItemString(dict, name, value) < 0;
    if (value != NULL)
        Py_DecRef(value);
    return failed ? -1 : 0;
}

static int add_functions(PyObject *dict, PyMethodDef *functions, PyObject *self)
{
    for (PyMethodDef *m = functions; m->name != NULL; m++)
        if (add(dict, m->name, PyCFunction_NewEx(m, self, NULL)) < 0)
            return -1;
    return 0;
}

/* open(control address, rank, ranks, spins, pids or None, on wire, rails) -> functions and "cells" */
static PyObject *open_core(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)self, (void)n;
    int32_t pids[NC_MOST_RANKS];
    int rank = (int)whole(a[1]), ranks = (int)whole(a[2]), reads = a[4] != NONE;
    if (ranks > NC_MOST_RANKS)
        return PyErr_Format(PyExc_ValueError, "%d ranks on a node; expected at most %d", ranks, (int)NC_MOST_RANKS);
    for (int r = 0; r < ranks && reads; r++)
        pids[r] = (int32_t)whole(PyList_GetItem(a[4], r));
    face *f = calloc(1, sizeof *f);
    nc *core = nc_open((void *)(intptr_t)whole(a[0]), rank, ranks, (int)whole(a[3]), reads ? pids : NULL,
                       (int)whole(a[5]), (int)whole(a[6]));
    PyObject *capsule = NULL, *dict = NULL;
    if (f != NULL && core != NULL) {
        f->core = core, f->rank = rank, f->ranks = ranks;
        f->cells[HOLDS] = 0;
        capsule = PyCapsule_New(f, CAPSULE, close_face);
    }
    if (capsule == NULL) {
        free(f);
        nc_close(core);
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_MemoryError, "no memory for the core of a node");
    }
    dict = PyDict_New();
    PyObject *cells = PyMemoryView_FromMemory((char *)f->cells, sizeof f->cells, BUF_WRITE);
    int failed = dict == NULL || add_functions(dict, of_core, capsule) < 0 ||
                 add_functions(dict, short_functions, capsule) < 0 || add(dict, "cells", cells) < 0;
    if (failed || PyErr_Occurred()) {
        if (dict != NULL)
            Py_DecRef(dict);
        dict = NULL;
    }
    Py_DecRef(capsule); /* the functions keep it */
    return dict;
}

/* read_number(pid, address) -> the whole number of 8 bytes there in the memory of another process */
static PyObject *read_number(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)self, (void)n;
    int64_t number = 0;
    int pid = (int)whole(a[0]);
    const void *address = (const void *)(intptr_t)whole(a[1]);
    if (PyErr_Occurred())
        return NULL;
    if (nc_read(pid, &number, address, sizeof number) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    return PyLong_FromLongLong(number);
}

/* write_number(pid, address, number) */
static PyObject *write_number(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)self, (void)n;
    int pid = (int)whole(a[0]);
    void *address = (void *)(intptr_t)whole(a[1]);
    int64_t number = whole(a[2]);
    if (PyErr_Occurred())
        return NULL;
    return nc_write(pid, address, &number, sizeof number) < 0 ? PyErr_SetFromErrno(PyExc_OSError) : none();
}

/* The memory between the first and the last element of any array that offers its buffer. */
static int range_of(PyObject *array, nc_range *range)
{
    Py_buffer view;
    if (memory_of(array, STRIDED, &view) < 0) {
        PyErr_Clear();
        return -1;
    }
    const char *begin = view.buf, *end = begin + (view.len ? view.itemsize : 0);
    for (int i = 0; i < view.ndim && view.len; i++) {
        ssize_t reach = (view.shape[i] - 1) * view.strides[i];
        if (reach < 0)
            begin += reach;
        else
            end += reach;
    }
    *range = (nc_range){begin, end, -1};
    return 0;
}

/* overlap(arrays, other arrays) -> 0 if none of the first list shares memory with any of the second, 1 if one may */
static PyObject *overlap(PyObject *self, PyObject *const *a, ssize_t count)
{
    (void)self, (void)count;
    enum { MOST = 256 };
    nc_range inputs[MOST], outs[MOST];
    ssize_t n = PyList_Size(a[0]), m = PyList_Size(a[1]);
    if (n < 0 || m < 0)
        return NULL;
    int unknown = n > MOST || m > MOST;
    for (ssize_t i = 0; i < n && !unknown; i++)
        unknown = range_of(PyList_GetItem(a[0], i), &inputs[i]) < 0;
    for (ssize_t i = 0; i < m && !unknown; i++) {
        unknown = range_of(PyList_GetItem(a[1], i), &outs[i]) < 0;
        outs[i].piece = 0;
    }
    return PyLong_FromLongLong(unknown || nc_overlap(inputs, (int)n, outs, (int)m));
}

static PyObject *control_bytes(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)self, (void)n;
    int ranks = (int)whole(a[0]);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong((long long)nc_control_bytes(ranks));
}

/* limit_finalize(seconds, warning, seconds, error) */
static PyObject *limit_finalize(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)self, (void)n;
    int warn_seconds = (int)whole(a[0]), limit_seconds = (int)whole(a[2]);
    const char *warning = PyBytes_AsString(a[1]), *error = PyBytes_AsString(a[3]);
    if (PyErr_Occurred())
        return NULL;
    errno = nc_limit_finalize(warn_seconds, warning, limit_seconds, error);
    return errno ? PyErr_SetFromErrno(PyExc_OSError) : none();
}

EXPORT const char *nc_build(void) { return NC_BUILD; }

EXPORT PyObject *nc_functions(void)
{
    static PyMethodDef functions[] = {
        {"open", open_core, METH_FASTCALL, NULL},
        {"control_bytes", control_bytes, METH_FASTCALL, NULL},
        {"overlap", overlap, METH_FASTCALL, NULL},
        {"limit_finalize", limit_finalize, METH_FASTCALL, NULL},
        {"read_number", read_number, METH_FASTCALL, NULL},
        {"write_number", write_number, METH_FASTCALL, NULL},
        {NULL, NULL, 0, NULL},
    };
    PyObject *dict = PyDict_New();
    if (dict == NULL || add_functions(dict, functions, NULL) < 0)
        return NULL;
    return dict;
}
