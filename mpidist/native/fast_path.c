/* The fast path runs calls with a cached signature in C, from the user's method to the result.

   All other calls return None and take the general path. If peers are late or their calls differ, Python resumes the
   call. */

#include "python.h"

#include <stdlib.h>
#include <string.h>

/* Kinds of signatures in addition to nc_kind: an ALL_GATHER from one rank, and an ALL_REDUCE of a list. */
enum { BROADCAST = 16, LIST = 17 };
/* Structures of a value. */
enum { ARRAY_VALUE, LIST_VALUE, TUPLE_VALUE };
/* Probes of the cache for a signature. */
enum { PROBES = 8 };
/* Nanoseconds that a call waits without the GIL before Python resumes it. */
enum { WAITS = 2000000 };
/* Nanoseconds to wait for a running write of another rank. */
enum { ABANDON_NANOSECONDS = 1000000000 };
enum { POOLED_BYTES = 128 << 10 };
/* The bits of an operation's code that select the kernel. Means and sums differ in another bit only. */
enum { KERNEL = 15 };

static PyObject *name_shape, *name_dtype;

static size_t bytes_of(const nc_range *range) { return (size_t)(range->end - range->begin); }

static size_t bytes_of_inputs(const face *f, int pieces)
{
    size_t bytes = 0;
    for (int i = 0; i < pieces; i++)
        bytes += bytes_of(&f->given[i]);
    return bytes;
}

/* Signatures ------------------------------------------------------------------------------------------------------ */

/* Return a number for the format of a native type, or -1. */
static int format_of(const Py_buffer *view)
{
    const char *code = view->format;
    if (*code == '=' || *code == '@')
        code++;
    int is_complex = *code == 'Z';
    code += is_complex;
    return code[0] && !code[1] ? code[0] | is_complex << 8 : -1;
}

/* Return the cached signature, or NULL. With may_add, return the entry for a new one instead of NULL. */
static signature *look_up(face *f, const signature *s, int may_add)
{
    uint64_t hash = (uint64_t)(s->kind * 31 + s->op) * 0x9E3779B97F4A7C15u + (uint64_t)(s->format * 64 + s->root);
    size_t bytes = sizeof *s->shapes * (size_t)s->words;
    for (int i = 0; i < s->words; i++)
        hash = (hash ^ (uint64_t)s->shapes[i]) * 0x9E3779B97F4A7C15u, hash ^= hash >> 29;
    for (int probe = 0; probe < PROBES; probe++) {
        signature *k = &f->known[(hash + (uint64_t)probe) % SIGNATURES];
        if (k->shapes != NULL && k->kind == s->kind && k->op == s->op && k->format == s->format &&
            k->root == s->root && k->words == s->words && !memcmp(k->shapes, s->shapes, bytes))
            return k;
        if (may_add && (k->shapes == NULL || probe == PROBES - 1))
            return k;
    }
    return NULL;
}

static int code_of(const face *f, PyObject *op)
{
    for (int i = 0; i < f->op_count; i++)
        if (f->op[i] == op)
            return f->op_code[i];
    return -1;
}

static int structure_of(PyObject *value)
{
    PyObject *type = PyObject_Type(value);
    Py_DecRef(type); /* the value keeps it */
    return type == &PyList_Type ? LIST_VALUE : type == &PyTuple_Type ? TUPLE_VALUE : ARRAY_VALUE;
}

/* Read a NumPy array. Return its format, or -1 for subclasses and other objects. */
static int read_array(face *f, PyObject *array, int flags, Py_buffer *view)
{
    PyObject *type = PyObject_Type(array);
    Py_DecRef(type); /* the array keeps it */
    if (type != f->array_type)
        return -1;
    if (memory_of(array, flags | C_CONTIGUOUS | FORMAT, view) < 0) {
        PyErr_Clear();
        return -1;
    }
    int format = format_of(view); /* -1 for elements without bytes, too */
    if (format < 0)
        return -1;
    int is_aligned = (uintptr_t)view->buf % (size_t)(view->itemsize > 8 ? 8 : view->itemsize) == 0;
    return is_aligned ? format : -1;
}

/* Read an array or, if the kind is LIST, a tuple of non-empty arrays of one dtype. Sets format and shapes, and their
   memory, last array first as on the general path. Return the number of arrays, or -1. */
