/* Signatures: the cache of calls that can take the fast path. */

#include "fast_path.h"

#include <stdlib.h>
#include <string.h>

enum { PROBES = 8 };

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

static uint64_t mixed(uint64_t hash, const ssize_t *sizes, int n)
{
    for (int i = 0; i < n; i++)
        hash = (hash ^ (uint64_t)sizes[i]) * 0x9E3779B97F4A7C15u, hash ^= hash >> 29;
    return hash;
}

signature *signature_look_up(face *f, const signature *s, int may_add)
{
    uint64_t hash = (uint64_t)(s->kind * 31 + s->op) * 0x9E3779B97F4A7C15u + (uint64_t)(s->dtype * 64 + s->axes);
    hash = mixed(mixed(hash, s->shape, s->axes), s->shapes, s->words) + (uint64_t)s->root;
    for (int probe = 0; probe < PROBES; probe++) {
        signature *k = &f->known[(hash + (uint64_t)probe) % SIGNATURES];
        if (k->is_known && k->kind == s->kind && k->op == s->op && k->dtype == s->dtype && k->axes == s->axes &&
            k->root == s->root && !memcmp(k->shape, s->shape, sizeof *s->shape * (size_t)s->axes) &&
            k->words == s->words && (!s->words || !memcmp(k->shapes, s->shapes, sizeof *s->shapes * (size_t)s->words)))
            return k;
        if (may_add && (!k->is_known || probe == PROBES - 1))
            return k;
    }
    return NULL;
}

int signature_op(const face *f, PyObject *op)
{
    for (int i = 0; i < f->op_count; i++)
        if (f->op[i] == op)
            return f->op_code[i];
    return -1;
}

int signature_of_array(face *f, PyObject *array, int flags, Py_buffer *view, signature *s)
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
    if (view->ndim > 0) /* the shape of a 0-d array may be NULL, which memcpy must not get */
        memcpy(s->shape, view->shape, sizeof *s->shape * (size_t)view->ndim);
    return 0;
}

int signature_of_list(face *f, PyObject *tuple, int flags, nc_range *memory, signature *s)
{
    ssize_t n = PySequence_Size(tuple);
    if (n < 1 || n > NC_PIECES)
        return -1;
    s->shapes = f->shapes;
    for (ssize_t i = 0; i < n; i++) {
        Py_buffer view;
        signature one = {0};
        if (signature_of_array(f, PyTuple_GetItem(tuple, i), flags, &view, &one) < 0 || view.len == 0)
            return -1;
        if ((i > 0 && one.dtype != s->dtype) || s->words + one.axes >= WORDS)
            return -1;
        s->dtype = one.dtype;
        f->shapes[s->words++] = one.axes;
        memcpy(f->shapes + s->words, one.shape, sizeof *one.shape * (size_t)one.axes);
        s->words += one.axes;
        memory[n - 1 - i] = (nc_range){view.buf, (char *)view.buf + view.len, (int)(n - 1 - i)};
    }
    return (int)n;
}

int signature_opens(PyObject *value)
{
    PyObject *type = PyObject_Type(value);
    Py_DecRef(type); /* the value keeps it */
    return type == &PyList_Type ? 1 : type == &PyTuple_Type ? TUPLE : 0;
}

static size_t input_bytes(const face *f, int pieces)
{
    size_t bytes = 0;
    for (int i = 0; i < pieces; i++)
        bytes += (size_t)(f->given[i].end - f->given[i].begin);
    return bytes;
}

/* cache(kind, op, array or list of arrays, root, divisor, id, text) -> number of the signature, or None if such calls
   cannot take the fast path */
PyObject *signature_cache(PyObject *self, PyObject *const *a, ssize_t n)
{
    (void)n;
    face *f = face_of(self);
    signature s = {.is_known = 1, .kind = (int)whole(a[0]), .op = (int)whole(a[1]), .root = (int)whole(a[3]),
                   .divisor = PyFloat_AsDouble(a[4]), .id = (uint64_t)whole(a[5]), .text = a[6]};
    Py_buffer view;
    int pieces = 0;
    if (PyErr_Occurred())
        return NULL;
    if (signature_opens(a[2])) {
        PyObject *tuple = PySequence_Tuple(a[2]);
        if (tuple == NULL)
            return NULL;
        s.kind = LIST;
        pieces = signature_of_list(f, tuple, 0, f->given, &s);
        Py_DecRef(tuple);
        if (pieces < 0)
            return none();
    } else if (a[2] != NONE) {
        if (signature_of_array(f, a[2], 0, &view, &s) < 0)
            return none();
        f->given[pieces++] = (nc_range){view.buf, (char *)view.buf + view.len, 0};
    }
    if (nc_is_on_wire(f->core) && input_bytes(f, pieces) > NC_MOST_OVER_NODES)
        return none();
    signature *k = signature_look_up(f, &s, 1);
    size_t bytes = sizeof *s.shapes * (size_t)s.words;
    if (bytes) {
        s.shapes = malloc(bytes);
        if (s.shapes == NULL)
            return none();
        memcpy(s.shapes, f->shapes, bytes);
    }
    s.number = (int)(k - f->known);
    Py_IncRef(s.text);
    if (k->text != NULL)
        Py_DecRef(k->text);
    free(k->shapes);
    *k = s;
    return PyLong_FromLongLong(s.number);
}
