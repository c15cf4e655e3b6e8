"""Elements in a file: a line of JSON for each one, and the bytes of its arrays; nothing in it is ever carried out."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np

from mpidist.arrays.dtypes import as_dtype
from mpidist.core.files import open_regular
from mpidist.input.elements import as_element, as_numpy, map_leaves

_WRITTEN_AT_ONCE = 1 << 20
_FIRST_LINE = b'{"format": "mpidist elements", "version": 1}\n'


def storable(element: Any) -> Any:
    """Return ``element`` as it comes out of a file: its numbers and arrays NumPy's, texts and bytes as they are.

    Raises:
        TypeError: Something in it is neither, or it has other structure than tuples and dicts with texts or whole
            numbers as keys.

    >>> storable((1, "a", [1.0]))
    (np.int64(1), 'a', array([1.]))
    """
    element = as_element(element)
    _check_structure(element)
    return map_leaves(_storable_leaf, element)


def _check_structure(value: Any) -> None:
    if type(value) is tuple:
        for child in value:
            _check_structure(child)
    elif isinstance(value, Mapping):
        if not all(type(key) in (str, int) for key in value):
            raise TypeError(f"cache(filename) got a dict with the keys {list(value)}; expected texts or whole numbers")
        for child in value.values():
            _check_structure(child)
    elif isinstance(value, tuple) or hasattr(type(value), "__attrs_attrs__"):
        raise TypeError(
            f"cache(filename) got a {type(value).__name__}; a file keeps tuples and dicts: make it one by map(...) "
            "before, or keep elements in memory, by cache()"
        )


def _storable_leaf(leaf: Any) -> Any:
    if isinstance(leaf, (str, bytes)):
        return str(leaf) if isinstance(leaf, str) else bytes(leaf)
    array = np.asarray(as_numpy(leaf))
    if _named(array.dtype) != array.dtype:
        raise TypeError(f"cache(filename) got an array of {array.dtype}; expected numbers or texts, one kind an array")
    return array[()]


def _name(dtype: np.dtype[Any]) -> str:
    return str(dtype.name if dtype.kind == "V" else dtype.str)


def _named(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Return the dtype that the name of ``dtype`` gives in a file; None for Python objects and structures."""
    if dtype.hasobject or dtype.names is not None or dtype.itemsize == 0:
        return None
    return as_dtype(_name(dtype))


class ElementWriter:
    """Writes elements, as :func:`storable` returns them.

    Args:
        descriptor: Of a new file.

    Attributes:
        count: How many have been written.
        is_finished: Whether the end has been written.
    """

    def __init__(self, descriptor: int) -> None:
        # No file object: one that outlives the descriptor writes what it holds into the file that has its number then.
        self._descriptor = descriptor
        self._held = bytearray(_FIRST_LINE)
        self.count = 0
        self.is_finished = False

    def add(self, element: Any) -> None:
        """Write an element."""
        leaves: list[Any] = []
        payloads: list[bytes] = []
        structure = _described(element, leaves, payloads)
        head = {"structure": structure, "leaves": leaves}
        self._held += json.dumps(head).encode() + b"\n"
        self._held += b"".join(payloads)
        if len(self._held) >= _WRITTEN_AT_ONCE:
            self._write_held()
        self.count += 1

    def finish(self) -> None:
        """Write the end, without which a file is not whole."""
        self._held += json.dumps({"elements": self.count}).encode() + b"\n"
        self._write_held()
        self.is_finished = True

    def _write_held(self) -> None:
        with memoryview(self._held) as held:
            start = 0
            while start < len(held):
                start += os.write(self._descriptor, held[start:])
        self._held = bytearray()


def _described(value: Any, leaves: list[Any], payloads: list[bytes]) -> Any:
    """Return the structure of ``value``, its leaves as their numbers, and add these to both lists."""
    if isinstance(value, tuple):
        return ["tuple", [_described(child, leaves, payloads) for child in value]]
    if isinstance(value, dict):
        return ["dict", [[key, _described(child, leaves, payloads)] for key, child in value.items()]]
    if isinstance(value, (str, bytes)):
        payload = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        leaves.append(["text" if isinstance(value, str) else "bytes", [], len(payload)])
    else:
        array = np.asarray(value)
        payload = array.tobytes()
        leaves.append([_name(array.dtype), array.shape, len(payload)])
    payloads.append(payload)
    return len(leaves) - 1


def read_elements(path: str) -> Iterator[Any]:
    """Yield the elements of a file as new arrays.

    Raises:
        ValueError: It is not such a file, or damaged.
    """
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        try:
            if file.readline() != _FIRST_LINE:
                raise ValueError("it does not begin as one")
            count = 0
            while True:
                head = json.loads(file.readline())
                if "elements" in head:
                    break
                yield _read(file, head)
                count += 1
            if head["elements"] != count or file.read(1):
                raise ValueError(f"{count} elements were found, and {head['elements']} have been written")
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise ValueError(
                f"{path} is no whole file of elements, as cache(filename) writes it ({error}); remove it, and it is "
                "written again"
            ) from error


def _read(file: BinaryIO, head: Any) -> Any:
    leaves = []
    for kind, shape, size in head["leaves"]:
        payload = file.read(size)
        if len(payload) != size:
            raise ValueError("it ends in the middle of an element")
        if kind in ("text", "bytes"):
            leaves.append(payload.decode("utf-8", "surrogatepass") if kind == "text" else payload)
        else:
            leaves.append(np.frombuffer(bytearray(payload), as_dtype(kind)).reshape(shape)[()])
    return _rebuilt(head["structure"], leaves)


def _rebuilt(structure: Any, leaves: list[Any]) -> Any:
    if isinstance(structure, int):
        return leaves[structure]
    kind, children = structure
    if kind == "tuple":
        return tuple(_rebuilt(child, leaves) for child in children)
    return {key: _rebuilt(child, leaves) for key, child in children}
