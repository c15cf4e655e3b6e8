"""Sources of datasets: streams, files, names of files, and the objects of ``Dataset.from_source``."""

from __future__ import annotations

import glob
import gzip
import io
import os
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from mpidist.input.arrow import arrow_rows, is_arrow
from mpidist.input.elements import ArraySpec, conform, flatten_spec, map_leaves, owned, spec_of
from mpidist.input.nodes import UNKNOWN, ArrayRows, Form, GraphNode, Pass, SequenceRows, is_stored_array
from mpidist.input.torch_loader import is_loader, loader_node

Pattern: TypeAlias = "str | os.PathLike[str]"
FilePath: TypeAlias = "Pattern | bytes"


class StreamSource(GraphNode):
    """The elements of the iterator that ``make_iterable`` returns in each pass."""

    def __init__(
        self, make_iterable: Callable[[], Iterable[object]], text: str, signature: object, cardinality: int = UNKNOWN
    ) -> None:
        super().__init__(())
        self.text, self.cardinality = text, cardinality
        self.make_iterable = make_iterable
        self.signature = signature
        self.dynamic = signature is None or any(None in leaf.shape for leaf in flatten_spec(signature))
        self._opened_last: Callable[[], object] | None = None

    def items(self, run: Pass) -> Iterator[object]:
        """Yield copies of the elements, because user code may modify its arrays later."""
        elements = self._open()
        if self.signature is None:
            return map(owned, elements)
        return (conform(element, self.signature) for element in elements)

    def spec(self) -> object:
        """Return the signature, or the spec of the first element of a new iterator."""
        return next(map(spec_of, self._open()), None) if self.signature is None else self.signature

    def _open(self) -> Iterator[object]:
        elements = iter(self.make_iterable())
        is_same = self._opened_last is not None and elements is self._opened_last()
        try:
            # A weak reference, so that a generator is closed with its pass, and its files with it.
            self._opened_last = weakref.ref(elements)
        except TypeError:  # iterators of lists, zip and others have no weak references
            self._opened_last = lambda: elements
        # The same object is correct if it starts again or has more elements.
        return self._remaining(elements) if is_same else elements

    def _remaining(self, elements: Iterator[object]) -> Iterator[object]:
        is_empty = True
        for element in elements:
            is_empty = False
            yield element
        if is_empty:
            raise ValueError(
                f"{self.text} was given the same {type(elements).__name__} object as before, with nothing left in it, "
                "so this pass would have no elements. Pass a function that returns a new iterator: "
                "from_generator(read), where read is the generator function, not called, or "
                "from_generator(lambda: read(path))"
            )

    def __getstate__(self) -> dict[str, object]:
        # Iterators cannot be pickled.
        return {**self.__dict__, "_opened_last": None}


def files_text(paths: Sequence[FilePath], without_folder: bool = False) -> str:
    """Return a short text of the files and their order, maybe without the common folder."""
    names = [os.fsdecode(path) for path in paths]
    if without_folder:
        folders = {os.path.dirname(name) for name in names}
        common = os.path.commonpath(folders) if len({os.path.isabs(name) for name in names}) == 1 else ""
        names = [os.path.relpath(name, common) if common else name for name in names]
    checksum = f"{zlib.crc32(chr(0).join(names).encode(errors='surrogateescape')):08x}"
    return repr(names[0]) + (f" and {len(names) - 1} more [{checksum}]" if len(names) > 1 else "")


class Files(GraphNode):
    """The elements that a function reads from files, file after file."""

    def __init__(self, paths: Sequence[FilePath], reader: Callable[..., Iterable[object]]) -> None:
        super().__init__(())
        self.text = f"from_files({files_text(paths)}, {getattr(reader, '__name__', type(reader).__name__)})"
        self.identity = f"from_files({files_text(paths, without_folder=True)})"
        self.paths = tuple(paths)
        self.reader = reader
        self.dynamic = True

    def items(self, run: Pass) -> Iterator[object]:
        """Yield copies of the elements of each file."""
        return map(owned, self._elements())

    def spec(self) -> object:
        """Return the spec of the first element."""
        return next(map(spec_of, self._elements()), None)

    def _elements(self) -> Iterator[object]:
        for path in self.paths:
            elements: object = self.reader(path)
            if not isinstance(elements, Iterable):
                raise TypeError(
                    f"reader({path!r}) returned {elements!r} of type {type(elements).__name__}; expected the elements "
                    "of the file as an iterable: a list, an array, or a reader that yields them"
                )
            yield from elements