static int read_arrays(face *f, PyObject *value, int flags, nc_range *memory, ssize_t *shapes, signature *s)
{
    int is_list = s->kind == LIST;
    ssize_t n = is_list ? PySequence_Size(value) : 1;
    if (n < 1 || n > NC_PIECES)
        return -1;
    s->shapes = shapes, s->words = 0;
    for (ssize_t i = 0; i < n; i++) {
        Py_buffer view;
        int format = read_array(f, is_list ? PyTuple_GetItem(value, i) : value, flags, &view);
        if (format < 0 || (i > 0 && format != s->format) || (is_list && view.len == 0) || s->words + view.ndim >= WORDS)
            return -1;
        s->format = format;
        shapes[s->words++] = view.ndim;
        for (int axis = 0; axis < view.ndim; axis++)
            shapes[s->words++] = view.shape[axis];
        memory[n - 1 - i] = (nc_range){view.buf, (char *)view.buf + view.len, (int)(n - 1 - i)};
    }
    return (int)n;
}

/* cache(kind, op, array or list of arrays, root, divisor, id, dtype) -> number of the signature, or None if such calls
   cannot take the fast path */
static PyObject *cache(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    signature s = {.kind = (int)whole(a[0]), .op = (int)whole(a[1]), .root = (int)whole(a[3]),
                   .divisor = PyFloat_AsDouble(a[4]), .id = (uint64_t)whole(a[5]), .dtype = (int)whole(a[6])};
    if (PyErr_Occurred())
        return NULL;
    PyObject *value = a[2];
    if (structure_of(value) != ARRAY_VALUE) {
        s.kind = LIST;
        value = PySequence_Tuple(value);
        if (value == NULL)
            return NULL;
    }
    int pieces = read_arrays(f, value, 0, f->given, f->shapes, &s);
    if (s.kind == LIST)
        Py_DecRef(value);
    size_t words = sizeof *s.shapes * (size_t)s.words;
    if (pieces < 0 || (nc_is_on_wire(f->core) && bytes_of_inputs(f, pieces) > NC_MOST_OVER_NODES))
        return none();
    signature *k = look_up(f, &s, 1);
    s.shapes = malloc(words);
    if (s.shapes == NULL)
        return none();
    memcpy(s.shapes, f->shapes, words);
    s.number = (int)(k - f->known);
    free(k->shapes);
    *k = s;
    return PyLong_FromLongLong(s.number);
}

/* Calls ----------------------------------------------------------------------------------------------------------- */

/* A call in flight. */
typedef struct {
    PyObject *value, *out; /* arrays, or tuples if the kind is LIST. out is NONE: allocate the result */
    signature key, known;  /* of the value. known is a copy, because another thread may replace the cached one */
    nc_range memory;       /* of the value, if it is an array */
    ssize_t rows;          /* length of the result's first axis, or -1 if the result has the shape of the value */
    ssize_t at;            /* the value may start at this offset in `out`, or -1 */
    int is_receiver;       /* this rank contributes nothing */
    ssize_t dealt_rows;    /* rows of the value, of which each rank keeps some in a REDUCE_SCATTER */
    nc_call call;
} fast_call;

static fast_call call_of(face *f, int kind, PyObject *op, PyObject *value, PyObject *out)
{
    signature key = {.kind = kind, .op = op == NULL ? 0 : code_of(f, op)};
    return (fast_call){.value = value, .out = out, .key = key, .rows = -1};
}

/* Prepare a call. Return 0 if the fast path is disabled or the signature is not cached. */
static int prepare(face *f, fast_call *c)
{
    if (f->cells[DISABLED] || c->key.op < 0)
        return 0;
    int pieces = read_arrays(f, c->value, 0, f->given, f->shapes, &c->key);
    const signature *k = pieces < 0 ? NULL : look_up(f, &c->key, 0);
    if (k == NULL)
        return 0;
    c->known = *k;
    c->memory = f->given[0];
    c->call = (nc_call){.id = k->id, .kind = k->kind == LIST ? NC_ALL_REDUCE : (nc_kind)k->kind,
                        .op = (nc_op)(k->op & KERNEL), .dtype = (nc_dtype)k->dtype, .pieces = pieces, .replicas = 1,
                        .divisor = k->divisor, .flags = nc_is_on_wire(f->core) ? NC_OVER_NODES : 0};
    return 1;
}

/* Whether the value has a first axis, and a row. */
static int has_rows(const face *f) { return f->shapes[0] > 0 && f->shapes[1] > 0; }

