/* The face of the core for Python: builtin functions, without Python's headers.

   The library is loaded by ctypes.PyDLL and finds the symbols below in the interpreter that loads it, so that one file
   serves every CPython. Functions of one core hold it in a capsule. All run with the interpreter's lock (GIL), which
   they give up while they wait or move much. Arrays are those that offer their buffer, contiguous and aligned.

   Signatures that Python has taught a core (`learn`) go the short way: one call from the method of the user to the
   result. Whatever is out of the ordinary there returns None, for the long way, or continues in Python. */

#include "mpidist.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#define EXPORT __attribute__((visibility("default")))

typedef struct PyObject PyObject;
typedef struct {
    void *buf;
    PyObject *obj;
    ssize_t len, itemsize;
    int readonly, ndim;
    char *format;
    ssize_t *shape, *strides, *suboffsets;
    void *internal;
} Py_buffer;
typedef PyObject *(*function)(PyObject *, PyObject *const *, ssize_t);
typedef struct {
    const char *name;
    function call;
    int flags;
    const char *doc;
} PyMethodDef;
enum { METH_FASTCALL = 0x80, WRITABLE = 1, FORMAT = 4, C_CONTIGUOUS = 0x38, STRIDED = 0x18, BUF_WRITE = 0x200 };

extern PyObject *PyExc_ValueError, *PyExc_OSError, *PyExc_MemoryError, _Py_NoneStruct;
PyObject *PyCFunction_NewEx(PyMethodDef *, PyObject *, PyObject *);
PyObject *PyCapsule_New(void *, const char *, void (*)(PyObject *));
void *PyCapsule_GetPointer(PyObject *, const char *);
PyObject *PyDict_New(void);
int PyDict_SetItemString(PyObject *, const char *, PyObject *);
PyObject *PyList_New(ssize_t);
PyObject *PyList_GetItem(PyObject *, ssize_t);
int PyList_SetItem(PyObject *, ssize_t, PyObject *);
ssize_t PyList_Size(PyObject *);
PyObject *PyTuple_New(ssize_t);
int PyTuple_SetItem(PyObject *, ssize_t, PyObject *);
PyObject *PyLong_FromLongLong(long long);
long long PyLong_AsLongLong(PyObject *);
double PyFloat_AsDouble(PyObject *);
PyObject *PyMemoryView_FromMemory(char *, ssize_t, int);
PyObject *PyUnicode_InternFromString(const char *);
PyObject *PyObject_GetAttr(PyObject *, PyObject *);
PyObject *PyObject_Type(PyObject *);
PyObject *PyObject_Vectorcall(PyObject *, PyObject *const *, size_t, PyObject *);
int PyObject_GetBuffer(PyObject *, Py_buffer *, int);
void PyBuffer_Release(Py_buffer *);
void Py_IncRef(PyObject *);
void Py_DecRef(PyObject *);
PyObject *PyErr_Occurred(void);
void PyErr_Clear(void);
PyObject *PyErr_Format(PyObject *, const char *, ...);
PyObject *PyErr_SetFromErrno(PyObject *);
unsigned long PyThread_get_thread_ident(void);
void *PyEval_SaveThread(void);
void PyEval_RestoreThread(void *);

#define NONE (&_Py_NoneStruct)

/* Cells that Python sees, too. HOLDS: anything but 0 sends calls the long way. CALLS: short calls so far; LAST: the
   signature of the last. */
enum { HOLDS, CALLS, LAST, THREAD, CELLS };
/* A thread, which THREAD names, is in a short call; a call has begun that Python is to carry on. */
enum { BUSY = 1, HANDED_ON = 4 };
/* A kind of signature beside those of mpidist.h: a gathering to which one rank gives. */
enum { BROADCAST = 16 };
/* For how long a call keeps the interpreter's lock, and how long it then waits before Python takes over. */
enum { KEEPS_LOCK = 30000, WAITS = 2000000 };
enum { POOLED_BYTES = 128 << 10, SIGNATURES = 2048, PROBES = 8, AXES = 8, OPS = 32 };
/* The bits of an operation's code that say how elements are combined; the others tell a mean from a sum. */
enum { KERNEL = 15 };

