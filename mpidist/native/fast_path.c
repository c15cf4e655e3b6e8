/* The fast path runs calls with a cached signature in C, from the user's method to the result.

   All other calls return None and take the general path. If peers are late or their calls differ, Python resumes the
   call. */

#include "fast_path.h"

#include <stdlib.h>
#include <string.h>

/* Nanoseconds that a call waits without the GIL before Python resumes it. */
enum { WAITS = 2000000 };
/* Nanoseconds to wait for a running write of another rank. */
enum { ABANDON_NANOSECONDS = 1000000000 };
enum { POOLED_BYTES = 128 << 10 };
/* The bits of an operation's code that select the kernel. Means and sums differ in another bit only. */
enum { KERNEL = 15 };

static PyObject *name_shape, *name_dtype;

/* lost(): raise the error of a call that ended with NC_LOST */
static PyObject *lost(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)a, (void)n;
    errno = face_of(self)->lost;
    return PyErr_SetFromErrno(PyExc_OSError);
}

/* A call in flight. */
typedef struct {
    PyObject *value, *out; /* out is NONE: allocate the result */
    Py_buffer view;        /* memory of the value */
    signature known;       /* a copy, because another thread may replace the cached one and free its shapes */
    signature result;      /* shape and dtype of the value at first, later of the result */
    nc_call call;
} fast_call;

/* Return a new array like another one, of length `first` unless that is negative. */
static PyObject *new_array(face *f, PyObject *like, ssize_t first, size_t bytes)
{
    PyObject *shape = PyObject_GetAttr(like, name_shape), *dtype = PyObject_GetAttr(like, name_dtype), *made = NULL;
    if (first >= 0 && shape != NULL) {
        ssize_t axes = PySequence_Size(shape);
        PyObject *other = PyTuple_New(axes);
        for (ssize_t i = 0; i < axes && other != NULL; i++)
            PyTuple_SetItem(other, i, i ? PySequence_GetItem(shape, i) : PyLong_FromLongLong(first));
        Py_DecRef(shape);
        shape = other;
    }
    if (shape != NULL && dtype != NULL) {
        PyObject *arguments[2] = {shape, dtype};
        made = PyObject_VectorcallDict(bytes < POOLED_BYTES ? f->empty : f->take, arguments, 2, NULL);
    }
    if (shape != NULL)
        Py_DecRef(shape);
    if (dtype != NULL)
        Py_DecRef(dtype);
    return made;
}

/* Return a tuple of new arrays like those of another tuple. */
static PyObject *new_arrays(face *f, PyObject *like)
{
    PyObject *made[NC_PIECES], *all = NULL;
    ssize_t n = PySequence_Size(like), count = 0;
    for (; count < n; count++) {
        PyObject *one = PyTuple_GetItem(like, count);
        Py_buffer view;
        if (memory_of(one, C_CONTIGUOUS, &view) < 0)
            break;
        made[count] = new_array(f, one, -1, (size_t)view.len);
        if (made[count] == NULL)
            break;
    }
    /* Fill the tuple last, because the garbage collector exposes half-filled tuples to Python code. */
    if (count == n)
        all = PyTuple_New(n);
    for (ssize_t i = 0; i < count; i++)
        if (all != NULL)
            PyTuple_SetItem(all, i, made[i]);
        else
            Py_DecRef(made[i]);
    return all;
}

/* Return `out`, or a new array or tuple of arrays for the result. */
static PyObject *result_for(face *f, const fast_call *c)
{
    if (c->out != NONE) {
        Py_IncRef(c->out);
        return c->out;
    }
    if (c->known.kind == LIST)
        return new_arrays(f, c->value);
    size_t bytes = (size_t)c->view.itemsize;
    for (int i = 0; i < c->result.axes; i++)
        bytes *= (size_t)c->result.shape[i];
    int differs = memcmp(c->result.shape, c->known.shape, sizeof *c->result.shape * (size_t)c->result.axes) != 0;
    return new_array(f, c->value, differs ? c->result.shape[0] : -1, bytes);
}

