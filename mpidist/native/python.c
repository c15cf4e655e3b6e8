/* Python interface: builtin functions of the core for every collective, without Python's headers.
   Python calls the other functions through ctypes (mpidist/collectives/node/native.py), see also fast_path.c. */

#include "python.h"

#include <stdlib.h>
#include <string.h>

/* Nanoseconds that a call polls at first. Long enough for ranks that arrive almost together. */
enum { BEGINS = 50000 };

/* Memory of arrays ------------------------------------------------------------------------------------------------ */

/* Read the arrays of a list as inputs of a call, in the order of pieces and, within a piece, of replicas. */
static int read_inputs(face *f, PyObject *list, int replicas, size_t itemsize)
{
    ssize_t n = PyList_Size(list);
    if (n < 0 || n > NC_INPUTS || n / replicas > NC_PIECES) {
        if (n >= 0)
            PyErr_Format(PyExc_ValueError, "%zd arrays in one call. Pass at most %d", n, (int)NC_PIECES);
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

/* Read the borders of one part per rank. */
static int read_parts(face *f, PyObject *list)
{
    for (int r = 0; r <= f->ranks; r++)
        f->parts[r] = whole(PyList_GetItem(list, r));
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

/* Calls on the general path --------------------------------------------------------------------------------------- */

/* begin(id, kind, op, dtype, divisor, flags, replicas, slice, note, inputs, outs or None, parts or None) -> state, or
   -1 if nothing was started because results overlap inputs */
static PyObject *begin(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    nc_call call = {.id = (uint64_t)whole(a[0]), .kind = (nc_kind)whole(a[1]), .op = (nc_op)whole(a[2]),
                    .dtype = (nc_dtype)whole(a[3]), .divisor = PyFloat_AsDouble(a[4]), .flags = (int)whole(a[5]),
                    .replicas = (int)whole(a[6]), .slice = (size_t)whole(a[7]), .note = whole(a[8])};
    if (PyErr_Occurred())
        return NULL;
    int reduces = call.kind == NC_ALL_REDUCE || call.kind == NC_REDUCE_SCATTER;
    int unknown = (unsigned)call.dtype >= NC_DTYPES || (unsigned)call.op >= NC_OPS;
    if (unknown || (reduces && !nc_combines(call.dtype, call.op)))
        return PyErr_Format(PyExc_ValueError, "no operation %d of dtype %d", (int)call.op, (int)call.dtype);
    PyObject *outs = a[10], *parts = a[11];
    call.pieces = read_inputs(f, a[9], call.replicas, nc_itemsize(call.dtype));
    if (call.pieces < 0 || (outs != NONE && read_outs(f, outs) < 0) || (parts != NONE && read_parts(f, parts) < 0))
        return NULL;
    call.parts = parts == NONE ? NULL : f->parts;
    /* Calls over nodes publish all inputs inline before results are written, so overlaps are harmless. */
    if (call.kind == NC_ALL_REDUCE && outs != NONE && !(call.flags & NC_OVER_NODES) && results_overlap(f, &call))
        return PyLong_FromLongLong(-1);
    void *thread = PyEval_SaveThread();
    nc_state state = nc_begin(f->core, &call, BEGINS);
    PyEval_RestoreThread(thread);
    return PyLong_FromLongLong(state);
}

/* meet(id, flags) -> state. Keeps the GIL, because ranks that arrive together are faster than releasing it. */
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
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(resume(face_of(self), nanoseconds));
}

/* targets(outs or None, address of a shared result or 0) */
static PyObject *targets(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    if (a[0] != NONE && read_outs(f, a[0]) < 0)
        return NULL;
    nc_targets(f->core, (char *)(intptr_t)whole(a[1]));
    return PyErr_Occurred() ? NULL : none();
}

/* of_ranks(are notes) -> the note of each rank, or the bytes that it sends to this one */
static PyObject *of_ranks(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    int are_notes = whole(a[0]) != 0;
    PyObject *all = PyList_New(f->ranks);
    for (int r = 0; r < f->ranks && all != NULL; r++)
        PyList_SetItem(all, r, PyLong_FromLongLong(are_notes ? nc_note(f->core, r) : (int64_t)nc_length(f->core, r)));
    return all;
}

static PyMethodDef of_core[] = {
    {"begin", begin, METH_FASTCALL, NULL},
    {"meet", meet, METH_FASTCALL, NULL},
    {"step", step, METH_FASTCALL, NULL},
    {"targets", targets, METH_FASTCALL, NULL},
    {"of_ranks", of_ranks, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

/* Opening --------------------------------------------------------------------------------------------------------- */

static void close_face(PyObject *capsule)
{
    face *f = PyCapsule_GetPointer(capsule, CAPSULE);
    fast_close(f);
    nc_close(f->core);
    free(f);
}

/* Add a value to a dict, and release it. Return 0, or -1 with an error. */
static int add(PyObject *dict, const char *name, PyObject *value)
{
    int failed = dict == NULL || value == NULL || PyDict_SetItemString(dict, name, value) < 0;
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

/* Return a dict of the functions of a new core, "cells", and "address" of the core. Arguments as in nc_open. */
NC_EXPORT PyObject *nc_open_for_python(void *control, int rank, int ranks, int spins, const int32_t *pids, int on_wire,
                                       int rails)
{
    if (ranks > NC_MOST_RANKS)
        return PyErr_Format(PyExc_ValueError, "%d ranks on a node. The core supports %d. Set MPIDIST_NATIVE=0", ranks,
                            (int)NC_MOST_RANKS);
    face *f = calloc(1, sizeof *f);
    nc *core = nc_open(control, rank, ranks, spins, pids, on_wire, rails);
    PyObject *capsule = f != NULL && core != NULL ? PyCapsule_New(f, CAPSULE, close_face) : NULL;
    if (capsule == NULL) {
        free(f);
        nc_close(core);
        return PyErr_Occurred() ? NULL
                                : PyErr_Format(PyExc_MemoryError,
                                               "out of memory for the core of a node. Start fewer processes per node");
    }
    f->core = core, f->rank = rank, f->ranks = ranks;
    PyObject *dict = PyDict_New(), *cells = PyMemoryView_FromMemory((char *)f->cells, sizeof f->cells, BUF_WRITE);
    if (add(dict, "cells", cells) < 0 || add(dict, "address", PyLong_FromLongLong((intptr_t)core)) < 0 ||
        add_functions(dict, of_core, capsule) < 0 || add_functions(dict, fast_functions, capsule) < 0) {
        Py_DecRef(dict);
        dict = NULL;
    }
    Py_DecRef(capsule); /* the functions keep it */
    return dict;
}

NC_EXPORT const char *nc_build(void) { return NC_BUILD; }