/* Return a new array like another one, of length `rows` unless that is negative. */
static PyObject *new_array(face *f, PyObject *like, ssize_t rows, size_t bytes)
{
    PyObject *shape = PyObject_GetAttr(like, name_shape), *dtype = PyObject_GetAttr(like, name_dtype), *made = NULL;
    if (rows >= 0 && shape != NULL) {
        ssize_t axes = PySequence_Size(shape);
        PyObject *other = PyTuple_New(axes);
        for (ssize_t i = 0; i < axes && other != NULL; i++)
            PyTuple_SetItem(other, i, i ? PySequence_GetItem(shape, i) : PyLong_FromLongLong(rows));
        Py_DecRef(shape);
        shape = other;
    }
    if (shape != NULL && dtype != NULL) {
        PyObject *arguments[2] = {shape, dtype};
        made = PyObject_VectorcallDict(bytes < POOLED_BYTES ? f->empty : f->take, arguments, 2, NULL);
    }
    Py_DecRef(shape);
    Py_DecRef(dtype);
    return made;
}

/* Return a list of new arrays with the shapes and dtype of the arrays of a list. */
static PyObject *new_arrays(face *f, const fast_call *c)
{
    PyObject *all = PyList_New(0);
    for (int i = 0, n = c->call.pieces; i < n && all != NULL; i++) {
        PyObject *made = new_array(f, PyTuple_GetItem(c->value, i), -1, bytes_of(&f->given[n - 1 - i]));
        if (made == NULL || PyList_Append(all, made) < 0) {
            Py_DecRef(all);
            all = NULL;
        }
        Py_DecRef(made);
    }
    return all;
}

/* Return `out`, or a new array or list of arrays for the result. */
static PyObject *result_for(face *f, const fast_call *c)
{
    if (c->out != NONE) {
        Py_IncRef(c->out);
        return c->out;
    }
    if (c->known.kind == LIST)
        return new_arrays(f, c);
    size_t bytes = bytes_of(&c->memory);
    if (c->rows >= 0)
        bytes = bytes / (size_t)f->shapes[1] * (size_t)c->rows;
    return new_array(f, c->value, c->rows, bytes);
}

/* Whether the signature of the value is unchanged. Reads its memory again. */
static int is_unchanged(face *f, const fast_call *c)
{
    fast_call again = {.value = c->value, .key = {.kind = c->key.kind, .op = c->key.op, .root = c->key.root}};
    return prepare(f, &again) && again.known.number == c->known.number && again.known.id == c->known.id;
}

static int read_new_arrays(face *f, const fast_call *c, PyObject *result)
{
    int n = c->call.pieces;
    for (int i = 0; i < n; i++) {
        Py_buffer view;
        PyObject *one = c->known.kind == LIST ? PyList_GetItem(result, n - 1 - i) : result;
        if (memory_of(one, C_CONTIGUOUS | WRITABLE, &view) < 0)
            return 0;
        f->results[i] = (nc_range){view.buf, (char *)view.buf + view.len, i};
    }
    return 1;
}

/* Read the arrays of `out`. Return whether they have shapes and dtype of the result. */
static int read_out(face *f, const fast_call *c)
{
    signature s = {.kind = c->key.kind};
    if (c->rows >= 0)
        f->shapes[1] = c->rows;
    return read_arrays(f, c->out, WRITABLE, f->results, f->shapes_of_out, &s) == c->call.pieces &&
           s.format == c->key.format && s.words == c->key.words &&
           !memcmp(s.shapes, f->shapes, sizeof *s.shapes * (size_t)s.words);
}

/* Whether `out` overwrites no input too early. */
static int is_apart(face *f, const fast_call *c)
{
    int n = c->call.pieces;
    nc_range in = f->given[0], out = f->results[0];
    if (c->known.kind != LIST)
        return (c->at >= 0 && in.begin == out.begin + c->at) || out.begin >= in.end || in.begin >= out.end;
    if (nc_overlap(f->given, n, f->results, n))
        return 0;
    for (int i = 1; i < n; i++) /* by address now */
        if (f->results[i].begin < f->results[i - 1].end)
            return 0;
    return 1;
}

/* Lay out the arrays of a call. Return 0 if they do not fit. Allocating results may run Python code. So another thread
   may have used the face, and the arrays of a list are read again. */