/* Prepare a call. Return 0 if the fast path is disabled or the signature is not cached. */
static int prepare(face *f, fast_call *c)
{
    signature *s = &c->result;
    int pieces = 1;
    if (f->cells[DISABLED] || s->op < 0)
        return 0;
    if (s->kind == LIST)
        pieces = signature_of_list(f, c->value, 0, f->given, s);
    else if (signature_of_array(f, c->value, 0, &c->view, s) < 0)
        return 0;
    else
        f->given[0] = (nc_range){c->view.buf, (char *)c->view.buf + c->view.len, 0};
    const signature *k = pieces < 0 ? NULL : signature_look_up(f, s, 0);
    if (k == NULL)
        return 0;
    c->known = *k;
    c->call = (nc_call){.id = k->id, .kind = s->kind == LIST ? NC_ALL_REDUCE : (nc_kind)k->kind,
                        .op = (nc_op)(k->op & KERNEL), .dtype = (nc_dtype)k->dtype, .pieces = pieces, .replicas = 1,
                        .divisor = k->divisor, .flags = nc_is_on_wire(f->core) ? NC_OVER_NODES : 0};
    return 1;
}

/* Return whether `out` has the shape and dtype of the result and does not overlap the value. The value may also start
   `at` bytes after the start of `out`, unless `at` is negative. */
static int fits(face *f, const fast_call *c, ssize_t at, Py_buffer *o)
{
    signature s = {0};
    if (signature_of_array(f, c->out, WRITABLE, o, &s) < 0 || s.dtype != c->result.dtype || s.axes != c->result.axes ||
        memcmp(s.shape, c->result.shape, sizeof *s.shape * (size_t)s.axes))
        return 0;
    const char *given = c->view.buf, *to = o->buf;
    return (at >= 0 && given == to + at) || to >= given + c->view.len || given >= to + o->len;
}

/* Hand a call over to Python. It is HANDED_OVER until Python resumes it, because a signal handler may raise an error
   first. */
static PyObject *hand_over(face *f, const fast_call *c, nc_state state, PyObject *result)
{
    f->cells[DISABLED] = (f->cells[DISABLED] & ~(int64_t)IN_CALL) | HANDED_OVER;
    PyObject *number = PyLong_FromLongLong(c->known.number), *code = PyLong_FromLongLong(state), *final = NULL;
    if (number != NULL && code != NULL) {
        PyObject *arguments[5] = {number, code, c->value, result, c->out};
        final = PyObject_VectorcallDict(f->resume, arguments, 5, NULL);
    }
    if (number != NULL)
        Py_DecRef(number);
    if (code != NULL)
        Py_DecRef(code);
    return final;
}

/* Lay out the arrays of a list. Read them again, because Python code ran since. Return whether the signature is
   unchanged and no result overwrites an input too early. */
static int lay_out_list(face *f, const fast_call *c, PyObject *result)
{
    fast_call again = {.value = c->value, .result = {.kind = LIST, .op = c->result.op, .root = c->result.root}};
    signature s = again.result;
    if (!prepare(f, &again) || again.known.number != c->known.number || again.known.id != c->known.id)
        return 0;
    int n = again.call.pieces;
    if (signature_of_list(f, result, WRITABLE, f->results, &s) != n ||
        signature_look_up(f, &s, 0) != &f->known[c->known.number])
        return 0;
    size_t itemsize = nc_itemsize(c->call.dtype);
    for (int i = 0; i < n; i++) {
        nc_range to = f->results[i];
        nc_inputs(f->core)[i] = f->given[i].begin;
        nc_pieces(f->core)[i] = (nc_piece){(char *)(intptr_t)to.begin, (size_t)(to.end - to.begin) / itemsize};
    }
    if (c->out != NONE && nc_overlap(f->given, n, f->results, n))
        return 0;
    for (int i = 1; i < n && c->out != NONE; i++) /* by address now */
        if (f->results[i].begin < f->results[i - 1].end)
            return 0;
    return 1;
}

/* Lay out the array of a call with `count` elements of input. `to`: memory of `out`. */
static int lay_out(face *f, const fast_call *c, PyObject *result, size_t count, Py_buffer *to)
{
    if (c->out == NONE && memory_of(result, C_CONTIGUOUS | WRITABLE, to) < 0)
        return 0;
    nc_inputs(f->core)[0] = c->view.buf;
    nc_pieces(f->core)[0] = (nc_piece){to->buf, count};
    return 1;
}

