/* The short way: one call from the method of the user to the result.

   It is open to signatures that Python has taught a core (`learn`). Whatever is out of the ordinary returns None, for
   the long way, or continues in Python. */

#define _GNU_SOURCE
#include "python.h"

#include <string.h>
#include <time.h>

/* A kind of signature beside those of mpidist.h: a gathering to which one rank gives. */
enum { BROADCAST = 16 };
/* For how long a call waits without the interpreter's lock before Python takes over. */
enum { WAITS = 2000000 };
enum { POOLED_BYTES = 128 << 10, PROBES = 8 };
/* The bits of an operation's code that say how elements are combined; the others tell a mean from a sum. */
enum { KERNEL = 15 };

static PyObject *name_shape, *name_dtype;

/* lost() raises the error of a short call that ended as NC_LOST */
static PyObject *lost(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)a, (void)n;
    errno = face_of(self)->lost;
    return PyErr_SetFromErrno(PyExc_OSError);
}

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

/* learn(kind, op, array, root, divisor, id, text) -> number of the signature, or None for one that cannot go the short
   way */
static PyObject *learn(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    signature s = {.is_known = 1, .kind = (int)whole(a[0]), .op = (int)whole(a[1]), .root = (int)whole(a[3]),
                   .divisor = PyFloat_AsDouble(a[4]), .id = (uint64_t)whole(a[5]), .text = a[6]};
    Py_buffer view;
    if (PyErr_Occurred())
        return NULL;
    if (a[2] != NONE && read_array(f, a[2], 0, &view, &s) < 0)
        return none();
    signature *k = look_up(f, &s, 1);
    s.number = (int)(k - f->known);
    Py_IncRef(s.text);
    if (k->text != NULL)
        Py_DecRef(k->text);
    *k = s;
    return PyLong_FromLongLong(s.number);
}

/* A call on its way. */
typedef struct {
    PyObject *value, *out; /* NONE: a new array for the result */
    Py_buffer view;        /* of the value */
    signature known;       /* a copy: another thread may give its place to another one */
    signature result;      /* shape and dtype, at first those of the value */
    nc_call call;
} short_call;

static PyObject *shape_of(const short_call *c)
{
    const signature *s = &c->result;
    if (!memcmp(s->shape, c->known.shape, sizeof *s->shape * (size_t)s->axes))
        return PyObject_GetAttr(c->value, name_shape);
    PyObject *shape = PyTuple_New(s->axes);
    for (int i = 0; i < s->axes && shape != NULL; i++)
        PyTuple_SetItem(shape, i, PyLong_FromLongLong(s->shape[i]));
    return shape;
}