typedef struct {
    int is_known, number, kind, op, dtype, axes, root;
    ssize_t shape[AXES];
    double divisor;
    uint64_t id;
} signature;

typedef struct {
    nc *core;
    int rank, ranks, op_count, lost; /* errno of a call that ended as NC_LOST */
    int64_t cells[CELLS];
    PyObject *array_type, *empty, *take, *go_on; /* the last three are called */
    PyObject *op[OPS];
    int op_code[OPS];
    signature known[SIGNATURES];
    nc_range given[NC_INPUTS], results[NC_PIECES]; /* of one call */
} face;

static PyObject *name_shape, *name_dtype;
static const char CAPSULE[] = "mpidist core";

static face *face_of(PyObject *self) { return PyCapsule_GetPointer(self, CAPSULE); }
static PyObject *none(void) { Py_IncRef(NONE); return NONE; }
static long long whole(PyObject *number) { return PyLong_AsLongLong(number); }

static nc_state go_on(face *f, nc_state state, int64_t nanoseconds)
{
    void *thread = PyEval_SaveThread();
    state = nc_step(f->core, nanoseconds);
    PyEval_RestoreThread(thread);
    return state;
}

static PyObject *state_or_error(nc_state state)
{
    return state == NC_LOST ? PyErr_SetFromErrno(PyExc_OSError) : PyLong_FromLongLong(state);
}

/* lost() raises the error of a short call that ended as NC_LOST */
static PyObject *lost(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)a, (void)n;
    errno = face_of(self)->lost;
    return PyErr_SetFromErrno(PyExc_OSError);
}

/* Memory of arrays ------------------------------------------------------------------------------------------------ */

static int memory_of(PyObject *array, int flags, Py_buffer *view)
{
    if (PyObject_GetBuffer(array, view, flags) < 0)
        return -1;
    PyBuffer_Release(view); /* the caller keeps the array */
    return 0;
}

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

/* begin(id, kind, op, dtype, divisor, flags, replicas, unit, slice, note, inputs, outs or None, nanoseconds) -> state,
   or -1 where nothing has begun as results overlap inputs that are still to be read */
static PyObject *begin(PyObject *self, PyObject *const *a, ssize_t n)
{
    face *f = face_of(self);
    if (n != 13)
        return PyErr_Format(PyExc_ValueError, "begin takes 13 arguments, not %zd", n);
    nc_call call = {.id = (uint64_t)whole(a[0]), .kind = (nc_kind)whole(a[1]), .op = (nc_op)whole(a[2]),
                    .dtype = (nc_dtype)whole(a[3]), .divisor = PyFloat_AsDouble(a[4]), .flags = (int)whole(a[5]),
                    .replicas = (int)whole(a[6]), .unit = (size_t)whole(a[7]), .slice = (size_t)whole(a[8]),
                    .note = whole(a[9])};
    int64_t nanoseconds = whole(a[12]);
    if (PyErr_Occurred())
        return NULL;
    int reduces = call.kind == NC_ALL_REDUCE || call.kind == NC_REDUCE_SCATTER;
    int unknown = (unsigned)call.dtype >= NC_DTYPES || (unsigned)call.op >= NC_OPS;
    if (unknown || (reduces && !nc_combines(call.dtype, call.op)))
        return PyErr_Format(PyExc_ValueError, "no operation %d of dtype %d", (int)call.op, (int)call.dtype);
    call.pieces = read_inputs(f, a[10], call.replicas, nc_itemsize(call.dtype));
    if (call.pieces < 0 || (a[11] != NONE && read_outs(f, a[11]) < 0))
        return NULL;
    if (call.kind == NC_ALL_REDUCE && a[11] != NONE && results_overlap(f, &call))
        return PyLong_FromLongLong(-1);
    void *thread = PyEval_SaveThread();
    nc_state state = nc_begin(f->core, &call, nanoseconds);
    PyEval_RestoreThread(thread);
    return state_or_error(state);
}

