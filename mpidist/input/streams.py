"""Nodes whose elements come one after the other out of iterators of the user's: generators, iterables, files.

What these iterators yield is copied at once, since they may go on to write into it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from zlib import crc32

from mpidist.input.element_spec import conform, flatten_spec, spec_of
from mpidist.input.elements import owned
from mpidist.input.pipeline import Items
from mpidist.input.reordering import UNKNOWN, Pass


class Stream(Items):
    """The elements of whatever iterator a function returns; how many there are is not known.

    Args:
        make_iterable: Called once a pass.
        text: What it is.
        signature: The nest of ArraySpec that each element has, or None.
        cardinality: Number of elements, -1 without end, -2 unknown.
    """

    def __init__(
        self,
        make_iterable: Callable[[], Iterable[Any]],
        text: str,
        signature: Any,
        cardinality: int = UNKNOWN,
    ) -> None:
        super().__init__((), cardinality, text)
        self.make_iterable = make_iterable
        self.signature = signature
        self.dynamic = signature is None or any(None in leaf.shape for leaf in flatten_spec(signature))
        self._opened_last: Callable[[], Any] = _nothing

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield copies of the elements of a new iterator."""
        elements = self._open()
        if self.signature is None:
            return map(owned, elements)
        return (conform(element, self.signature) for element in elements)

    def spec(self) -> Any:
        """Return the signature, or that of the first element of a new iterator."""
        if self.signature is not None:
            return self.signature
        for element in self._open():
            return spec_of(element)
        return None

    def _open(self) -> Iterator[Any]:
        elements = iter(self.make_iterable())
        again = elements is self._opened_last()
        try:
            # Weakly, so that a generator is closed with its pass, with the files that it has open.
            self._opened_last = weakref.ref(elements)
        except TypeError:  # lists' iterators, zip and the like, of which there are no weak references
            self._opened_last = lambda: elements
        # The same object is no fault by itself: it may begin again with each iter(), or have more to give.
        return self._what_is_left(elements) if again else elements

    def _what_is_left(self, elements: Iterator[Any]) -> Iterator[Any]:
        nothing = True
        for element in elements:
            nothing = False
            yield element
        if nothing:
            raise ValueError(
                f"{self.text} was given the same {type(elements).__name__} object as before, with nothing left in it, "
                "so this pass would have no elements; expected a new iterator for each pass: from_generator(read), "
                "where read is the generator function, not called, or from_generator(lambda: read(path))"
            )

    def __getstate__(self) -> dict[str, Any]:
        # Datasets travel to workers; iterators cannot.
        return {**self.__dict__, "_opened_last": _nothing}


def _nothing() -> None:
    """Stand for the iterator before the first one."""


def files_text(paths: Sequence[Any], without_folder: bool = False) -> str:
    """Return a short text for files, at least one, which differs where the files or their order do.

    Args:
        paths: Of the files.
        without_folder: Leave out the folder that they have in common.
    """
    names = [os.fsdecode(path) for path in paths]
    if without_folder:
        folders = {os.path.dirname(name) for name in names}
        common = os.path.commonpath(folders) if len({os.path.isabs(name) for name in names}) == 1 else ""
        names = [os.path.relpath(name, common) if common else name for name in names]
    checksum = f"{crc32(chr(0).join(names).encode(errors='surrogateescape')):08x}"
    return repr(names[0]) + (f" and {len(names) - 1} more [{checksum}]" if len(names) > 1 else "")


class Files(Items):
    """The elements that a function reads from files, file after file.

    Args:
        paths: Of the files, at least one.
        reader: Returns the elements of the file at a path.
    """

    def __init__(self, paths: Sequence[Any], reader: Callable[[Any], Iterable[Any]]) -> None:
        name = getattr(reader, "__name__", type(reader).__name__)
        super().__init__((), UNKNOWN, f"from_files({files_text(paths)}, {name})")
        self.identity = f"from_files({files_text(paths, without_folder=True)})"
        self.paths = tuple(paths)
        self.reader = reader
        self.dynamic = True

    def files(self) -> Iterator[str]:
        """Yield the paths."""
        return map(os.fsdecode, self.paths)

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield copies of the elements of each file."""
        for path in self.paths:
            yield from map(owned, self._read(path))

    def spec(self) -> Any:
        """Return that of the first element that there is."""
        for path in self.paths:
            for element in self._read(path):
                return spec_of(element)
        return None

    def part(self, num_parts: int, index: int) -> Files:
        """Return the node that reads every ``num_parts``-th file, beginning with file ``index``."""
        return Files(self.paths[index::num_parts], self.reader)

    def _read(self, path: Any) -> Iterator[Any]:
        elements = self.reader(path)
        if not isinstance(elements, Iterable):
            raise TypeError(
                f"reader({path!r}) returned {elements!r} of type {type(elements).__name__}; expected the elements of "
                "the file as an iterable: a list, an array, or a reader that yields them"
            )
        return iter(elements)