class FileNames(GraphNode):
    """Paths of files, as rows. The steps after it read the files."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__(())
        self.text, self.cardinality = f"list_files({files_text(paths)})", len(paths)
        self.form, self.chosen_from = Form.ROWS, SequenceRows(paths)
        self.identity = f"list_files({files_text(paths, without_folder=True)})"
        self.paths = paths

    def items(self, run: Pass) -> Iterator[object]:
        """Yield all row numbers."""
        return iter((range(len(self.paths)),))


def files_of(node: GraphNode) -> Iterator[str]:
    """Yield the paths of the files that a graph reads."""
    sources = (step for step in node.graph() if isinstance(step, (Files, FileNames)))
    return (os.fsdecode(path) for step in sources for path in step.paths)


def node_of(source: Any, columns: Sequence[str] | None = None) -> GraphNode:
    """Return the source node of an object, by the rules of ``Dataset.from_source``."""
    kind = type(source).__name__
    if is_arrow(source):
        rows = arrow_rows(source, columns)
        return rows if isinstance(rows, GraphNode) else StreamSource(rows, f"from_source({kind})", None)
    if columns is not None:
        raise TypeError(f"from_source() got columns={columns!r} and a {kind}; only sources of pyarrow have columns")
    if is_loader(source):
        return loader_node(source)
    if isinstance(source, Mapping):
        raise TypeError(f"from_source() got a {kind}. Use Dataset.from_tensor_slices(...) for a dict of arrays")
    if isinstance(source, (str, bytes)) or hasattr(source, "iloc"):
        raise TypeError(
            f"from_source() got a {kind}; expected a sequence, an iterable or an array. Pass a table of columns "
            "as Dataset.from_tensor_slices({name: array, ...})"
        )
    if isinstance(source, np.ndarray) or is_stored_array(source) or hasattr(source, "__array__"):
        return ArrayRows.of_slices(source)
    # Iterable datasets of PyTorch and Hugging Face inherit a __getitem__ that only raises.
    is_stream = any(base.__name__ == "IterableDataset" for base in type(source).__mro__)
    if not is_stream and hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        return SequenceRows(source)
    if isinstance(source, Iterator):
        raise TypeError(
            f"from_source() got an iterator ({kind}), which can be read only once. Pass the object that it "
            "came from, or use Dataset.from_generator(function) with a function that returns a new iterator"
        )
    if hasattr(source, "__iter__"):
        return StreamSource(lambda: source, f"from_source({kind})", None)
    raise TypeError(
        f"from_source() got {source!r} of type {kind}; expected an array, an object with __len__ and "
        "__getitem__, or an object with __iter__"
    )


def line_reader(compression_type: str | None) -> Callable[[FilePath], Iterator[str]]:
    """Return a function that yields the lines of a text file. As in TensorFlow, only line feeds end a line."""
    openers: dict[str, Callable[[Path], io.BufferedIOBase]] = {
        "": lambda path: path.open("rb"),
        "GZIP": gzip.GzipFile,
        "ZLIB": lambda path: io.BytesIO(zlib.decompress(path.read_bytes())),
    }
    if (compression_type or "") not in openers:
        raise ValueError(f"compression_type is {compression_type!r}. Use None, 'GZIP' or 'ZLIB'")
    open_bytes = openers[compression_type or ""]

    def read_lines(path: FilePath) -> Iterator[str]:
        name, number = os.fsdecode(path), 0
        try:
            with open_bytes(Path(name)) as file:
                for number, line in enumerate(file, 1):  # noqa: B007 - for the error
                    yield line.removesuffix(b"\n").removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"line {number} of {name} is not UTF-8 ({error.reason}). Use Dataset.from_files(paths, reader) with a "
                "reader that decodes it"
            ) from error
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{name} is not a file of compression_type {compression_type!r}: {error}") from error

    return read_lines


def generator_node(
    generator: Callable[..., Iterable[object]], signature: object, args: tuple[object, ...]
) -> GraphNode:
    """Return the source node of a function that returns an iterable."""
    if not callable(generator):
        raise TypeError(
            f"generator is {generator!r}; expected a function that returns an iterator. Write "
            "from_generator(my_generator), without calling it"
        )
    name = getattr(generator, "__name__", type(generator).__name__)
    return StreamSource(partial(generator, *args), f"from_generator({name})", signature)


def files_node(paths: object, reader: Callable[..., Iterable[object]]) -> GraphNode:
    """Return the source node of files and their reader."""
    if isinstance(paths, (str, bytes, os.PathLike)) or not isinstance(paths, Iterable):
        raise TypeError(f"paths is {paths!r}; expected several paths: from_files([path], reader)")
    if not callable(reader):
        raise TypeError(
            f"reader is {reader!r} of type {type(reader).__name__}; expected a function that takes a path and returns "
            "the elements of that file"
        )
    known: list[FilePath] = []
    for path in paths:
        if not isinstance(path, (str, bytes, os.PathLike)):
            raise TypeError(f"paths has {path!r} of type {type(path).__name__} in it; expected str or os.PathLike")
        known.append(path)
    if not known:
        raise ValueError("from_files() got no paths; expected at least one. Check the pattern that found no file")
    return Files(known, reader)


def names_node(file_pattern: object) -> FileNames:
    """Return the node of the files that match one or several patterns."""
    patterns: Iterable[object] = [file_pattern]
    if isinstance(file_pattern, Iterable) and not isinstance(file_pattern, (str, bytes, os.PathLike)):
        patterns = file_pattern
    found: set[str] = set()
    for pattern in patterns:
        if not isinstance(pattern, (str, os.PathLike)):
            raise TypeError(
                f"file_pattern has {pattern!r} of type {type(pattern).__name__} in it; expected a pattern such as "
                "'data/part-*.npy', or a list of patterns"
            )
        found.update(glob.glob(os.fspath(pattern), recursive=True))
    if not found:
        raise ValueError(
            f"list_files() found no file that matches {file_pattern!r}, seen from {os.getcwd()}; expected at least one"
        )
    return FileNames(sorted(found))


def signature_of(output_types: object, output_shapes: object, output_signature: object) -> object:
    """Return the nest of ArraySpec of either form of a signature, or None."""
    if output_types is None and output_shapes is None:
        return None if output_signature is None else map_leaves(_signature_leaf, output_signature, ArraySpec)
    if output_types is None or output_shapes is None or output_signature is not None:
        raise TypeError(
            f"from_generator() got output_types={output_types!r}, output_shapes={output_shapes!r} and "
            f"output_signature={output_signature!r}; expected types and shapes, or output_signature=ArraySpec(shape, "
            "dtype) for each array, or nothing"
        )
    try:
        return _spec_of_types(output_types, output_shapes)
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(
            f"output_types is {output_types!r} and output_shapes {output_shapes!r}; expected for each array a dtype, "
            "such as 'float32', and a shape, such as [None, 3]"
        ) from error


def _spec_of_types(types: Any, shapes: Any) -> object:
    # Only the types show where the leaves are: a shape is itself a tuple or list.
    if isinstance(types, Mapping):
        return {key: _spec_of_types(kind, shapes[key]) for key, kind in types.items()}
    if isinstance(types, tuple):
        return tuple(_spec_of_types(kind, shape) for kind, shape in zip(types, shapes, strict=True))
    return ArraySpec(tuple(shapes), np.dtype(types))


def _signature_leaf(leaf: object) -> ArraySpec:
    if not isinstance(leaf, ArraySpec):
        raise TypeError(f"output_signature holds {leaf!r}; expected ArraySpec(shape, dtype) for each array")
    return ArraySpec(tuple(leaf.shape), np.dtype(leaf.dtype), leaf.name)