static int lay_out(face *f, const fast_call *c, PyObject *result)
{
    int is_list = c->known.kind == LIST;
    size_t itemsize = nc_itemsize(c->call.dtype);
    if (!is_list)
        f->given[0] = c->memory;
    if (is_list && !is_unchanged(f, c))
        return 0;
    if (!(c->out == NONE ? read_new_arrays(f, c, result) : read_out(f, c)))
        return 0;
    for (int i = 0; i < c->call.pieces; i++) {
        size_t count = c->is_receiver ? 0 : bytes_of(&f->given[i]) / itemsize;
        nc_inputs(f->core)[i] = f->given[i].begin;
        nc_pieces(f->core)[i] = (nc_piece){(char *)(intptr_t)f->results[i].begin, count};
    }
    ssize_t rows = c->dealt_rows, more = rows % f->ranks;
    for (int r = 0; r <= f->ranks && rows; r++)
        f->parts[r] = (rows / f->ranks * r + (r < more ? r : more)) * ((ssize_t)nc_pieces(f->core)[0].count / rows);
    return c->out == NONE || is_apart(f, c);
}

/* Hand a call over to Python. It is HANDED_OVER until Python resumes it, because a signal handler may raise an error
   first. */
static PyObject *hand_over(face *f, const fast_call *c, nc_state state, PyObject *result)
{
    f->cells[DISABLED] = (f->cells[DISABLED] & ~(int64_t)IN_CALL) | HANDED_OVER;
    if (PyErr_Occurred())
        return NULL;
    return PyObject_CallFunction(f->resume, "iiOOO", c->known.number, (int)state, c->value, result, c->out);
}

