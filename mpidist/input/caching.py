"""Elements that are kept in memory or in a file for all later passes.

They do not depend on the pass that computes them: the source is always gone through as in its first pass of all. So a
pass that goes on elsewhere, with nothing kept yet, gets the same elements, and so does every rank.

A file has a line of JSON for each element, and the bytes of its arrays; nothing in it is ever carried out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, BinaryIO

import numpy as np

from mpidist.arrays.dtypes import DType, as_dtype
from mpidist.core.files import open_regular, replacing
from mpidist.input.elements import as_element, as_numpy, owned
from mpidist.input.graph import Form, Pass, PassThrough, Seed, array_samples

_WRITTEN_AT_ONCE = 1 << 20
_FIRST_LINE = b'{"format": "mpidist elements", "version": 1}\n'


@dataclass(eq=False, repr=False)
class Cached(PassThrough):
    """Elements in the order of the first pass, kept in memory.

    Of rows and batches of rows each row is read once. Other elements are kept when one pass over the input has come to
    its end, and computed again until then.
    """

    # The seeds of all steps before, and the elements that come of them.
    kept: tuple[list[tuple[int, ...]], list[object]] | None = field(init=False, default=None)

    def _set_up(self) -> None:
        self.text = "cache()"
        self.table = None if self.table is None else self.table.cached()

    def items(self, run: Pass) -> Iterator[object]:
        """Yield the items of the first pass."""
        if self.form is not Form.ELEMENTS:
            return self.source.items(run.first())
        seeds = [seed.entropy(run) for seed in self.source.seeds()]
        if self.kept is not None and self.kept[0] == seeds:
            return map(owned, self.kept[1])
        return self._keeping(run, seeds)

    def _keeping(self, run: Pass, seeds: list[tuple[int, ...]]) -> Iterator[object]:
        kept: list[object] = []
        for element in self.source.elements(run.first()):
            kept.append(owned(element))
            if len(kept) == self.cardinality:  # whoever knows that does not ask for one more
                self.kept = (seeds, kept)
            yield element
        self.kept = (seeds, kept)

    def __getstate__(self) -> dict[str, object]:
        # Datasets travel to workers, which keep the elements that they read themselves.
        return {**self.__dict__, "kept": None}


@dataclass(eq=False, repr=False)
class CachedFile(PassThrough):
    """Elements in one order for every program, kept in a file.

    The file is written when a pass has come to its end. Shuffles before it that were given no seed have a fixed one, so
    that the file is right whoever has written it: any rank, any program.

    Args:
        filename: The beginning of the file's name; the rest tells graphs apart.
    """

    filename: str

    def _set_up(self) -> None:
        self.text = "cache(file)"
        self.form, self.table, self.read_ahead = Form.ELEMENTS, None, 0

    def path(self) -> str:
        """Return the name of the file."""
        samples = ",".join(map(str, array_samples(self.source)))
        return f"{self.filename}.{sha256(f'{self.source} {samples}'.encode()).hexdigest()[:16]}"

    def items(self, run: Pass) -> Iterator[object]:
        """Yield the elements of the file.

        While the file is being written, yield those of the input.
        """
        path = self.path()
        if os.path.lexists(path):
            return read_elements(path)
        drawn = dict.fromkeys(seed for seed in self.source.seeds() if not seed.given)
        seeds = {seed: (number,) for number, seed in enumerate(drawn)}
        return self._keeping(path, replace(run.first(), seeds=seeds))

    def _keeping(self, path: str, run: Pass) -> Iterator[object]:
        with ExitStack() as whole:
            # Several ranks may do this at once, with the same result.
            writer = ElementWriter(whole.enter_context(replacing(path)))
            for element in map(storable, self.source.elements(run)):
                writer.add(element)
                if writer.count == self.cardinality:  # whoever knows that does not ask for one more
                    writer.finish()
                    whole.close()
                yield element
            if not writer.is_finished:
                writer.finish()

    def seeds(self) -> Iterator[Seed]:
        """Yield no seed: the order does not depend on the seeds of a program."""
        return iter(())


def storable(element: object) -> object:
    """Return ``element`` in the form in which a file keeps it.

    Numbers and arrays are NumPy's; texts and bytes stay as they are.

    Raises:
        TypeError: Something in it is neither, or it has other structure than tuples and dicts with texts or whole
            numbers as keys.

    >>> storable((1, "a", [1.0]))
    (np.int64(1), 'a', array([1.]))
    """
    return _storable(as_element(element))


def _storable(value: object) -> object:
    if type(value) is tuple:
        return tuple(map(_storable, value))
    if isinstance(value, Mapping):
        if not all(type(key) in (str, int) for key in value):
            raise TypeError(f"cache(filename) got a dict with the keys {list(value)}; expected texts or whole numbers")
        return {key: _storable(child) for key, child in value.items()}
    if isinstance(value, tuple) or hasattr(type(value), "__attrs_attrs__"):
        raise TypeError(
            f"cache(filename) got a {type(value).__name__}; a file keeps tuples and dicts: make it one by map(...) "
            "before, or keep elements in memory, by cache()"
        )
    if isinstance(value, (str, bytes)):
        return str(value) if isinstance(value, str) else bytes(value)
    array = np.asarray(as_numpy(value))
    if _named(array.dtype) != array.dtype:
        raise TypeError(f"cache(filename) got an array of {array.dtype}; expected numbers or texts, one kind an array")
    return array[()]


def _name(dtype: DType) -> str:
    return str(dtype.name if dtype.kind == "V" else dtype.str)


def _named(dtype: DType) -> DType | None:
    """Return the dtype that a file reads from the name of ``dtype``, or None.

    None for Python objects and structures.
    """
    if dtype.hasobject or dtype.names is not None or dtype.itemsize == 0:
        return None
    return as_dtype(_name(dtype))


class ElementWriter:
    """Writer of elements that :func:`storable` returned.

    Args:
        descriptor: The descriptor of a new file.

    Attributes:
        count: The number of elements written.
        is_finished: Whether the end has been written.
    """

    def __init__(self, descriptor: int) -> None:
        # No file object: one that outlives the descriptor writes its buffer into the file that has its number then.
        self._descriptor = descriptor
        self._held = bytearray(_FIRST_LINE)
        self.count = 0
        self.is_finished = False

    def add(self, element: object) -> None:
        """Write an element."""
        leaves: list[object] = []
        payloads: list[bytes] = []
        structure = _described(element, leaves, payloads)
        head = {"structure": structure, "leaves": leaves}
        self._held += json.dumps(head).encode() + b"\n"
        self._held += b"".join(payloads)
        if len(self._held) >= _WRITTEN_AT_ONCE:
            self._write_held()
        self.count += 1

    def finish(self) -> None:
        """Write the end marker, without which a file is incomplete."""
        self._held += json.dumps({"elements": self.count}).encode() + b"\n"
        self._write_held()
        self.is_finished = True

    def _write_held(self) -> None:
        with memoryview(self._held) as held:
            start = 0
            while start < len(held):
                start += os.write(self._descriptor, held[start:])
        self._held = bytearray()


def _described(value: object, leaves: list[object], payloads: list[bytes]) -> object:
    """Return the structure of ``value`` with its leaves numbered.

    The leaves and their bytes are appended to the two lists.
    """
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


def read_elements(path: str) -> Iterator[object]:
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


def _read(file: BinaryIO, head: dict[str, Any]) -> object:
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


def _rebuilt(structure: Any, leaves: Sequence[object]) -> object:
    if isinstance(structure, int):
        return leaves[structure]
    kind, children = structure
    if kind == "tuple":
        return tuple(_rebuilt(child, leaves) for child in children)
    return {key: _rebuilt(child, leaves) for key, child in children}
