"""Recognising what users have their data in: arrays, map-style datasets, iterables, generators."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpidist.input.arrow_tables import arrow_node, is_arrow
from mpidist.input.element_spec import ArraySpec
from mpidist.input.elements import map_leaves
from mpidist.input.pipeline import Node
from mpidist.input.row_steps import TableRows
from mpidist.input.stored_arrays import is_stored_array
from mpidist.input.streams import Files, Stream
from mpidist.input.tables import SequenceTable, array_table


def node_of(source: Any, columns: Sequence[str] | None = None) -> Node:
    """Return the source node for ``source``, whatever it is; the rules are those of ``Dataset.from_source``.

    Raises:
        TypeError: Nothing that can be read again in each pass.
    """
    kind = type(source).__name__
    if is_arrow(source):
        return arrow_node(source, columns)
    if columns is not None:
        raise TypeError(f"from_source() got columns={columns!r} and a {kind}; only sources of pyarrow have columns")
    if isinstance(source, Mapping):
        raise TypeError(
            f"from_source() got a {kind}; a dict of arrays is cut into elements by Dataset.from_tensor_slices(...)"
        )
    if isinstance(source, (str, bytes)) or hasattr(source, "iloc"):
        raise TypeError(
            f"from_source() got a {kind}; expected a sequence, an iterable or an array; a table of columns "
            "is given as Dataset.from_tensor_slices({name: array, ...})"
        )
    if isinstance(source, np.ndarray) or is_stored_array(source) or hasattr(source, "__array__"):
        return TableRows(array_table(source))
    # PyTorch's and Hugging Face's iterable datasets inherit a __getitem__ that only raises.
    streams_only = any(base.__name__ == "IterableDataset" for base in type(source).__mro__)
    if not streams_only and hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        return TableRows(SequenceTable(source))
    if isinstance(source, Iterator):
        raise TypeError(
            f"from_source() got an iterator ({kind}), which can be read only once; give the object that it "
            "came from, or Dataset.from_generator(function) with a function that returns a new iterator"
        )
    if hasattr(source, "__iter__"):
        return Stream(lambda: source, f"from_source({kind})", None)
    raise TypeError(
        f"from_source() got {source!r} of type {kind}; expected an array, an object with __len__ and "
        "__getitem__, or an object with __iter__"
    )


def generator_node(generator: Callable[[], Iterable[Any]], output_signature: Any) -> Node:
    """Return the source node for a function that returns an iterable.

    Raises:
        TypeError: ``generator`` is no function, or ``output_signature`` holds something else than ArraySpec.
    """
    if not callable(generator):
        raise TypeError(
            f"generator is {generator!r}; expected a function without arguments that returns an iterator: "
            "write from_generator(my_generator), without calling it"
        )
    signature = None if output_signature is None else map_leaves(_signature_leaf, output_signature, ArraySpec)
    name = getattr(generator, "__name__", type(generator).__name__)
    return Stream(generator, f"from_generator({name})", signature)


def files_node(paths: Iterable[Any], reader: Callable[[Any], Iterable[Any]]) -> Node:
    """Return the source node for files and what reads one; the rules are those of ``Dataset.from_files``.

    Raises:
        TypeError: ``paths`` are no paths, or ``reader`` is no function.
        ValueError: There are no paths.
    """
    if isinstance(paths, (str, bytes, os.PathLike)) or not isinstance(paths, Iterable):
        raise TypeError(f"paths is {paths!r}; expected several paths: from_files([path], reader)")
    if not callable(reader):
        raise TypeError(
            f"reader is {reader!r} of type {type(reader).__name__}; expected a function that takes a path and returns "
            "the elements of that file"
        )
    known = list(paths)
    for path in known:
        if not isinstance(path, (str, bytes, os.PathLike)):
            raise TypeError(f"paths has {path!r} of type {type(path).__name__} in it; expected str or os.PathLike")
    if not known:
        raise ValueError("from_files() got no paths; expected at least one: look for the pattern that matched nothing")
    return Files(known, reader)


def _signature_leaf(leaf: Any) -> ArraySpec:
    if not isinstance(leaf, ArraySpec):
        raise TypeError(f"output_signature holds {leaf!r}; expected ArraySpec(shape, dtype) for each array")
    return ArraySpec(tuple(leaf.shape), np.dtype(leaf.dtype))