/* Run a prepared call. */
static PyObject *run(face *f, const fast_call *c)
{
    PyObject *result = result_for(f, c), *entry = NULL;
    if (result == NULL)
        return NULL;
    /* Python code ran since the flag was checked, so another thread may have started a call. */
    if (f->cells[DISABLED] || !lay_out(f, c, result)) {
        Py_DecRef(result);
        return PyErr_Occurred() ? NULL : none();
    }
    f->cells[DISABLED] |= IN_CALL;
    f->cells[THREAD] = (int64_t)PyThread_get_thread_ident();
    nc_state state = nc_begin(f->core, &c->call, KEEPS_LOCK);
    if (f->began != NULL)
        entry = PyObject_CallFunction(f->began, "i", c->known.number);
    if ((state == NC_NOT_YET || state == NC_MOVED) && !PyErr_Occurred())
        state = resume(f, WAITS);
    if (state != NC_DONE) {
        Py_DecRef(entry); /* the call that resumes this one finishes the entry */
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
    if (entry != NULL) {
        Py_DecRef(PyObject_CallFunction(f->ended, "O", entry));
        Py_DecRef(entry);
    }
    f->cells[CALLS]++;
    f->cells[LAST] = c->known.number;
    f->cells[BYTES] += (int64_t)bytes_of_inputs(f, c->call.pieces);
    f->cells[DISABLED] &= ~(int64_t)IN_CALL;
    if (PyErr_Occurred()) { /* a signal handler raised an error while the call was recorded */
        Py_DecRef(result);
        return NULL;
    }
    return result;
}

/* Return whether inputs are large and in shared memory, so that the result may be shared. */
static int may_be_shared(face *f, const fast_call *c)
{
    if (bytes_of_inputs(f, c->call.pieces) < NC_SHARED_BYTES)
        return 0;
    for (int i = 0; i < c->call.pieces; i++)
        if (nc_is_shared(f->core, f->given[i].begin, bytes_of(&f->given[i])))
            return 1;
    return 0;
}

static PyObject *reduce(face *f, fast_call *c)
{
    return !prepare(f, c) || may_be_shared(f, c) ? none() : run(f, c);
}

/* Run an all-reduce of a list or tuple. The call copies them to tuples, because the program may change its lists. */
static PyObject *reduce_list(face *f, fast_call *c, int structure)
{
    PyObject *value = PySequence_Tuple(c->value), *found = NULL;
    PyObject *out = c->out == NONE ? none() : PySequence_Tuple(c->out);
    c->value = value, c->out = out;
    if (value != NULL && out != NULL)
        found = reduce(f, c);
    Py_DecRef(value);
    Py_DecRef(out);
    if (found == NULL || found == NONE)
        return found;
    PyObject *final = structure == TUPLE_VALUE ? PySequence_Tuple(found) : PySequence_List(found);
    Py_DecRef(found);
    return final;
}

/* all_reduce(op, value, out or None, structure): value and out are both an array, a list or a tuple of arrays. Ranks
   compare the structure: 0 for an array, 1 for a list, 2 for a tuple, None for the structure of the value. */
static PyObject *all_reduce(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    int structure = structure_of(a[1]), is_list = structure != ARRAY_VALUE;
    if (a[2] != NONE && structure_of(a[2]) != structure)
        return none();
    fast_call c = call_of(f, is_list ? LIST : NC_ALL_REDUCE, a[0], a[1], a[2]);
    c.key.root = a[3] == NONE ? structure : (int)whole(a[3]);
    return is_list ? reduce_list(f, &c, structure) : reduce(f, &c);
}

/* reduce_scatter(op, value, out or None) */
static PyObject *reduce_scatter(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    fast_call c = call_of(f, NC_REDUCE_SCATTER, a[0], a[1], a[2]);
    if (!prepare(f, &c) || !has_rows(f))
        return none();
    ssize_t rows = f->shapes[1];
    c.rows = rows / f->ranks + (f->rank < rows % f->ranks);
    c.at = -1;
    c.dealt_rows = rows;
    c.call.parts = f->parts;
    return run(f, &c);
}

/* all_gather(value, out or None), along the first axis */
static PyObject *all_gather(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    fast_call c = call_of(f, NC_ALL_GATHER, NULL, a[0], a[1]);
    /* The general path gathers rows without bytes. */
    if (!prepare(f, &c) || !has_rows(f) || bytes_of(&c.memory) == 0)
        return none();
    c.rows = f->shapes[1] * f->ranks;
    c.at = f->rank * (ssize_t)bytes_of(&c.memory);
    c.call.note = f->shapes[1], c.call.dtype = NC_U8, c.call.flags = NC_EQUAL;
    return run(f, &c);
}

/* broadcast(value, root, out or None) */
static PyObject *broadcast(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    long long root = whole(a[1]);
    if (root < 0 || root >= f->ranks) {
        PyErr_Clear(); /* the general path raises the error */
        return none();
    }
    fast_call c = call_of(f, BROADCAST, NULL, a[0], a[2]);
    c.key.root = (int)root;
    c.is_receiver = root != f->rank;
    if (!prepare(f, &c))
        return none();
    c.call.kind = NC_ALL_GATHER, c.call.dtype = NC_U8;
    return run(f, &c);
}

/* all_to_all(value, out or None), with equally many rows for each rank */
static PyObject *all_to_all(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    fast_call c = call_of(f, NC_ALL_TO_ALL, NULL, a[0], a[1]);
    if (!prepare(f, &c) || !has_rows(f) || bytes_of(&c.memory) == 0 || f->shapes[1] % f->ranks)
        return none();
    c.at = -1;
    c.call.dtype = NC_U8, c.call.flags = NC_EQUAL;
    return run(f, &c);
}

/* open_fast_calls(array type, numpy.empty, Pool.take, resume, list of operations, list of their codes)

   `resume` is called with signature, state, value, array for the result, and `out` or None. */
static PyObject *open_fast_calls(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    for (int i = 0; i < 4; i++)
        Py_IncRef(a[i]);
    f->array_type = a[0], f->empty = a[1], f->take = a[2], f->resume = a[3];
    f->op_count = (int)PyList_Size(a[4]); /* at most OPS */
    for (int i = 0; i < f->op_count; i++) {
        Py_IncRef(f->op[i] = PyList_GetItem(a[4], i));
        f->op_code[i] = (int)whole(PyList_GetItem(a[5], i));
    }
    name_shape = PyUnicode_InternFromString("shape");
    name_dtype = PyUnicode_InternFromString("dtype");
    return PyErr_Occurred() ? NULL : none();
}

/* record(began, ended): call began(number of the signature) after the start of each call, and pass its result to
   `ended` after the end, unless Python resumes the call. */
static PyObject *record_calls(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    Py_IncRef(f->began = a[0]);
    Py_IncRef(f->ended = a[1]);
    return none();
}

PyMethodDef fast_functions[] = {
    {"open_fast_calls", open_fast_calls, METH_FASTCALL, NULL},
    {"cache", cache, METH_FASTCALL, NULL},
    {"record", record_calls, METH_FASTCALL, NULL},
    {"all_reduce", all_reduce, METH_FASTCALL, NULL},
    {"reduce_scatter", reduce_scatter, METH_FASTCALL, NULL},
    {"all_gather", all_gather, METH_FASTCALL, NULL},
    {"broadcast", broadcast, METH_FASTCALL, NULL},
    {"all_to_all", all_to_all, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

void fast_close(face *f)
{
    PyObject *objects[6] = {f->array_type, f->empty, f->take, f->resume, f->began, f->ended};
    for (int i = 0; i < 6; i++)
        Py_DecRef(objects[i]);
    for (int i = 0; i < f->op_count; i++)
        Py_DecRef(f->op[i]);
    for (int i = 0; i < SIGNATURES; i++)
        free(f->known[i].shapes);
}
