"""Recognising what users have their data in: arrays, map-style datasets, iterables, generators."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
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


def generator_node(generator: Callable[..., Iterable[Any]], signature: Any, args: tuple[Any, ...]) -> Node:
    """Return the source node for a function that returns an iterable.

    Raises:
        TypeError: ``generator`` is no function.
    """
    if not callable(generator):
        raise TypeError(
            f"generator is {generator!r}; expected a function without arguments that returns an iterator: "
            "write from_generator(my_generator), without calling it"
        )
    name = getattr(generator, "__name__", type(generator).__name__)
    return Stream(partial(generator, *args), f"from_generator({name})", signature)


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


def signature_of(output_types: Any, output_shapes: Any, output_signature: Any) -> Any:
    """Return the nest of ArraySpec of either form, None where there is neither.

    Raises:
        TypeError: Both forms, half of one, or a signature that holds something else than ArraySpec.
        ValueError: Types and shapes that do not belong together, or are none.
    """
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


def _spec_of_types(types: Any, shapes: Any) -> Any:
    """Return the ArraySpecs of a nest of dtypes, and of one of shapes: only dtypes tell where its leaves are."""
    if isinstance(types, Mapping):
        return {key: _spec_of_types(kind, shapes[key]) for key, kind in types.items()}
    if isinstance(types, tuple):
        return tuple(_spec_of_types(kind, shape) for kind, shape in zip(types, shapes, strict=True))
    return ArraySpec(tuple(shapes), np.dtype(types))


def _signature_leaf(leaf: Any) -> ArraySpec:
    if not isinstance(leaf, ArraySpec):
        raise TypeError(f"output_signature holds {leaf!r}; expected ArraySpec(shape, dtype) for each array")
    return ArraySpec(tuple(leaf.shape), np.dtype(leaf.dtype))