/* meet(id) -> state, without waiting longer than ranks need that come together */
static PyObject *meet(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    nc_call call = {.id = (uint64_t)whole(a[0]), .kind = NC_MEET, .replicas = 1};
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(nc_begin(face_of(self)->core, &call, KEEPS_LOCK / 3));
}

static PyObject *step(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    int64_t nanoseconds = whole(a[0]);
    return PyErr_Occurred() ? NULL : state_or_error(go_on(face_of(self), NC_NOT_YET, nanoseconds));
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

/* room(addresses, small, chunk, slice, lanes) */
static PyObject *room(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    char *segments[NC_MOST_RANKS];
    nc_sizes sizes = {(size_t)whole(a[1]), (size_t)whole(a[2]), (size_t)whole(a[3]), (int)whole(a[4])};
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

/* The short way --------------------------------------------------------------------------------------------------- */

static int dtype_of(const Py_buffer *view)
{
    static const char whole_codes[] = "bhilqBHILQ";
    const char *code = view->format;
    if (*code == '=' || *code == '@')
        code++;
    if (code[0] == 'Z' && code[1] && !code[2])
        return code[1] == 'f' ? NC_C64 : code[1] == 'd' ? NC_C128 : code[1] == 'g' ? NC_CLONG : -1;
    if (!code[0] || code[1])
        return -1;
    switch (code[0]) {
    case '?': return NC_BOOL;
    case 'e': return NC_F16;
    case 'f': return NC_F32;
    case 'd': return NC_F64;
    case 'g': return NC_LONG;
    }
    const char *found = strchr(whole_codes, code[0]);
    if (found == NULL)
        return -1;
    int power = view->itemsize == 1 ? 0 : view->itemsize == 2 ? 1 : view->itemsize == 4 ? 2 : 3;
    return (found - whole_codes < 5 ? NC_I8 : NC_U8) + power;
}

static signature *look_up(face *f, const signature *s, int may_add)
{
    uint64_t hash = (uint64_t)(s->kind * 31 + s->op) * 0x9E3779B97F4A7C15u + (uint64_t)(s->dtype * 64 + s->axes);
    for (int i = 0; i < s->axes; i++)
        hash = (hash ^ (uint64_t)s->shape[i]) * 0x9E3779B97F4A7C15u, hash ^= hash >> 29;
    hash += (uint64_t)s->root;
    for (int probe = 0; probe < PROBES; probe++) {
        signature *k = &f->known[(hash + (uint64_t)probe) % SIGNATURES];
        if (k->is_known && k->kind == s->kind && k->op == s->op && k->dtype == s->dtype && k->axes == s->axes &&
            k->root == s->root && !memcmp(k->shape, s->shape, sizeof *s->shape * (size_t)s->axes))
            return k;
        if (may_add && (!k->is_known || probe == PROBES - 1))
            return k;
    }
    return NULL;
}

static int op_of(const face *f, PyObject *op)
{
    for (int i = 0; i < f->op_count; i++)
        if (f->op[i] == op)
            return f->op_code[i];
    return -1;
}

/* Read an array of NumPy, of no subclass. */
static int read_array(face *f, PyObject *array, int flags, Py_buffer *view, signature *s)
{
    PyObject *type = PyObject_Type(array);
    Py_DecRef(type); /* the array keeps it */
    if (type != f->array_type)
        return -1;
    if (memory_of(array, flags | C_CONTIGUOUS | FORMAT, view) < 0) {
        PyErr_Clear();
        return -1;
    }
    s->dtype = dtype_of(view);
    s->axes = view->ndim;
    if (s->dtype < 0 || view->ndim > AXES || (uintptr_t)view->buf % (size_t)(view->itemsize > 8 ? 8 : view->itemsize))
        return -1;
    memcpy(s->shape, view->shape, sizeof *s->shape * (size_t)view->ndim);
    return 0;
}

/* learn(kind, op, array, root, divisor, id) -> number of the signature, or None for one that cannot go the short way */
static PyObject *learn(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    signature s = {.is_known = 1, .kind = (int)whole(a[0]), .op = (int)whole(a[1]), .root = (int)whole(a[3]),
                   .divisor = PyFloat_AsDouble(a[4]), .id = (uint64_t)whole(a[5])};
    Py_buffer view;
    if (PyErr_Occurred())
        return NULL;
    if (a[2] != NONE && read_array(f, a[2], 0, &view, &s) < 0)
        return none();
    signature *k = look_up(f, &s, 1);
    s.number = (int)(k - f->known);
    *k = s;
    return PyLong_FromLongLong(s.number);
}

static PyObject *new_array(face *f, PyObject *like, const ssize_t *first, int axes, size_t bytes)
{
    PyObject *shape = PyObject_GetAttr(like, name_shape), *dtype = PyObject_GetAttr(like, name_dtype), *made = NULL;
    if (first != NULL && shape != NULL) { /* of another length */
        PyObject *other = PyTuple_New(axes);
        for (int i = 0; i < axes && other != NULL; i++)
            PyTuple_SetItem(other, i, PyLong_FromLongLong(first[i]));
        Py_DecRef(shape);
        shape = other;
    }
    if (shape != NULL && dtype != NULL) {
        PyObject *arguments[2] = {shape, dtype};
        made = PyObject_Vectorcall(bytes < POOLED_BYTES ? f->empty : f->take, arguments, 2, NULL);
    }
    if (shape != NULL)
        Py_DecRef(shape);
    if (dtype != NULL)
        Py_DecRef(dtype);
    return made;
}

/* Carry out a call of one array; `result` is given away. */
static PyObject *carry_out(face *f, const signature *k, const nc_call *call, const Py_buffer *view, size_t count,
                           PyObject *result, PyObject *value)
{
    Py_buffer out;
    if (result == NULL)
        return NULL;
    if (memory_of(result, C_CONTIGUOUS | WRITABLE, &out) < 0 || f->cells[HOLDS]) {
        Py_DecRef(result); /* Python code ran since the way was found open, in which another thread may have come */
        return PyErr_Occurred() ? NULL : none();
    }
    f->cells[HOLDS] |= BUSY;
    f->cells[THREAD] = (int64_t)PyThread_get_thread_ident();
    nc_inputs(f->core)[0] = view->buf;
    nc_pieces(f->core)[0] = (nc_piece){out.buf, count};
    nc_state state = nc_begin(f->core, call, KEEPS_LOCK);
    if (state == NC_NOT_YET || state == NC_MOVED)
        state = go_on(f, state, WAITS);
    f->lost = errno;
    if (state == NC_DONE) {
        f->cells[CALLS]++;
        f->cells[LAST] = k->number;
        f->cells[HOLDS] &= ~(int64_t)BUSY;
        return result;
    }
    /* Until Python has it in hand, as a signal handler may raise an error before. */
    f->cells[HOLDS] = (f->cells[HOLDS] & ~(int64_t)BUSY) | HANDED_ON;
    PyObject *number = PyLong_FromLongLong(k->number), *code = PyLong_FromLongLong(state), *final = NULL;
    if (number != NULL && code != NULL) {
        PyObject *arguments[4] = {number, code, value, result};
        final = PyObject_Vectorcall(f->go_on, arguments, 4, NULL);
    }
    Py_DecRef(result);
    if (number != NULL)
        Py_DecRef(number);
    if (code != NULL)
        Py_DecRef(code);
    return final;
}

/* Begin with one array, contiguous and known: its memory, its signature, and the call. */
static int known_array(face *f, PyObject *value, signature *s, Py_buffer *view, signature *k, nc_call *call)
{
    if (f->cells[HOLDS] || s->op < 0 || read_array(f, value, 0, view, s) < 0)
        return 0;
    const signature *found = look_up(f, s, 0);
    if (found == NULL)
        return 0;
    *k = *found; /* whose place another thread may give to another one */
    *call = (nc_call){.id = k->id, .kind = (nc_kind)k->kind, .op = (nc_op)(k->op & KERNEL), .dtype = (nc_dtype)k->dtype,
                      .pieces = 1, .replicas = 1, .divisor = k->divisor};
    return 1;
}

/* Whether an array that a program gave for the result is like the input, and is it or lies apart from it. */
static int fits(face *f, PyObject *out, const Py_buffer *view, const signature *s)
{
    Py_buffer o;
    signature given = {0};
    if (read_array(f, out, WRITABLE, &o, &given) < 0 || given.dtype != s->dtype || given.axes != s->axes ||
        memcmp(given.shape, s->shape, sizeof *s->shape * (size_t)s->axes))
        return 0;
    const char *here = view->buf, *there = o.buf;
    return here == there || there >= here + view->len || here >= there + view->len;
}

/* all_reduce(op, value, out or None) */
static PyObject *all_reduce(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    signature s = {.kind = NC_ALL_REDUCE, .op = op_of(f, a[0])};
    Py_buffer view;
    nc_call call;
    signature k;
    if (!known_array(f, a[1], &s, &view, &k, &call) || (a[2] != NONE && !fits(f, a[2], &view, &s)))
        return none();
    if (view.len >= NC_SHARED_BYTES && nc_is_shared(f->core, view.buf, (size_t)view.len))
        return none(); /* the result may be shared */
    PyObject *result = a[2];
    if (result == NONE)
        result = new_array(f, a[1], NULL, 0, (size_t)view.len);
    else
        Py_IncRef(result);
    call.unit = 64 / (size_t)view.itemsize ? 64 / (size_t)view.itemsize : 1;
    return carry_out(f, &k, &call, &view, (size_t)(view.len / view.itemsize), result, a[1]);
}

/* reduce_scatter(op, value) */
static PyObject *reduce_scatter(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    signature s = {.kind = NC_REDUCE_SCATTER, .op = op_of(f, a[0])};
    Py_buffer view;
    nc_call call;
    signature k;
    if (!known_array(f, a[1], &s, &view, &k, &call) || s.axes == 0 || s.shape[0] == 0)
        return none();
    ssize_t rows = s.shape[0], row_bytes = view.len / rows;
    s.shape[0] = rows / f->ranks + (f->rank < rows % f->ranks);
    PyObject *result = new_array(f, a[1], s.shape, s.axes, (size_t)(s.shape[0] * row_bytes));
    call.unit = (size_t)(row_bytes / view.itemsize);
    return carry_out(f, &k, &call, &view, (size_t)(view.len / view.itemsize), result, a[1]);
}

/* all_gather(value), along the first axis */
static PyObject *all_gather(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    signature s = {.kind = NC_ALL_GATHER};
    Py_buffer view;
    nc_call call;
    signature k;
    if (!known_array(f, a[0], &s, &view, &k, &call) || s.axes == 0)
        return none();
    call.note = s.shape[0];
    s.shape[0] *= f->ranks;
    PyObject *result = new_array(f, a[0], s.shape, s.axes, (size_t)(view.len * f->ranks));
    call.dtype = NC_U8, call.flags = NC_EQUAL;
    return carry_out(f, &k, &call, &view, (size_t)view.len, result, a[0]);
}

/* broadcast(value, root) */
static PyObject *broadcast(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    long long root = whole(a[1]);
    signature s = {.kind = BROADCAST, .root = (int)root};
    Py_buffer view;
    nc_call call;
    if (root < 0 || root >= f->ranks) {
        PyErr_Clear(); /* the long way says what is wrong with it */
        return none();
    }
    signature k;
    if (!known_array(f, a[0], &s, &view, &k, &call))
        return none();
    PyObject *result = new_array(f, a[0], NULL, 0, (size_t)view.len);
    call.kind = NC_ALL_GATHER, call.dtype = NC_U8;
    return carry_out(f, &k, &call, &view, s.root == f->rank ? (size_t)view.len : 0, result, a[0]);
}

/* short(array type, numpy.empty, a pool's take, continuation, list of operations, list of their codes)

   The continuation is called with signature, state, value and the array for the result. */
static PyObject *open_short(PyObject *self, PyObject *const *a, ssize_t n)
{
    face *f = face_of(self);
    ssize_t ops = n == 6 ? PyList_Size(a[4]) : -1;
    if (ops < 0 || ops > OPS || f->array_type != NULL)
        return PyErr_Format(PyExc_ValueError, "short is called once, with 6 arguments and at most %d names", (int)OPS);
    for (int i = 0; i < 4; i++)
        Py_IncRef(a[i]);
    f->array_type = a[0], f->empty = a[1], f->take = a[2], f->go_on = a[3];
    for (ssize_t i = 0; i < ops; i++) {
        f->op[i] = PyList_GetItem(a[4], i);
        Py_IncRef(f->op[i]);
        f->op_code[i] = (int)whole(PyList_GetItem(a[5], i));
    }
    f->op_count = (int)ops;
    return PyErr_Occurred() ? NULL : none();
}

static PyMethodDef of_core[] = {
    {"short", open_short, METH_FASTCALL, NULL},
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
    {"lost", lost, METH_FASTCALL, NULL},
    {"shares", shares, METH_FASTCALL, NULL},
    {"room", room, METH_FASTCALL, NULL},
    {"segment", segment, METH_FASTCALL, NULL},
    {"learn", learn, METH_FASTCALL, NULL},
    {"all_reduce", all_reduce, METH_FASTCALL, NULL},
    {"reduce_scatter", reduce_scatter, METH_FASTCALL, NULL},
    {"all_gather", all_gather, METH_FASTCALL, NULL},
    {"broadcast", broadcast, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

/* Opening --------------------------------------------------------------------------------------------------------- */

static void close_face(PyObject *capsule)
{
    face *f = PyCapsule_GetPointer(capsule, CAPSULE);
    PyObject *objects[4] = {f->array_type, f->empty, f->take, f->go_on};
    for (int i = 0; i < 4; i++)
        if (objects[i] != NULL)
            Py_DecRef(objects[i]);
    for (int i = 0; i < f->op_count; i++)
        Py_DecRef(f->op[i]);
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
    int failed = dict == NULL || add_functions(dict, of_core, capsule) < 0 || add(dict, "cells", cells) < 0;
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

static PyObject *build(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)self, (void)a, (void)n;
    return PyUnicode_InternFromString(NC_BUILD);
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

EXPORT const char *nc_build(void) { return NC_BUILD; }

EXPORT PyObject *nc_functions(void)
{
    static PyMethodDef functions[] = {
        {"open", open_core, METH_FASTCALL, NULL},
        {"control_bytes", control_bytes, METH_FASTCALL, NULL},
        {"build", build, METH_FASTCALL, NULL},
        {"overlap", overlap, METH_FASTCALL, NULL},
        {"read_number", read_number, METH_FASTCALL, NULL},
        {NULL, NULL, 0, NULL},
    };
    name_shape = PyUnicode_InternFromString("shape");
    name_dtype = PyUnicode_InternFromString("dtype");
    PyObject *dict = PyDict_New();
    if (name_shape == NULL || name_dtype == NULL || dict == NULL || add_functions(dict, functions, NULL) < 0)
        return NULL;
    return dict;
}
