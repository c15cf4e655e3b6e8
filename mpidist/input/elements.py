"""Elements of datasets and their specs: copy, stack, cut and describe nests of arrays.

Tuples, named tuples, dicts and attrs classes are structure. A list is one array, as in tf.data.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from mpidist.arrays.convert import is_torch, restorer, to_array, to_torch
from mpidist.arrays.dtypes import Array, DType
from mpidist.core import nest

T = TypeVar("T")


class ArraySpec(NamedTuple):
    """Shape and dtype of one array of an element (tf.TensorSpec).

    Args:
        shape: Sizes of the axes. None stands for a size that may differ between elements.
        dtype: The NumPy dtype.
        name: A name for the array, or None.

    >>> ArraySpec((None, 3), np.dtype("float32"))
    ArraySpec(shape=(None, 3), dtype=dtype('float32'))
    """

    shape: tuple[int | None, ...]
    dtype: DType
    name: str | None = None

    def __repr__(self) -> str:
        name = "" if self.name is None else f", name={self.name!r}"
        return f"{type(self).__name__}(shape={self.shape!r}, dtype={self.dtype!r}{name})"


class TensorSpec(ArraySpec):
    """An ArraySpec of a PyTorch tensor, so that empty batches are tensors too."""


@dataclasses.dataclass(frozen=True)
class DatasetSpec:
    """The spec of a dataset that is itself an element (tf.data.DatasetSpec).

    The elements of ``window`` are such datasets.

    Args:
        element_spec: The nest of ArraySpec of its elements.

    >>> from mpidist.input import Dataset
    >>> Dataset.range(4).window(2).element_spec
    DatasetSpec(element_spec=ArraySpec(shape=(), dtype=dtype('int64')))
    """

    element_spec: Any


class PerReplicaSpec(NamedTuple):
    """The specs of one leaf, one for each local replica of this rank in order.

    >>> PerReplicaSpec((ArraySpec((2,), np.dtype("int64")),)).specs[0].shape
    (2,)
    """

    specs: tuple[ArraySpec, ...]


class Hidden(Generic[T]):
    """Wrapper that makes a structure a leaf."""

    def __init__(self, value: T) -> None:
        self.value = value


def map_leaves(fn: Callable[[Any], object], value: Any, leaf: type = np.ndarray) -> Any:
    """Apply ``fn`` to the leaves of a nest. Lists and values of type ``leaf`` are leaves."""
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


def list_to_array(values: list[object]) -> Array:
    """Return the array of a list of numbers, lists or arrays of one shape."""
    items = [np.asarray(value) if hasattr(value, "__array__") else value for value in values]
    if not any(isinstance(value, Mapping) for value in values):
        try:
            return np.asarray(items)
        except ValueError:
            pass
    shapes = ", ".join(str(getattr(value, "shape", type(value).__name__)) for value in values[:4])
    raise ValueError(
        f"a list of {len(values)} values of unlike shapes ({shapes}) cannot become one array. A list stands "
        "for one array. Use a tuple or a dict for a structure, for example dataset.map(tuple)"
    )


def as_element(value: object) -> object:
    """Convert the lists of an element to arrays."""
    if type(value) is np.ndarray:  # most elements are
        return value
    return map_leaves(lambda leaf: list_to_array(leaf) if isinstance(leaf, list) else leaf, value)


def owned(value: T) -> T:
    """Return a copy of a value from user code, which may modify its arrays later."""
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
        # PyTorch has clone(). NumPy, CuPy, JAX and pandas have copy(). Arrays in files have neither and are not copied.
        copy = getattr(leaf, "clone", None) or getattr(leaf, "copy", None)
        return leaf if copy is None else copy()
    return leaf


def call(fn: Callable[..., T], element: object) -> T:
    """Return ``fn`` of ``element``. A plain tuple becomes several arguments, as in tf.data."""
    try:
        return fn(*element) if type(element) is tuple else fn(element)
    except StopIteration as error:
        raise stopped(getattr(fn, "__name__", repr(fn))) from error


def stopped(source: str) -> RuntimeError:
    """Return the error for user code that raised StopIteration, which would silently end the pass."""
    return RuntimeError(f"{source} raised StopIteration; expected an element, or another exception")


def stack(elements: Sequence[object]) -> object:
    """Stack at least one element along a new first axis."""
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
    where = f" at {path}" if path else ""
    if dataclasses.is_dataclass(leaves[0]):
        raise unknown_structure(f"batch() got {_kind(leaves[0])}{where}")
    arrays = [np.asarray(leaf) for leaf in leaves]
    shapes = list(dict.fromkeys(array.shape for array in arrays))
    if len(shapes) > 1:
        raise ValueError(
            f"elements of one batch have the shapes {shapes[0]} and {shapes[1]}{where}; expected one shape. "
            "Bring them to one length before batch(), for example with dataset.map(lambda x: np.pad(...))"
        )
    return np.stack(arrays)


def row_count(batch: object) -> int:
    """Return the size of the first axis, which all leaves of ``batch`` must share."""
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


def cut(batch: T, start: int, stop: int) -> T:
    """Return the rows ``start`` to ``stop`` of every leaf, as views."""
    rows: T = nest.map_structure(lambda leaf: leaf[start:stop], batch)
    return rows


def join(batches: Sequence[T]) -> T:
    """Return one batch with the rows of several batches, in new arrays."""
    joined: T = nest.map_structure(_join_leaves, *batches)
    return joined


def _join_leaves(*leaves: object) -> object:
    restore = restorer(leaves[0])
    joined = np.concatenate([leaf if restore is None else to_array(leaf) for leaf in leaves])
    return joined if restore is None else restore(joined)


def unbatched(given: str) -> ValueError:
    """Return the error for elements that cannot be split over replicas."""
    return ValueError(
        f"the dataset gives {given}, which cannot be split over replicas; expected batches. Call "
        "dataset.batch(global_batch_size) before distributing it"
    )


def require_array(dtype: DType, kind: str = "Python objects") -> None:
    """Raise TypeError for a dtype of Python objects."""
    if dtype.hasobject:
        raise unknown_structure(f"the dataset gives {kind}")


def unknown_structure(given: str) -> TypeError:
    """Return the error for an element that is an unsupported structure."""
    return TypeError(
        f"{given}. An element can be a list (one array), tuple, named tuple, dict or attrs class of arrays and "
        "numbers. Convert it before batch(), for example with dataset.map(lambda sample: (sample.x, sample.y)) or, "
        "for a dataclass, dataset.map(dataclasses.asdict)"
    )


def dataset_as_array() -> TypeError:
    """Return the error for a dataset, such as a window, in place of an array."""
    return TypeError(
        "the elements are datasets, as those of window(). Convert them to arrays with "
        "dataset.flat_map(lambda window: window.batch(size))"
    )


def as_numpy(leaf: object) -> object:
    """Return a number or array as NumPy's, in host memory. Text and bytes are unchanged."""
    if isinstance(leaf, (str, bytes, np.generic)):
        return leaf
    converted = to_array(leaf, "an element of the dataset")
    host = converted if isinstance(converted, np.ndarray) else converted.get()
    return host if hasattr(leaf, "shape") else host[()]


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"the dataclass {name}" if dataclasses.is_dataclass(value) else f"an object of type {name}"


