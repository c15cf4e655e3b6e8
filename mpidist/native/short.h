/* What the files of the short way share. */

#ifndef MPIDIST_SHORT_H
#define MPIDIST_SHORT_H

#include "python.h"

/* Kinds of signatures beside those of mpidist.h: a gathering to which one rank gives, an all-reduce of a list. */
enum { BROADCAST = 16, LIST = 17 };

/* The signature that Python has taught a core, NULL for none; or the place for a new one. */
signature *signature_look_up(face *f, const signature *s, int may_add);
int signature_op(const face *f, PyObject *op);
/* 1 for a list, TUPLE for a tuple, or 0. */
enum { TUPLE = 2 };
int signature_opens(PyObject *value);
/* Read an array of NumPy, of no subclass; 0, or -1 for another one. */
int signature_of_array(face *f, PyObject *array, int flags, Py_buffer *view, signature *s);
/* Read a tuple of arrays of one dtype, none empty: their memory, the last first as the long way lays them out, and
   their shapes, which stay in the face. Returns how many there are, or -1. */
int signature_of_list(face *f, PyObject *tuple, int flags, nc_range *memory, signature *s);
PyObject *signature_learn(PyObject *self, PyObject *const *a, ssize_t n);

/* Write down that a call begins, at a line of the program, which is given away; returns its serial number. */
int64_t flight_begin(face *f, const signature *k, PyObject *line);
void flight_finish(const face *f, int64_t serial);
PyObject *flight_keep(PyObject *self, PyObject *const *a, ssize_t n);

#endif
