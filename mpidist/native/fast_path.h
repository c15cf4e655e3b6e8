/* Shared declarations of the fast path. */

#ifndef MPIDIST_FAST_PATH_H
#define MPIDIST_FAST_PATH_H

#include "python.h"

/* Kinds of signatures in addition to nc_kind: an ALL_GATHER from one rank, and an ALL_REDUCE of a list. */
enum { BROADCAST = 16, LIST = 17 };

/* Return the cached signature, or NULL. With may_add, return the entry for a new one instead of NULL. */
signature *signature_look_up(face *f, const signature *s, int may_add);
int signature_op(const face *f, PyObject *op);
/* Return 1 for a list, TUPLE for a tuple, or 0. */
enum { TUPLE = 2 };
int signature_opens(PyObject *value);
/* Read a NumPy array. Return 0, or -1 for subclasses and other objects. */
int signature_of_array(face *f, PyObject *array, int flags, Py_buffer *view, signature *s);
/* Read a tuple of non-empty arrays of one dtype: their memory, last array first as on the general path, and their
   shapes, which stay in the face. Return the number of arrays, or -1. */
int signature_of_list(face *f, PyObject *tuple, int flags, nc_range *memory, signature *s);
PyObject *signature_cache(PyObject *self, PyObject *const *a, ssize_t n);

/* Record the start of a call. Releases `line`, the line of the program. Return the serial number of the entry. */
int64_t flight_begin(face *f, const signature *k, PyObject *line);
void flight_finish(const face *f, int64_t serial);
PyObject *flight_keep(PyObject *self, PyObject *const *a, ssize_t n);

#endif
