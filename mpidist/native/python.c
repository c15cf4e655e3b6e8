/* The functions that Python calls. A placeholder, which has none yet but the id of the build.
 *
 * CPython's prototypes are declared by hand: no header of Python is needed, one library serves every CPython from 3.10,
 * and the interpreter resolves the symbols when it loads the library. */
#include "mpidist.h"

#include <stdatomic.h>
#include <stddef.h>

typedef struct PyObject PyObject;
typedef PyObject *(*PyCFunction)(PyObject *self, PyObject *arguments);
typedef struct {
    const char *name;
    PyCFunction function;
    int flags;
    const char *doc;
} PyMethodDef;
enum { METH_NOARGS = 4 };

extern PyObject *PyCFunction_NewEx(PyMethodDef *definition, PyObject *self, PyObject *module);
extern PyObject *PyDict_New(void);
extern int PyDict_SetItemString(PyObject *dict, const char *key, PyObject *value);
extern PyObject *PyUnicode_FromString(const char *text);
extern void Py_DecRef(PyObject *object);

const char *nc_build(void) { return NC_BUILD; }

static PyObject *build(PyObject *self, PyObject *arguments)
{
    (void)self;
    (void)arguments;
    return PyUnicode_FromString(nc_build());
}

static PyMethodDef definitions[] = {{"build", build, METH_NOARGS, "Return the id of the sources it was built from."}};

NC_EXPORT PyObject *nc_functions(void)
{
    PyObject *functions = PyDict_New();
    for (size_t i = 0; functions != NULL && i < sizeof definitions / sizeof *definitions; i++) {
        PyObject *function = PyCFunction_NewEx(&definitions[i], NULL, NULL);
        int failed = function == NULL || PyDict_SetItemString(functions, definitions[i].name, function) != 0;
        if (function != NULL)
            Py_DecRef(function);
        if (failed) {
            Py_DecRef(functions);
            return NULL;
        }
    }
    return functions;
}
