"""One element of a dataset: converting its lists, stacking and cutting it.

In this room tuples, named tuples, dicts and attrs classes are structure, and a list is one array, as in tf.data, so a
nest that leaves here has no lists in it.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from mpidist.arrays.convert import restorer, to_array
from mpidist.arrays.dtypes import Array, DType
from mpidist.core import nest

T = TypeVar("T")


def map_leaves(fn: Callable[[Any], object], value: Any, leaf: type = np.ndarray) -> Any:
    """Apply ``fn`` to the leaves of ``value``, lists among them, and return the same structure.

    Args:
        fn: Called with one leaf.
        value: The nest; any mapping becomes a dict.
        leaf: Types that are leaves although they look like structure (a named tuple that describes an array).

    >>> map_leaves(len, {"a": [1, 2], "b": ("xyz",)})
    {'a': 2, 'b': (3,)}
    """
    if isinstance(value, (np.ndarray, leaf)):
        return fn(value)
    if isinstance(value, Mapping):
        return {key: map_leaves(fn, child, leaf) for key, child in value.items()}
    if isinstance(value, tuple):
        children = [map_leaves(fn, child, leaf) for child in value]
        return type(value)(*children) if hasattr(value, "_fields") else tuple(children)
    if hasattr(type(value), "__attrs_attrs__"):
        names = [attribute.name for attribute in type(value).__attrs_attrs__]
        return type(value)(**{name: map_leaves(fn, getattr(value, name), leaf) for name in names})
    return fn(value)


class Hidden(Generic[T]):
    """Wrapper that hides a value like a structure from functions that walk through nests."""

    def __init__(self, value: T) -> None:
        self.value = value


def list_to_array(values: list[object]) -> Array:
    """Return the array of a list of numbers, lists or arrays of one shape.

    Raises:
        ValueError: Their shapes differ.
    """
    items = [np.asarray(value) if hasattr(value, "__array__") else value for value in values]
    mixed = any(isinstance(value, Mapping) for value in values)
    try:
        if not mixed:
            return np.asarray(items)
    except ValueError:
        mixed = True
    shapes = ", ".join(str(getattr(value, "shape", type(value).__name__)) for value in values[:4])
    raise ValueError(
        f"a list of {len(values)} values of unlike shapes ({shapes}) cannot become one array; a list stands "
        "for one array, so use a tuple or a dict for a structure of several, for example dataset.map(tuple)"
    )


def owned(value: T) -> T:
    """Return a copy of a value from user code.

    The user's code may go on writing into its own arrays and lists.

    >>> kept = np.zeros(2)
    >>> owned({"x": kept})["x"] is kept
    False
    """
    copied: T = map_leaves(_owned_leaf, value)
    return copied


def _owned_leaf(leaf: object) -> object:
    if isinstance(leaf, (int, float, complex, str, bytes, np.generic)):
        return leaf
    if isinstance(leaf, list):
        return [owned(child) for child in leaf]
    if isinstance(leaf, (np.memmap, memoryview)):
        return np.array(leaf)
    if isinstance(leaf, (bytearray, array)):
        return leaf[:]
    if hasattr(leaf, "__array__"):
        # PyTorch says clone(); NumPy, CuPy, JAX and pandas say copy(). Arrays in files say neither, and stay there.
        copy = getattr(leaf, "clone", None) or getattr(leaf, "copy", None)
        return leaf if copy is None else copy()
    return leaf


def as_element(value: object) -> object:
    """Return ``value`` with its lists made arrays; other leaves stay as they are."""
    if type(value) is np.ndarray:  # most elements are
        return value
    return map_leaves(lambda leaf: list_to_array(leaf) if isinstance(leaf, list) else leaf, value)


def call(fn: Callable[..., T], element: object) -> T:
    """Return ``fn`` of ``element``. A plain tuple is passed as several arguments, as in tf.data.

    Raises:
        RuntimeError: ``fn`` raised StopIteration, which would end the pass as if there were no more elements.
    """
    try:
        return fn(*element) if type(element) is tuple else fn(element)
    except StopIteration as error:
        raise stopped(getattr(fn, "__name__", repr(fn))) from error


def stopped(source: str) -> RuntimeError:
    """Return the error for StopIteration raised by something that gives one element."""
    return RuntimeError(f"{source} raised StopIteration; expected an element, or another exception")


def stack(elements: Sequence[object]) -> object:
    """Return one element whose leaves are those of ``elements``, stacked along a new first axis.

    Args:
        elements: At least one; leaves are arrays, numbers, or anything that ``np.asarray`` takes.

    Raises:
        ValueError: Structures or shapes differ.

    >>> stack([(1, [1.0, 2.0]), (2, [3.0, 4.0])])
    (array([1, 2]), array([[1., 2.],
           [3., 4.]]))
    """
    converted = [as_element(element) for element in elements]
    first = converted[0]
    if not nest.is_nest(first):
        return _stack_leaves("", converted)
    for other in converted[1:]:
        nest.assert_same_structure(first, other)
    paths = [path for path, _ in nest.flatten_with_path(first)]
    columns = zip(*(nest.flatten(element) for element in converted), strict=True)
    return nest.pack_like(first, [_stack_leaves(*pair) for pair in zip(paths, columns, strict=True)])


def _stack_leaves(path: str, leaves: Sequence[object]) -> Array:
    if dataclasses.is_dataclass(leaves[0]):
        raise unknown_structure(f"batch() got {_kind(leaves[0])}{' at ' + path if path else ''}")
    arrays = [np.asarray(leaf) for leaf in leaves]
    shapes = list(dict.fromkeys(array.shape for array in arrays))
    if len(shapes) > 1:
        where = f" at {path}" if path else ""
        raise ValueError(
            f"elements of one batch have the shapes {shapes[0]} and {shapes[1]}{where}; expected one shape; "
            "bring them to one length before batch(), for example with dataset.map(lambda x: np.pad(...))"
        )
    return np.stack(arrays)


def row_count(batch: object) -> int:
    """Return the size of the first axis, which all leaves of ``batch`` must share.

    Raises:
        ValueError: A leaf has no axes, or the sizes differ.

    >>> row_count((np.zeros((4, 2)), np.zeros(4)))
    4
    """
    sizes: dict[int, str] = {}
    for path, leaf in nest.flatten_with_path(batch):
        shape = np.shape(leaf)
        if not shape:
            require_array(np.asarray(leaf).dtype, _kind(leaf))
            raise unbatched(f"an element{path} without axes ({leaf!r})")
        sizes.setdefault(shape[0], path)
    if len(sizes) != 1:
        found = ", ".join(f"{size} rows at {path or 'the element'}" for size, path in sizes.items())
        raise ValueError(
            f"the arrays of one batch have different numbers of rows: {found or 'it has no arrays'}; "
            "expected the batch as the first axis of each, so that it can be split over the replicas"
        )
    return next(iter(sizes))


def unbatched(given: str) -> ValueError:
    """Return the error for a dataset whose elements cannot be split over replicas."""
    return ValueError(
        f"the dataset gives {given}, which cannot be split over replicas; expected batches: call "
        "dataset.batch(global_batch_size) before distributing it"
    )


def require_array(dtype: DType, kind: str = "Python objects") -> None:
    """Raise TypeError unless values of ``dtype`` are arrays or numbers.

    Nothing can look into other objects.
    """
    if dtype.hasobject:
        raise unknown_structure(f"the dataset gives {kind}")


def unknown_structure(given: str) -> TypeError:
    """Return the error for an element that is a structure of some other kind."""
    return TypeError(
        f"{given}, which is none of the structures that an element can be: list (one array), tuple, named tuple, dict "
        "or attrs class, with arrays and numbers in them; make it one of them before batch(), for example with "
        "dataset.map(lambda sample: (sample.x, sample.y)) or, for a dataclass, dataset.map(dataclasses.asdict)"
    )


def as_numpy(leaf: object) -> object:
    """Return a number or array as NumPy's, in host memory. Texts and bytes stay as they are.

    Raises:
        TypeError: It is something else.
    """
    if isinstance(leaf, (str, bytes, np.generic)):
        return leaf
    array = to_array(leaf, "an element of the dataset")
    host = array if isinstance(array, np.ndarray) else array.get()
    return host if hasattr(leaf, "shape") else host[()]


def dataset_as_array() -> TypeError:
    """Return the error for a dataset, such as a window, where an array belongs."""
    return TypeError(
        "the elements are datasets, as those of window(), where arrays are expected; make arrays of them with "
        "dataset.flat_map(lambda window: window.batch(size))"
    )


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"the dataclass {name}" if dataclasses.is_dataclass(value) else f"an object of type {name}"


def join(batches: Sequence[T]) -> T:
    """Return one batch with the rows of all ``batches``.

    Each has at least one row; the arrays are new.

    >>> join([(np.arange(2),), (np.arange(1),)])
    (array([0, 1, 0]),)
    """
    joined: T = nest.map_structure(_join_leaves, *batches)
    return joined


def _join_leaves(*leaves: object) -> object:
    restore = restorer(leaves[0])
    joined = np.concatenate([leaf if restore is None else to_array(leaf) for leaf in leaves])
    return joined if restore is None else restore(joined)


def cut(batch: T, start: int, stop: int) -> T:
    """Return the rows ``start`` to ``stop`` of every leaf, as views."""
    rows: T = nest.map_structure(lambda leaf: leaf[start:stop], batch)
    return rows
