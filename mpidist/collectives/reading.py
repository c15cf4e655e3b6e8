"""Reading: splits a value into arrays and a structure, and builds results with that structure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, ValuesView
from typing import Any

import numpy as np

from mpidist.arrays.convert import NUMBERS, restorer, to_array
from mpidist.arrays.dtypes import Array
from mpidist.collectives.channel.operation import signature_of, signature_text
from mpidist.core import nest

# Builds a result like the value that was read from the arrays of a collective.
Rebuild = Callable[[list[Array]], Any]

_ARRAYS = {np.ndarray}


class _Opens(dict[type, bool]):
    """Cache: whether values of a type hold ordered values without being nests."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = opens = issubclass(kind, (Mapping, Iterator, ValuesView)) and not issubclass(kind, dict)
        return opens


_opens = _Opens()


def read(value: object) -> tuple[list[Array], str, Rebuild]:
    """Return a value's arrays, its structure, and a function that builds results like it.

    Other mappings become dicts. Generators and dict views become lists. The ranks compare structures. The structure of
    an array, and of a list or tuple of arrays, is "", because only their order matters.

    Raises:
        TypeError: A leaf is no array.

    >>> arrays, structure, rebuild = read({"b": [np.ones(2), 3.0], "a": (x for x in [1])})
    >>> structure
    "{'a': [*], 'b': [*, *]}"
    >>> rebuild([2 * array for array in arrays])
    {'b': [array([2., 2.]), np.float64(6.0)], 'a': [np.int64(2)]}
    """
    if type(value) is np.ndarray:
        return [value], "", _only
    if type(value) is list or type(value) is tuple:
        kind = type(value)
        samples = {type(leaf): leaf for leaf in value}
        if samples.keys() <= _ARRAYS:
            # Fast case for most lists: no call for each array.
            return list(value), "", kind
        if not any(nest.is_nest(sample) or _opens[of] for of, sample in samples.items()):
            return _to_arrays(value, value), "", lambda results: kind(_restored(value, results))
        return _read_nest(value)
    if nest.is_nest(value):
        return _read_nest(value)
    if _opens[type(value)]:
        return read(_opened(value))
    make = restorer(value)
    return [to_array(value)], "", _only if make is None else lambda results: make(results[0])


def read_out(out: object, structure: str) -> list[Array]:
    """Return the arrays of ``out``.

    Raises:
        ValueError: It has another structure than the value, is read-only, or holds a number or one array twice.
        TypeError: A leaf is no array.
    """
    arrays, given, _ = read(out)
    if type(out) is not np.ndarray:
        check_can_be_written(out, arrays)
    if given != structure:
        flat = "an array, or a list of arrays"
        raise ValueError(f"out is {given or flat}; expected {structure or flat}, as the value is (* is an array)")
    check_writable(arrays)
    return arrays


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


def _read_nest(value: object) -> tuple[list[Array], str, Rebuild]:
    leaves = nest.flatten(value)
    if any(_opens[kind] for kind in {*map(type, leaves)}):
        value = nest.map_structure(_opened, value)
        leaves = nest.flatten(value)
    arrays = _to_arrays(value, leaves)
    return arrays, nest.describe(value), lambda results: nest.pack_like(value, _restored(leaves, results))


def _to_arrays(value: object, leaves: Sequence[object]) -> list[Array]:
    try:
        return [to_array(leaf) for leaf in leaves]
    except TypeError:
        # Try again, for an error that names the place.
        return [to_array(leaf, f"value{path}") for path, leaf in nest.flatten_with_path(value)]


def _restored(leaves: Sequence[object], results: list[Array]) -> list[object]:
    return [restore(leaf, result) for leaf, result in zip(leaves, results, strict=True)]


def restore(value: object, result: Array) -> Any:
    """Return a result as the same kind of array or number as ``value``."""
    make = restorer(value)
    return result if make is None else make(result)


def delivering(outs: Sequence[Array] | None) -> Callable[[list[Array]], list[Array]]:
    """Return a function that copies results into ``outs``. It raises ValueError if they do not fit."""

    def deliver(results: list[Array]) -> list[Array]:
        if outs is None:
            return results
        for out, result in zip(outs, results, strict=True):
            if out is result:
                continue
            given, expected = signature_of([out]), signature_of([result])
            if given != expected:
                raise ValueError(
                    f"out has {signature_text(given)}; expected {signature_text(expected)}, as the result has"
                )
            out[...] = result
        return list(outs)

    return deliver


def _opened(leaf: Any) -> Any:
    if not _opens[type(leaf)]:
        return leaf
    return nest.map_structure(_opened, dict(leaf) if isinstance(leaf, Mapping) else list(leaf))


def _only(results: list[Array]) -> Array:
    return results[0]
