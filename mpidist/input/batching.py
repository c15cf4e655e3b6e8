"""Steps that stack and cut elements: batch, padded_batch, unbatch and window."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any

import numpy as np

from mpidist.arrays.dtypes import Array, DType
from mpidist.core import nest
from mpidist.input import row_indices
from mpidist.input.elements import ArraySpec, DatasetSpec, Hidden, as_element, batched, map_leaves, map_spec, stack
from mpidist.input.nodes import Form, GraphNode, Pass, SequenceRows
from mpidist.input.steps import Mapped, Prefetched


@dataclass(eq=False, repr=False)
class Batched(GraphNode):
    """Groups of consecutive elements, stacked. Of rows only the numbers are grouped."""

    size: int
    drop_remainder: bool
    padding: Padding | None = None  # pads the elements of a group to one shape

    def _set_up(self) -> None:
        count, size = self.cardinality, self.size
        if count >= 0:
            self.cardinality = count // size if self.drop_remainder else -(-count // size)
        self.text = self.text_of_size(size)
        if self.source.form is Form.ROWS and self.padding is None:
            self.form, self.chosen_from = Form.BATCHES, self.source.table
            self.read_ahead = -(-self.source.read_ahead // size)
        self.batched = True
        self.dynamic = not self.drop_remainder

    def text_of_size(self, size: object) -> str:
        """Return the call with ``size`` as its size."""
        drop = ", drop_remainder=True" if self.drop_remainder else ""
        return f"batch({size}{drop})" if self.padding is None else f"padded_batch({size}, {self.padding}{drop})"

    def items(self, run: Pass) -> Iterator[object]:
        """Yield the row numbers of each batch, or the batches."""
        if self.form is Form.BATCHES:
            yield from row_indices.batch(self.source.items(run), self.size, self.drop_remainder)
            return
        elements = self.source.elements(run)
        stacked = stack if self.padding is None else self.padding.stack
        while group := list(islice(elements, self.size)):
            if len(group) == self.size or not self.drop_remainder:
                yield stacked(group)

    def spec(self) -> object:
        """Return the spec of the input with the batch axis in front."""
        size = self.size if self.drop_remainder else None
        if self.form is Form.BATCHES:
            return self.table.batch_spec(size)
        spec = self.source.spec()
        if spec is not None and self.padding is not None:
            spec = self.padding.spec(spec)
        return None if spec is None else batched(spec, size)

    def batch_size(self) -> int | None:
        """Return the requested size."""
        return self.size

    def row_count(self) -> int:
        """Return the number of rows of the input, without a dropped batch."""
        count = self.source.cardinality
        return self.cardinality * self.size if self.drop_remainder and count >= 0 else count


def last_batching(node: GraphNode) -> Batched | None:
    """Return the ``batch`` that makes the elements of a graph. None if another step may choose among them."""
    while isinstance(node, (Mapped, Prefetched)):
        node = node.source
    return node if isinstance(node, Batched) else None


@dataclass(frozen=True, eq=False)
class Padding:
    """The common shapes and the padding values of ``Dataset.padded_batch``."""

    shapes: object
    values: object

    def __str__(self) -> str:
        return f"padded_shapes={self.shapes!r}, padding_values={self.values!r}"

    def stack(self, elements: Sequence[object]) -> object:
        """Pad and stack elements."""
        converted = [as_element(element) for element in elements]
        shapes, values = self._for_leaves(converted[0])
        return nest.map_structure(
            lambda shape, value, *leaves: _padded([*map(np.asarray, leaves)], shape.value, value.value),
            *(shapes, values, *converted),
        )

    def spec(self, spec: object) -> object:
        """Return the spec of padded elements."""
        leaves = map_spec(Hidden, spec)
        shapes, _ = self._for_leaves(leaves)

        def pad(leaf: Hidden[ArraySpec], shape: Hidden[list[int] | None]) -> ArraySpec:
            sizes = shape.value or [-1] * len(leaf.value.shape)
            return leaf.value._replace(shape=tuple(None if size == -1 else size for size in sizes))

        return nest.map_structure(pad, leaves, shapes)

    def _for_leaves(self, element: object) -> tuple[object, object]:
        """Return shapes and values in the structure of ``element``, with None for defaults."""
        shapes = _below(element, self.shapes, "padded_shapes", is_nest=self.shapes is not None)
        shapes = nest.map_structure(lambda given: Hidden(_checked_shape(given.value)), shapes)
        is_nest = isinstance(self.values, (tuple, Mapping))
        return shapes, _below(element, self.values, "padding_values", is_nest)


def _below(structure: Any, given: object, name: str, is_nest: bool) -> object:
    """Return a nest like ``structure``. Its leaves are parts of ``given``, or all are ``given``."""
    if not is_nest:
        return nest.map_structure(lambda _: Hidden(given), structure)
    if not nest.is_nest(structure):
        return Hidden(given)
    if isinstance(structure, dict) and isinstance(given, Mapping) and set(given) == set(structure):
        return {key: _below(child, given[key], name, is_nest) for key, child in structure.items()}
    if isinstance(structure, tuple) and isinstance(given, (tuple, list)) and len(given) == len(structure):
        children: list[Any] = [_below(child, part, name, is_nest) for child, part in zip(structure, given, strict=True)]
        return type(structure)(*children) if hasattr(structure, "_fields") else tuple(children)
    raise ValueError(
        f"{name} has {given!r} for elements of {nest.describe(structure)}; expected one for each array, in the same "
        "structure of tuples and dicts"
    )


def _checked_shape(shape: object) -> list[int] | None:
    if shape is None:
        return None
    sizes = [-1 if size is None else size for size in shape] if isinstance(shape, (tuple, list)) else None
    if sizes is None or not all(isinstance(size, (int, np.integer)) and size >= -1 for size in sizes):
        raise ValueError(f"padded_shapes has {shape!r} for an array; expected its sizes, such as [None, 3]")
    return [int(size) for size in sizes]


def _padded(arrays: list[Array], shape: list[int] | None, value: object) -> Array:
    dims = {array.ndim for array in arrays}
    if len(dims) > 1 or (shape is not None and dims != {len(shape)}):
        raise ValueError(
            f"the elements of a padded batch have {sorted(dims)} axes, and padded_shapes is {shape}; expected the same "
            "number of axes in all of them"
        )
    longest = [max(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True)]
    target = [most if size == -1 else size for size, most in zip(shape or [-1] * len(longest), longest, strict=True)]
    if any(most > size for most, size in zip(longest, target, strict=True)):
        raise ValueError(
            f"an element of a padded batch has sizes up to {longest}, and padded_shapes is {shape}; expected no larger "
            "sizes. Pass None for the longest of each batch, or cut the elements before"
        )
    dtype = np.result_type(*{array.dtype for array in arrays})
    fill = _fill(value, dtype)
    padded = np.full((len(arrays), *target), fill, np.result_type(dtype, np.asarray(fill).dtype))
    for row, array in zip(padded, arrays, strict=True) if longest else ():
        row[tuple(map(slice, array.shape))] = array
    return padded if longest else np.stack(arrays)


def _fill(value: object, dtype: DType) -> object:
    if value is None:
        return np.zeros((), dtype)[()]
    given = np.asarray(value)
    with np.errstate(all="ignore"):
        fill = given.astype(dtype) if given.dtype.kind in "biufc" and dtype.kind in "biufc" else given
    same = fill == given or (fill != fill and given != given)  # NaN is unequal to itself
    if given.ndim or (fill.dtype.kind in "US") != (dtype.kind in "US") or not same:
        raise TypeError(f"padding_values has {value!r} for an array of {dtype}; expected a value of that dtype")
    return fill[()]


class Unbatched(GraphNode):
    """The rows of each element."""

    def _set_up(self) -> None:
        self.text = "unbatch()"
        self.cardinality = self.source.row_count()
        self.batched = False
        # The next axis, now the first one, may have any size.
        self.dynamic = True

    def items(self, run: Pass) -> Iterator[object]:
        """Yield the rows of each element."""
        for element in map(as_element, self.source.elements(run)):
            shapes = [np.shape(leaf) for leaf in nest.flatten(element)]
            sizes = {shape[:1] for shape in shapes}
            if len(sizes) != 1 or () in sizes:
                raise ValueError(
                    f"unbatch() got an element of arrays of the shapes {', '.join(map(str, shapes))}; expected a first "
                    "axis of the same size in all of them, as batch() makes it"
                )
            for row in range(shapes[0][0]):
                yield nest.map_structure(itemgetter(row), element)

    def spec(self) -> object:
        """Return the spec of the input without its first axis."""

        def without_rows(leaf: ArraySpec) -> ArraySpec:
            if not leaf.shape:
                raise ValueError(f"unbatch() got single values of {leaf.dtype}; expected batches")
            return leaf._replace(shape=leaf.shape[1:])

        spec = self.source.spec()
        return None if spec is None else map_spec(without_rows, spec)


@dataclass(eq=False, repr=False)
class Windows(GraphNode):
    """Windows: datasets of neighboring elements. Of a structure of arrays, a window is a structure of datasets."""

    size: int
    shift: int  # between the starts of two windows
    stride: int  # between neighbors in a window
    drop_remainder: bool
    dataset_of: Callable[[GraphNode], object]  # makes a dataset of a node

    def _set_up(self) -> None:
        self.span = (self.size - 1) * self.stride + 1
        count, shift = self.cardinality, self.shift
        if count >= 0:
            self.cardinality = max(0, (count - self.span) // shift + 1) if self.drop_remainder else -(-count // shift)
        drop = ", drop_remainder=True" if self.drop_remainder else ""
        self.text = f"window({self.size}, shift={shift}, stride={self.stride}{drop})"
        self.batched = False
        self.dynamic = True

    def items(self, run: Pass) -> Iterator[object]:
        """Yield the windows. Only the elements that the next windows need are in memory."""
        elements = self.source.elements(run)
        held: deque[object] = deque()
        while True:
            held.extend(map(as_element, islice(elements, self.span - len(held))))
            if not held or (self.drop_remainder and len(held) < self.span):
                return
            yield nest.map_structure(self._window, *islice(held, 0, None, self.stride))
            for _ in range(min(self.shift, len(held))):
                held.popleft()
            for _ in islice(elements, max(0, self.shift - self.span)):
                pass

    def _window(self, *leaves: object) -> object:
        return self.dataset_of(SequenceRows(list(leaves)))

    def spec(self) -> object:
        """Return the spec of the windows."""
        spec = self.source.spec()
        return None if spec is None else map_leaves(DatasetSpec, spec, leaf=ArraySpec)