def spec_of(element: object) -> object:
    """Return the nest of ArraySpec of an element, with all sizes known."""
    return nest.map_structure(_leaf_spec, as_element(element))


def _leaf_spec(leaf: object) -> ArraySpec | DatasetSpec:
    inside = getattr(leaf, "element_spec", None)
    if inside is not None:
        return DatasetSpec(inside)
    if is_torch(leaf):
        # np.asarray() fails for bfloat16 and for tensors that require a gradient.
        return TensorSpec(tuple(leaf.shape), to_array(leaf).dtype)
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or not isinstance(dtype, np.dtype):
        converted = np.asarray(leaf)
        shape, dtype = converted.shape, converted.dtype
    return ArraySpec(tuple(shape), dtype)


def map_spec(fn: Callable[[ArraySpec], object], spec: object) -> Any:
    """Apply ``fn`` to every ArraySpec of a nest. A dataset in it raises TypeError."""

    def of_array(leaf: ArraySpec | DatasetSpec) -> object:
        if isinstance(leaf, DatasetSpec):
            raise dataset_as_array()
        return fn(leaf)

    return map_leaves(of_array, spec, leaf=ArraySpec)


def flatten_spec(spec: object) -> list[ArraySpec]:
    """Return the ArraySpecs of a nest."""
    leaves: list[ArraySpec] = []
    map_spec(leaves.append, spec)
    return leaves


def batched(spec: object, size: int | None) -> object:
    """Return a spec with an axis of ``size`` before each shape."""
    return map_spec(lambda leaf: ArraySpec((size, *leaf.shape), leaf.dtype, leaf.name), spec)


def with_rows(spec: object, rows: int | None) -> object:
    """Return a spec with ``rows`` as the size of the first axes. Scalars are unchanged."""
    return map_spec(lambda leaf: leaf._replace(shape=(rows, *leaf.shape[1:])) if leaf.shape else leaf, spec)


def common_spec(specs: Sequence[object], step: str) -> object:
    """Return the common spec of elements, or None without specs. Sizes that differ become None."""
    if not specs:
        return None

    def kind(leaf: ArraySpec) -> str:
        # Text may have any length.
        return f"{len(leaf.shape)}-d {'text' if leaf.dtype.kind in 'SU' else leaf.dtype}"

    kinds = [map_spec(kind, spec) for spec in specs]
    if any(other != kinds[0] for other in kinds):
        raise TypeError(
            f"{step}() got datasets of unlike elements: {'; '.join(dict.fromkeys(map(str, specs)))}; expected "
            "the same structure, dtypes and numbers of axes. Convert them with map(...) before"
        )
    columns = zip(*map(flatten_spec, specs), strict=True)

    def merge(leaf: ArraySpec) -> ArraySpec:
        sizes = zip(*(other.shape for other in next(columns)), strict=True)
        return leaf._replace(shape=tuple(size[0] if len(set(size)) == 1 else None for size in sizes))

    return map_spec(merge, specs[0])


def conform(element: object, signature: object) -> object:
    """Convert an element to new arrays of the dtypes of ``signature``, and check their shapes."""

    def check(leaf: object, expected: Hidden[ArraySpec]) -> Array:
        converted = np.array(leaf, expected.value.dtype)
        wanted = expected.value.shape
        if len(wanted) != converted.ndim or any(
            want not in (None, size) for want, size in zip(wanted, converted.shape, strict=True)
        ):
            raise ValueError(
                f"an element has the shape {converted.shape}, and output_signature says {wanted}. Write None for "
                "sizes that differ between elements"
            )
        return converted

    return nest.map_structure(check, as_element(element), map_spec(Hidden, signature))


def empty_batch(spec: object) -> object:
    """Return a batch without rows. Unknown sizes of other axes become 0."""

    def build(leaf: ArraySpec) -> object:
        if not leaf.shape:
            require_array(leaf.dtype)
            raise unbatched(f"single values of {leaf.dtype}, and some replica has none left")
        empty = np.zeros((0, *(size or 0 for size in leaf.shape[1:])), leaf.dtype)
        return to_torch(empty) if isinstance(leaf, TensorSpec) else empty

    return map_spec(build, spec)