/* Run a call with `count` elements of input. `at`: offset of the value in the result, or -1 (see fits). */
static PyObject *run(face *f, const fast_call *c, size_t count, ssize_t at)
{
    Py_buffer to;
    int is_list = c->known.kind == LIST;
    if (c->out != NONE && !is_list && !fits(f, c, at, &to))
        return none();
    PyObject *result = result_for(f, c), *line = NULL;
    if (result == NULL)
        return NULL;
    if (f->flight.memory != NULL)
        line = PyObject_VectorcallDict(f->flight.line, NULL, 0, NULL);
    /* Python code ran since the flag was checked, so another thread may have started a call. */
    if (PyErr_Occurred() || f->cells[DISABLED] ||
        !(is_list ? lay_out_list(f, c, result) : lay_out(f, c, result, count, &to))) {
        Py_DecRef(result);
        if (line != NULL)
            Py_DecRef(line);
        return PyErr_Occurred() ? NULL : none();
    }
    int64_t entry = line == NULL ? 0 : flight_begin(f, &c->known, line);
    f->cells[DISABLED] |= IN_CALL;
    f->cells[THREAD] = (int64_t)PyThread_get_thread_ident();
    nc_state state = nc_begin(f->core, &c->call, KEEPS_LOCK);
    f->lost = errno;
    if (state == NC_NOT_YET || state == NC_MOVED)
        state = resume(f, state, WAITS);
    if (state != NC_DONE) {
        PyObject *final = hand_over(f, c, state, result);
        if (final == NULL && f->cells[DISABLED] & HANDED_OVER) {
            /* A signal handler raised an error first, so nothing finishes the call. Leak the result: a stopped rank may
               still write to it. */
            char is_writing[NC_MOST_RANKS];
            nc_abandon(f->core, ABANDON_NANOSECONDS, is_writing);
            return NULL;
        }
        Py_DecRef(result);
        return final;
    }
    if (entry)
        flight_finish(f, entry);
    f->cells[CALLS]++;
    f->cells[LAST] = c->known.number;
    for (int i = 0; i < c->call.pieces; i++)
        f->cells[BYTES] += (int64_t)(f->given[i].end - f->given[i].begin);
    f->cells[DISABLED] &= ~(int64_t)IN_CALL;
    return result;
}

/* Return whether inputs are large and in shared memory, so that the result may be shared. */
static int may_be_shared(face *f, const fast_call *c)
{
    const nc_range *given = f->given;
    size_t all = 0;
    for (int i = 0; i < c->call.pieces; i++)
        all += (size_t)(given[i].end - given[i].begin);
    for (int i = 0; i < c->call.pieces && all >= NC_SHARED_BYTES; i++)
        if (nc_is_shared(f->core, given[i].begin, (size_t)(given[i].end - given[i].begin)))
            return 1;
    return 0;
}

/* Run an all-reduce. */
static PyObject *reduce(face *f, fast_call *c)
{
    if (!prepare(f, c) || may_be_shared(f, c))
        return none();
    size_t itemsize = nc_itemsize(c->call.dtype);
    c->call.unit = 64 / itemsize ? 64 / itemsize : 1;
    return run(f, c, c->known.kind == LIST ? 0 : (size_t)c->view.len / itemsize, 0);
}

/* Run an all-reduce of a list or tuple. The call copies them to tuples, because the program may change its lists. */
static PyObject *reduce_list(face *f, fast_call *c, int opens)
{
    PyObject *value = PySequence_Tuple(c->value), *found = NULL;
    PyObject *out = c->out == NONE ? NONE : PySequence_Tuple(c->out);
    c->value = value, c->out = out;
    if (value != NULL && out != NULL)
        found = reduce(f, c);
    if (value != NULL)
        Py_DecRef(value);
    if (out != NULL && out != NONE)
        Py_DecRef(out);
    if (found == NULL || found == NONE || opens == TUPLE)
        return found;
    PyObject *list = PySequence_List(found);
    Py_DecRef(found);
    return list;
}

/* all_reduce(op, value, out or None, structure): value and out are both an array, a list or a tuple of arrays. Ranks
   compare the structure: 0 for an array, 1 for a list, 2 for a tuple, None for the structure of the value. */
static PyObject *all_reduce(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    int opens = signature_opens(a[1]);
    fast_call c = {.value = a[1], .out = a[2], .result = {.kind = NC_ALL_REDUCE, .op = signature_op(f, a[0])}};
    c.result.root = a[3] == NONE ? opens : (int)whole(a[3]);
    if (a[2] != NONE && signature_opens(a[2]) != opens)
        return none();
    if (!opens)
        return reduce(f, &c);
    c.result.kind = LIST;
    return reduce_list(f, &c, opens);
}

/* reduce_scatter(op, value, out or None) */
static PyObject *reduce_scatter(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    fast_call c = {.value = a[1], .out = a[2], .result = {.kind = NC_REDUCE_SCATTER, .op = signature_op(f, a[0])}};
    if (!prepare(f, &c) || c.result.axes == 0 || c.result.shape[0] == 0)
        return none();
    ssize_t rows = c.result.shape[0];
    c.result.shape[0] = rows / f->ranks + (f->rank < rows % f->ranks);
    c.call.unit = (size_t)(c.view.len / rows / c.view.itemsize);
    return run(f, &c, (size_t)(c.view.len / c.view.itemsize), -1);
}

