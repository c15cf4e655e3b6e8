"""``cache(filename)``: elements in a file. Each has a line of JSON and the bytes of its arrays. No code is executed."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import IO, Any

import numpy as np

from mpidist.arrays.dtypes import as_dtype
from mpidist.core.files import open_regular, replacing
from mpidist.input.elements import as_element, as_numpy
from mpidist.input.nodes import Form, Pass, PassThrough, Seed, array_samples

_WRITTEN_AT_ONCE = 1 << 20
_FIRST_LINE = b'{"format": "mpidist elements", "version": 1}\n'


@dataclass(eq=False, repr=False)
class CachedFile(PassThrough):
    """Elements in a file that a complete pass writes. Their order is the same for every program.

    Seeds before it that the user did not choose are fixed, because any rank or program may have written the file.
    """

    filename: str  # the beginning of the file's name

    def _set_up(self) -> None:
        self.text = "cache(file)"
        self.form, self.chosen_from, self.read_ahead = Form.ELEMENTS, None, 0

    def path(self) -> str:
        """Return the name of the file, which differs between graphs."""
        samples = ",".join(map(str, array_samples(self.source)))
        return f"{self.filename}.{sha256(f'{self.source} {samples}'.encode()).hexdigest()[:16]}"

    def items(self, run: Pass) -> Iterator[object]:
        """Yield the elements of the file, or write the elements of the input to it."""
        path = self.path()
        if os.path.lexists(path):
            return read_elements(path)
        drawn = dict.fromkeys(seed for seed in self.source.seeds() if not seed.given)
        return self._writing(path, replace(run, key=(0,), seeds={seed: (number,) for number, seed in enumerate(drawn)}))

    def _writing(self, path: str, run: Pass) -> Iterator[object]:
        with ExitStack() as whole:
            # Several ranks may do this at once, with the same result. Not a file object: if it outlived the descriptor,
            # it could flush into another file with the same number.
            descriptor = whole.enter_context(replacing(path))
            count, is_last = 0, False
            buffer = bytearray(_FIRST_LINE)
            for element in map(as_element, self.source.elements(run)):
                encoded = encode(element)
                buffer += encoded
                count += 1
                is_last = count == self.cardinality  # the caller may know that too, and not ask for another one
                if is_last:
                    buffer += _end(count)
                if is_last or len(buffer) >= _WRITTEN_AT_ONCE:
                    buffer = _write(descriptor, buffer)
                if is_last:
                    whole.close()
                yield decode(encoded)
            if not is_last:
                _write(descriptor, buffer + _end(count))

    def seeds(self) -> Iterator[Seed]:
        """Yield no seed, because the order does not depend on the seeds of a program."""
        return iter(())


def _end(count: int) -> bytes:
    return json.dumps({"elements": count}).encode() + b"\n"


def _write(descriptor: int, buffer: bytearray) -> bytearray:
    """Write the buffer, and return an empty one."""
    with memoryview(buffer) as view:
        start = 0
        while start < len(view):
            start += os.write(descriptor, view[start:])
    return bytearray()


def encode(element: object) -> bytes:
    """Return an element as a line of JSON and the bytes of its leaves."""
    leaves: list[object] = []
    payloads: list[bytes] = []
    structure = _described(element, leaves, payloads)
    return json.dumps({"structure": structure, "leaves": leaves}).encode() + b"\n" + b"".join(payloads)


def _described(value: Any, leaves: list[object], payloads: list[bytes]) -> object:
    """Return the structure of a value with numbered leaves. Append the leaves and their bytes to the lists."""
    if type(value) is tuple:
        return ["tuple", [_described(child, leaves, payloads) for child in value]]
    if isinstance(value, Mapping):
        if not all(type(key) in (str, int) for key in value):
            raise TypeError(f"cache(filename) got a dict with the keys {list(value)}; expected text or whole numbers")
        return ["dict", [[key, _described(child, leaves, payloads)] for key, child in value.items()]]
    if isinstance(value, tuple) or hasattr(type(value), "__attrs_attrs__"):
        raise TypeError(
            f"cache(filename) got a {type(value).__name__}. A file keeps tuples and dicts. Convert it with map(...) "
            "before, or keep elements in memory with cache()"
        )
    if isinstance(value, (str, bytes)):
        kind, shape = "text" if isinstance(value, str) else "bytes", ()
        payload = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
    else:
        array = np.asarray(as_numpy(value))
        dtype = array.dtype
        kind = dtype.name if dtype.kind == "V" else dtype.str
        if dtype.hasobject or dtype.names is not None or dtype.itemsize == 0 or as_dtype(kind) != dtype:
            raise TypeError(f"cache(filename) got an array of {dtype}; expected numbers or text, one kind in an array")
        shape, payload = array.shape, array.tobytes()
    leaves.append([kind, shape, len(payload)])
    payloads.append(payload)
    return len(leaves) - 1


def read_elements(path: str) -> Iterator[object]:
    """Yield the elements of a file as new arrays."""
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        try:
            if file.readline() != _FIRST_LINE:
                raise ValueError("its first line is unknown")
            count = 0
            while "elements" not in (head := json.loads(file.readline())):
                yield _read(file, head)
                count += 1
            if head["elements"] != count or file.read(1):
                raise ValueError(f"{count} elements were found, and {head['elements']} have been written")
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise ValueError(
                f"{path} is no complete file of elements, as cache(filename) writes it ({error}). Remove it to write "
                "it again"
            ) from error


def decode(encoded: bytes) -> object:
    """Return the element of :func:`encode`."""
    file = io.BytesIO(encoded)
    return _read(file, json.loads(file.readline()))


def _read(file: IO[bytes], head: dict[str, Any]) -> object:
    leaves: list[object] = []
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
