"""Reading: splits a value into arrays and a structure, and builds results with that structure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, ValuesView
from functools import lru_cache, partial
from typing import Any, Generic, TypeVar

import numpy as np

from mpidist.arrays.convert import NUMBERS, restorer, to_array
from mpidist.arrays.dtypes import Array
from mpidist.collectives.channel.operation import signature_of, signature_text, which_on_device
from mpidist.core import nest

T = TypeVar("T")

_ARRAYS = {np.ndarray}


class Given(Generic[T]):
    """The arrays of a call, and ``outs``, the arrays for its results, if any.

    ``structure`` is text that the ranks compare. It is "" for an array, and for a list or tuple of arrays, because only
    their order matters. ``rebuild`` returns a result like the value. ``on_device`` holds True for each array on a GPU
    and False for the others. It is empty if no array is on a GPU.
    """

    __slots__ = ("arrays", "on_device", "outs", "rebuild", "signature", "structure")

    def __init__(
        self,
        arrays: Sequence[Array],
        structure: str = "",
        rebuild: Callable[..., T] = list,  # type: ignore[assignment]
        outs: Sequence[Array] | None = None,
    ) -> None:
        self.arrays, self.structure, self.rebuild, self.outs = arrays, structure, rebuild, outs
        self.signature, self.on_device = signature_of(arrays), which_on_device(arrays)


def read(value: T, out: object = None) -> Given[T]:
    """Return the arrays of a value, and of ``out``.

    Other mappings become dicts, generators and dict views lists.

    Raises TypeError if a leaf is no array, and ValueError if ``out`` cannot hold the results.

    >>> given = read({"b": [np.ones(2), 3.0], "a": (x for x in [1])})
    >>> given.structure
    "{'a': [*], 'b': [*, *]}"
    >>> given.rebuild([2 * array for array in given.arrays])
    {'b': [array([2., 2.]), np.float64(6.0)], 'a': [np.int64(2)]}
    """
    content: Any = value
    kind: Any = type(content)
    if kind is np.ndarray:
        given: Given[Any] = Given([content], "", _only)
    elif (kind is list or kind is tuple) and {*map(type, content)} <= _ARRAYS:
        # Most lists are like this, and may be long.
        given = Given(list(content), "", kind)
    else:
        given = _read_nest(value)
    if out is not None:
        given.outs = read_out(out, given.structure)
    return given


def read_one(value: T, out: object = None) -> Given[T]:
    """Return the array of a value that is no nest, and of ``out``."""
    outs = None if out is None else read_out(out, "")
    return Given([to_array(value)], "", lambda results: restore(value, results[0]), outs)


def _read_nest(value: T) -> Given[T]:
    leaves = nest.flatten(value)
    if any(map(_opens, {*map(type, leaves)})):
        value = nest.map_structure(_opened, value)
        leaves = nest.flatten(value)
    try:
        arrays = [to_array(leaf) for leaf in leaves]
    except TypeError:
        # Try again, for an error that names the place.
        arrays = [to_array(leaf, f"value{path}") for path, leaf in nest.flatten_with_path(value)]
    structure = nest.describe(value)
    flat_kind = nest.flat_kind(structure)
    return Given(arrays, structure if flat_kind is None else "", partial(_rebuilt, value, leaves, flat_kind))


@lru_cache(maxsize=4096)
def _opens(kind: type) -> bool:
    """Return whether values of a type hold ordered values without being nests."""
    return issubclass(kind, (Mapping, Iterator, ValuesView)) and not issubclass(kind, dict)


def _opened(leaf: Any) -> Any:
    kind: Any = type(leaf)
    if not _opens(kind):
        return leaf
    return nest.map_structure(_opened, dict(leaf) if isinstance(leaf, Mapping) else list(leaf))


def _only(results: list[Array]) -> Array:
    return results[0]


def _rebuilt(value: T, leaves: Sequence[object], flat_kind: int | None, results: list[Array]) -> T:
    restored = [restore(leaf, result) for leaf, result in zip(leaves, results, strict=True)]
    if flat_kind is None:
        return nest.pack_like(value, restored)
    kind: Any = type(value)
    return kind(restored) if flat_kind else restored[0]  # type: ignore[no-any-return]


def restore(value: object, result: Array) -> Any:
    """Return a result as the same kind of array or number as ``value``."""
    make = restorer(value)
    return result if make is None else make(result)


# Arrays for results ---------------------------------------------------------------------------------------------------


def read_out(out: object, structure: str) -> Sequence[Array]:
    """Return the arrays of ``out``.

    Raises ValueError if it has another structure than the value, is read-only, or holds a number or one array twice,
    and TypeError if a leaf is no array.
    """
    given = read(out)
    if type(out) is not np.ndarray:
        check_can_be_written(out, given.arrays)
    if given.structure != structure:
        flat = "an array, or a list of arrays"
        raise ValueError(
            f"out is {given.structure or flat}; expected {structure or flat}, as the value is (* is an array)"
        )
    check_writable(given.arrays)
    return given.arrays


def check_writable(arrays: Sequence[Array]) -> None:
    """Raise ValueError if an array of ``out`` is read-only."""
    if not all([getattr(array.flags, "writeable", True) for array in arrays]):  # CuPy's arrays always are
        raise ValueError("out is read-only; expected arrays that can be written")


def check_can_be_written(out: object, arrays: Sequence[Array]) -> None:
    """Raise ValueError if ``out`` holds a number, or one array twice."""
    leaves = out if type(out) is list else nest.flatten(out)
    if {*map(type, leaves)} != _ARRAYS:
        number = next((leaf for leaf in leaves if isinstance(leaf, NUMBERS)), None)
        if number is not None:
            raise ValueError(
                f"out holds the number {number!r}, which cannot be written; expected arrays: make it one in value and "
                "out, numpy.asarray(number)"
            )
    if len({*map(id, arrays)}) != len(arrays):
        raise ValueError("out holds one array twice; expected an array for each result")


def deliver(outs: Sequence[Array], results: list[Array]) -> list[Array]:
    """Copy results into ``outs``. Raises ValueError if they do not fit."""
    for out, result in zip(outs, results, strict=True):
        if out is result:
            continue
        given, expected = signature_of([out]), signature_of([result])
        if given != expected:
            raise ValueError(f"out has {signature_text(given)}; expected {signature_text(expected)}, as the result has")
        out[...] = result
    return list(outs)