/* all_gather(value, out or None), along the first axis */
static PyObject *all_gather(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    fast_call c = {.value = a[0], .out = a[1], .result = {.kind = NC_ALL_GATHER}};
    /* The general path gathers rows without bytes. */
    if (!prepare(f, &c) || c.view.len == 0 || c.result.axes == 0)
        return none();
    c.call.note = c.result.shape[0];
    c.result.shape[0] *= f->ranks;
    c.call.dtype = NC_U8, c.call.flags = NC_EQUAL;
    return run(f, &c, (size_t)c.view.len, f->rank * c.view.len);
}

/* broadcast(value, root, out or None) */
static PyObject *broadcast(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    long long root = whole(a[1]);
    fast_call c = {.value = a[0], .out = a[2], .result = {.kind = BROADCAST, .root = (int)root}};
    if (root < 0 || root >= f->ranks) {
        PyErr_Clear(); /* the general path raises the error */
        return none();
    }
    if (!prepare(f, &c))
        return none();
    c.call.kind = NC_ALL_GATHER, c.call.dtype = NC_U8;
    return run(f, &c, root == f->rank ? (size_t)c.view.len : 0, 0);
}

/* all_to_all(value, out or None), with equally many rows for each rank */
static PyObject *all_to_all(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    fast_call c = {.value = a[0], .out = a[1], .result = {.kind = NC_ALL_TO_ALL}};
    if (!prepare(f, &c) || c.view.len == 0 || c.result.axes == 0 || c.result.shape[0] % f->ranks)
        return none();
    c.call.dtype = NC_U8, c.call.flags = NC_EQUAL;
    return run(f, &c, (size_t)c.view.len, -1);
}

/* open_fast_calls(array type, numpy.empty, Pool.take, resume, list of operations, list of their codes)

   `resume` is called with signature, state, value, array for the result, and `out` or None. */
static PyObject *open_fast_calls(PyObject *self, PyObject *const *a, ssize_t n)
{
    face *f = face_of(self);
    ssize_t ops = n == 6 ? PyList_Size(a[4]) : -1;
    if (ops < 0 || ops > OPS || f->array_type != NULL)
        return PyErr_Format(PyExc_ValueError, "open_fast_calls is called once, with 6 arguments and at most %d names",
                            (int)OPS);
    for (int i = 0; i < 4; i++)
        Py_IncRef(a[i]);
    f->array_type = a[0], f->empty = a[1], f->take = a[2], f->resume = a[3];
    for (ssize_t i = 0; i < ops; i++) {
        f->op[i] = PyList_GetItem(a[4], i);
        Py_IncRef(f->op[i]);
        f->op_code[i] = (int)whole(PyList_GetItem(a[5], i));
    }
    f->op_count = (int)ops;
    name_shape = PyUnicode_InternFromString("shape");
    name_dtype = PyUnicode_InternFromString("dtype");
    return PyErr_Occurred() ? NULL : none();
}

PyMethodDef fast_functions[] = {
    {"open_fast_calls", open_fast_calls, METH_FASTCALL, NULL},
    {"cache", signature_cache, METH_FASTCALL, NULL},
    {"lost", lost, METH_FASTCALL, NULL},
    {"flight", flight_keep, METH_FASTCALL, NULL},
    {"all_reduce", all_reduce, METH_FASTCALL, NULL},
    {"reduce_scatter", reduce_scatter, METH_FASTCALL, NULL},
    {"all_gather", all_gather, METH_FASTCALL, NULL},
    {"broadcast", broadcast, METH_FASTCALL, NULL},
    {"all_to_all", all_to_all, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

void fast_close(face *f)
{
    PyObject *objects[4] = {f->array_type, f->empty, f->take, f->resume};
    for (int i = 0; i < 4; i++)
        if (objects[i] != NULL)
            Py_DecRef(objects[i]);
    for (int i = 0; i < f->op_count; i++)
        Py_DecRef(f->op[i]);
    for (int i = 0; i < 5 && f->flight.memory != NULL; i++)
        Py_DecRef(f->flight.kept[i]);
    for (int i = 0; i < SIGNATURES; i++) {
        if (f->known[i].text != NULL)
            Py_DecRef(f->known[i].text);
        free(f->known[i].shapes);
    }
}