/* The array that the program gave for the result, or a new one. */
static PyObject *array_for(face *f, const short_call *c)
{
    if (c->out != NONE) {
        Py_IncRef(c->out);
        return c->out;
    }
    PyObject *shape = shape_of(c), *dtype = PyObject_GetAttr(c->value, name_dtype), *made = NULL;
    size_t bytes = (size_t)c->view.itemsize;
    for (int i = 0; i < c->result.axes; i++)
        bytes *= (size_t)c->result.shape[i];
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

/* The flight record ------------------------------------------------------------------------------------------------ */

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

/* Write down that a call begins, at a line of the program, which is given away; the rest of a line too long. */
static int64_t record_begin(face *f, const signature *k, PyObject *line)
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

static void record_end(const face *f, int64_t serial)
{
    char *to = flight_entry(f, serial);
    double end = seconds();
    if (!memcmp(to, &serial, 8)) /* another thread may have gone round meanwhile */
        memcpy(to + FLIGHT_END, &end, 8), to[FLIGHT_STATE] = FLIGHT_DONE;
}

/* flight(the file's memory, serial of its last entry, number and serial of the communicator's last, name of the
   communicator, function that returns the line of the program) */
static PyObject *keep_flight(PyObject *self, PyObject *const *a, ssize_t n)
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

/* Calls ----------------------------------------------------------------------------------------------------------- */

/* Begin with one array, contiguous and known. */
static int is_known(face *f, short_call *c)
{
    signature *s = &c->result;
    if (f->cells[HOLDS] || s->op < 0 || read_array(f, c->value, 0, &c->view, s) < 0)
        return 0;
    const signature *k = look_up(f, s, 0);
    if (k == NULL)
        return 0;
    c->known = *k;
    c->call = (nc_call){.id = k->id, .kind = (nc_kind)k->kind, .op = (nc_op)(k->op & KERNEL),
                        .dtype = (nc_dtype)k->dtype, .pieces = 1, .replicas = 1, .divisor = k->divisor};
    return 1;
}

/* Whether an array that a program gave is what the result is to be, and the value lies apart from it, or so many bytes
   behind its begin; nowhere in it if that is negative. */
static int fits(face *f, const short_call *c, ssize_t at, Py_buffer *o)
{
    signature s = {0};
    if (read_array(f, c->out, WRITABLE, o, &s) < 0 || s.dtype != c->result.dtype || s.axes != c->result.axes ||
        memcmp(s.shape, c->result.shape, sizeof *s.shape * (size_t)s.axes))
        return 0;
    const char *given = c->view.buf, *to = o->buf;
    return (at >= 0 && given == to + at) || to >= given + c->view.len || given >= to + o->len;
}

/* Let Python carry on with a call: it is HANDED_ON until Python has it in hand, as a signal handler may raise an error
   before. */
static PyObject *hand_on(face *f, const short_call *c, nc_state state, PyObject *result)
{
    f->cells[HOLDS] = (f->cells[HOLDS] & ~(int64_t)BUSY) | HANDED_ON;
    PyObject *number = PyLong_FromLongLong(c->known.number), *code = PyLong_FromLongLong(state), *final = NULL;
    if (number != NULL && code != NULL) {
        PyObject *arguments[5] = {number, code, c->value, result, c->out};
        final = PyObject_Vectorcall(f->go_on, arguments, 5, NULL);
    }
    if (number != NULL)
        Py_DecRef(number);
    if (code != NULL)
        Py_DecRef(code);
    return final;
}

/* Carry out a call to which so many elements are given; `at`: where in the result the value may lie, or -1. */
static PyObject *carry_out(face *f, const short_call *c, size_t count, ssize_t at)
{
    Py_buffer to;
    if (c->out != NONE && !fits(f, c, at, &to))
        return none();
    PyObject *result = array_for(f, c), *line = NULL;
    if (result == NULL)
        return NULL;
    if (f->flight.memory != NULL)
        line = PyObject_Vectorcall(f->flight.line, NULL, 0, NULL);
    int lends = c->out != NONE || memory_of(result, C_CONTIGUOUS | WRITABLE, &to) == 0;
    if (PyErr_Occurred() || !lends || f->cells[HOLDS]) {
        Py_DecRef(result); /* Python code ran since the way was found open, in which another thread may have come */
        if (line != NULL)
            Py_DecRef(line);
        return PyErr_Occurred() ? NULL : none();
    }
    int64_t entry = line == NULL ? 0 : record_begin(f, &c->known, line);
    f->cells[HOLDS] |= BUSY;
    f->cells[THREAD] = (int64_t)PyThread_get_thread_ident();
    nc_inputs(f->core)[0] = c->view.buf;
    nc_pieces(f->core)[0] = (nc_piece){to.buf, count};
    nc_state state = nc_begin(f->core, &c->call, KEEPS_LOCK);
    if (state == NC_NOT_YET || state == NC_MOVED)
        state = go_on(f, state, WAITS);
    f->lost = errno;
    if (state != NC_DONE) {
        PyObject *final = hand_on(f, c, state, result);
        Py_DecRef(result);
        return final;
    }
    if (entry)
        record_end(f, entry);
    f->cells[CALLS]++;
    f->cells[LAST] = c->known.number;
    f->cells[HOLDS] &= ~(int64_t)BUSY;
    return result;
}

/* all_reduce(op, value, out or None) */
static PyObject *all_reduce(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    short_call c = {.value = a[1], .out = a[2], .result = {.kind = NC_ALL_REDUCE, .op = op_of(f, a[0])}};
    if (!is_known(f, &c))
        return none();
    if (c.view.len >= NC_SHARED_BYTES && nc_is_shared(f->core, c.view.buf, (size_t)c.view.len))
        return none(); /* the result may be shared */
    c.call.unit = 64 / (size_t)c.view.itemsize ? 64 / (size_t)c.view.itemsize : 1;
    return carry_out(f, &c, (size_t)(c.view.len / c.view.itemsize), 0);
}

/* reduce_scatter(op, value, out or None) */
static PyObject *reduce_scatter(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    short_call c = {.value = a[1], .out = a[2], .result = {.kind = NC_REDUCE_SCATTER, .op = op_of(f, a[0])}};
    if (!is_known(f, &c) || c.result.axes == 0 || c.result.shape[0] == 0)
        return none();
    ssize_t rows = c.result.shape[0];
    c.result.shape[0] = rows / f->ranks + (f->rank < rows % f->ranks);
    c.call.unit = (size_t)(c.view.len / rows / c.view.itemsize);
    return carry_out(f, &c, (size_t)(c.view.len / c.view.itemsize), -1);
}

/* all_gather(value, out or None), along the first axis */
static PyObject *all_gather(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    short_call c = {.value = a[0], .out = a[1], .result = {.kind = NC_ALL_GATHER}};
    if (!is_known(f, &c) || c.result.axes == 0)
        return none();
    c.call.note = c.result.shape[0];
    c.result.shape[0] *= f->ranks;
    c.call.dtype = NC_U8, c.call.flags = NC_EQUAL;
    return carry_out(f, &c, (size_t)c.view.len, f->rank * c.view.len);
}

/* broadcast(value, root, out or None) */
static PyObject *broadcast(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    long long root = whole(a[1]);
    short_call c = {.value = a[0], .out = a[2], .result = {.kind = BROADCAST, .root = (int)root}};
    if (root < 0 || root >= f->ranks) {
        PyErr_Clear(); /* the long way says what is wrong with it */
        return none();
    }
    if (!is_known(f, &c))
        return none();
    c.call.kind = NC_ALL_GATHER, c.call.dtype = NC_U8;
    return carry_out(f, &c, root == f->rank ? (size_t)c.view.len : 0, 0);
}

/* all_to_all(value, out or None), of as many rows for each rank */
static PyObject *all_to_all(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    short_call c = {.value = a[0], .out = a[1], .result = {.kind = NC_ALL_TO_ALL}};
    if (!is_known(f, &c) || c.view.len == 0 || c.result.axes == 0 || c.result.shape[0] % f->ranks)
        return none();
    c.call.dtype = NC_U8, c.call.flags = NC_EQUAL;
    return carry_out(f, &c, (size_t)c.view.len, -1);
}

/* short(array type, numpy.empty, a pool's take, continuation, list of operations, list of their codes)

   The continuation is called with signature, state, value, the array for the result, and that which was given or
   None. */
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
    name_shape = PyUnicode_InternFromString("shape");
    name_dtype = PyUnicode_InternFromString("dtype");
    return PyErr_Occurred() ? NULL : none();
}

PyMethodDef short_functions[] = {
    {"short", open_short, METH_FASTCALL, NULL},
    {"learn", learn, METH_FASTCALL, NULL},
    {"lost", lost, METH_FASTCALL, NULL},
    {"flight", keep_flight, METH_FASTCALL, NULL},
    {"all_reduce", all_reduce, METH_FASTCALL, NULL},
    {"reduce_scatter", reduce_scatter, METH_FASTCALL, NULL},
    {"all_gather", all_gather, METH_FASTCALL, NULL},
    {"broadcast", broadcast, METH_FASTCALL, NULL},
    {"all_to_all", all_to_all, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

void short_close(face *f)
{
    PyObject *objects[4] = {f->array_type, f->empty, f->take, f->go_on};
    for (int i = 0; i < 4; i++)
        if (objects[i] != NULL)
            Py_DecRef(objects[i]);
    for (int i = 0; i < f->op_count; i++)
        Py_DecRef(f->op[i]);
    for (int i = 0; i < 5 && f->flight.memory != NULL; i++)
        Py_DecRef(f->flight.kept[i]);
    for (int i = 0; i < SIGNATURES; i++)
        if (f->known[i].text != NULL)
            Py_DecRef(f->known[i].text);
}
