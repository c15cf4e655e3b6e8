"""Reading: splits a value into arrays and a structure, and builds results with that structure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, ValuesView
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np

from mpidist.arrays.convert import NUMBERS, restorer, to_array
from mpidist.arrays.dtypes import Array
from mpidist.collectives.channel.operation import signature_of, signature_text, which_on_device
from mpidist.core import nest

T = TypeVar("T")

_ARRAYS = {np.ndarray}


class Given(Generic[T]):
    """The arrays of a call.

    Attributes:
        arrays: Arrays in host memory or on a GPU.
        structure: Text that the ranks compare. It is "" for an array, and for a list or tuple of arrays, because only
            their order matters.
        rebuild: Builds a result like the value.
        signature: Shapes and dtypes.
        on_device: Whether each array is on a GPU. Empty if no array is.
    """

    __slots__ = ("arrays", "on_device", "rebuild", "signature", "structure")

    def __init__(
        self,
        arrays: Sequence[Array],
        structure: str = "",
        rebuild: Callable[..., T] = list,  # type: ignore[assignment]
        on_device: tuple[bool, ...] | None = None,
    ) -> None:
        self.arrays, self.structure, self.rebuild, self.signature = arrays, structure, rebuild, signature_of(arrays)
        self.on_device = which_on_device(arrays) if on_device is None else on_device


@lru_cache(maxsize=4096)
def _opens(kind: type) -> bool:
    """Return whether values of a type hold ordered values without being nests."""
    return issubclass(kind, (Mapping, Iterator, ValuesView)) and not issubclass(kind, dict)


def read(value: Any) -> Given[Any]:
    """Return a value's arrays. Other mappings become dicts. Generators and dict views become lists.

    Raises:
        TypeError: A leaf is no array.

    >>> given = read({"b": [np.ones(2), 3.0], "a": (x for x in [1])})
    >>> given.structure
    "{'a': [*], 'b': [*, *]}"
    >>> given.rebuild([2 * array for array in given.arrays])
    {'b': [array([2., 2.]), np.float64(6.0)], 'a': [np.int64(2)]}
    """
    kind: Any = type(value)
    if kind is np.ndarray:
        return Given([value], "", _only, ())
    if _opens(kind):
        return read(_opened(value))
    leaves: list[Any] = list(value) if kind is list or kind is tuple else [value]
    samples: dict[Any, Any] = {type(leaf): leaf for leaf in leaves}
    if samples.keys() <= _ARRAYS:
        # Fast case for most lists: no call for each array.
        return Given(leaves, "", kind, ())
    if any([nest.is_nest(sample) or _opens(of) for of, sample in samples.items()]):
        return _read_nest(value)
    arrays = _to_arrays(value, leaves)
    if leaves[0] is value:
        return Given(arrays, "", lambda results: restore(value, results[0]))
    return Given(arrays, "", lambda results: kind(_restored(leaves, results)))


def _read_nest(value: object) -> Given[Any]:
    leaves = nest.flatten(value)
    if any(map(_opens, {*map(type, leaves)})):
        value = nest.map_structure(_opened, value)
        leaves = nest.flatten(value)
    arrays = _to_arrays(value, leaves)
    return Given(arrays, nest.describe(value), lambda results: nest.pack_like(value, _restored(leaves, results)))


def _opened(leaf: Any) -> Any:
    kind: Any = type(leaf)
    if not _opens(kind):
        return leaf
    return nest.map_structure(_opened, dict(leaf) if isinstance(leaf, Mapping) else list(leaf))


def _only(results: list[Array]) -> Array:
    return results[0]


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


# Arrays for results ---------------------------------------------------------------------------------------------------


def read_out(out: Any, structure: str) -> list[Array]:
    """Return the arrays of ``out``.

    Raises:
        ValueError: It has another structure than the value, is read-only, or holds a number or one array twice.
        TypeError: A leaf is no array.
    """
    arrays, given = [out], ""
    if type(out) is not np.ndarray:
        read_in = read(out)
        arrays, given = list(read_in.arrays), read_in.structure
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
