/* Internal declarations of the Python interface: CPython's functions, and the state of an interface to one core (face).

   CPython's functions are declared by hand. ctypes.PyDLL loads the library, which finds the symbols in the interpreter,
   so that one file supports every CPython. A capsule owns the face, and the builtin functions of the core refer to the
   capsule. All functions run with the GIL and release it while they wait or move many bytes. Arrays must support the
   buffer protocol, and be contiguous and aligned. */

#ifndef MPIDIST_PYTHON_H
#define MPIDIST_PYTHON_H

#include "mpidist.h"

#include <sys/types.h>

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
enum { METH_FASTCALL = 0x80, WRITABLE = 1, FORMAT = 4, C_CONTIGUOUS = 0x38, BUF_WRITE = 0x200 };

extern PyObject *PyExc_ValueError, *PyExc_MemoryError, _Py_NoneStruct, PyList_Type, PyTuple_Type;
PyObject *PyCFunction_NewEx(PyMethodDef *, PyObject *, PyObject *);
PyObject *PyCapsule_New(void *, const char *, void (*)(PyObject *));
void *PyCapsule_GetPointer(PyObject *, const char *);
PyObject *PyDict_New(void);
int PyDict_SetItemString(PyObject *, const char *, PyObject *);
PyObject *PyList_New(ssize_t);
PyObject *PyList_GetItem(PyObject *, ssize_t);
int PyList_SetItem(PyObject *, ssize_t, PyObject *);
int PyList_Append(PyObject *, PyObject *);
ssize_t PyList_Size(PyObject *);
ssize_t PySequence_Size(PyObject *);
PyObject *PySequence_GetItem(PyObject *, ssize_t);
PyObject *PyTuple_New(ssize_t);
int PyTuple_SetItem(PyObject *, ssize_t, PyObject *);
PyObject *PyTuple_GetItem(PyObject *, ssize_t);
PyObject *PySequence_Tuple(PyObject *);
PyObject *PySequence_List(PyObject *);
PyObject *PyLong_FromLongLong(long long);
long long PyLong_AsLongLong(PyObject *);
double PyFloat_AsDouble(PyObject *);
PyObject *PyMemoryView_FromMemory(char *, ssize_t, int);
PyObject *PyUnicode_InternFromString(const char *);
PyObject *PyObject_GetAttr(PyObject *, PyObject *);
PyObject *PyObject_Type(PyObject *);
PyObject *PyObject_CallFunction(PyObject *, const char *, ...);
PyObject *PyObject_VectorcallDict(PyObject *, PyObject *const *, size_t, PyObject *); /* exported by 3.10, too */
int PyObject_GetBuffer(PyObject *, Py_buffer *, int);
void PyBuffer_Release(Py_buffer *);
void Py_IncRef(PyObject *); /* this one and the next accept NULL */
void Py_DecRef(PyObject *);
PyObject *PyErr_Occurred(void);
void PyErr_Clear(void);
PyObject *PyErr_Format(PyObject *, const char *, ...);
unsigned long PyThread_get_thread_ident(void);
void *PyEval_SaveThread(void);
void PyEval_RestoreThread(void *);

#define NONE (&_Py_NoneStruct)

/* Integers that Python reads and writes, too. DISABLED: calls take the general path unless it is 0. CALLS: number of
   fast-path calls. LAST: signature of the last. BYTES: bytes of their inputs. */
enum { DISABLED, CALLS, LAST, THREAD, BYTES, CELLS };
/* IN_CALL: the thread in THREAD is in a fast-path call. HANDED_OVER: Python must resume a call. */
enum { IN_CALL = 1, HANDED_OVER = 4 };
/* WORDS: numbers of axes and sizes of the arrays of a call, at most. */
enum { SIGNATURES = 2048, OPS = 32, WORDS = 4096 };
/* Nanoseconds that a call polls before it releases the GIL, because releasing it costs latency. */
enum { KEEPS_LOCK = 30000 };

typedef struct {
    int kind, op, format, root, words;
    ssize_t *shapes; /* for each array the number of axes, and the sizes. NULL in an empty entry of the cache */
    int number, dtype; /* from here on results of a look-up */
    double divisor;
    uint64_t id;
} signature;

/* The interface of one core to Python: the cache of the fast path, and the arguments of the current call. */
typedef struct {
    nc *core;
    int rank, ranks, op_count;
    int64_t cells[CELLS];
    PyObject *array_type, *empty, *take, *resume; /* numpy.ndarray and three functions */
    PyObject *began, *ended;                     /* functions that record calls, or NULL */
    ssize_t shapes[WORDS], shapes_of_out[WORDS]; /* of the value and `out` read last */
    PyObject *op[OPS];
    int op_code[OPS];
    signature known[SIGNATURES];
    nc_range given[NC_INPUTS], results[NC_PIECES]; /* memory of the inputs and results of the current call */
    int64_t parts[NC_MOST_RANKS + 1];
} face;

static const char CAPSULE[] = "mpidist core";

static inline face *face_of(PyObject *self) { return PyCapsule_GetPointer(self, CAPSULE); }
static inline PyObject *none(void) { Py_IncRef(NONE); return NONE; }
static inline long long whole(PyObject *number) { return PyLong_AsLongLong(number); }

static inline nc_state resume(face *f, int64_t nanoseconds)
{
    void *thread = PyEval_SaveThread();
    nc_state state = nc_step(f->core, nanoseconds);
    PyEval_RestoreThread(thread);
    return state;
}

static inline int memory_of(PyObject *array, int flags, Py_buffer *view)
{
    if (PyObject_GetBuffer(array, view, flags) < 0)
        return -1;
    PyBuffer_Release(view); /* the caller keeps the array */
    return 0;
}

/* fast_path.c: its functions, and a function that releases their references. */
extern PyMethodDef fast_functions[];
void fast_close(face *f);

#endif
