"""The steps of a pipeline whose elements are batches, or come one after the other from a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from typing import Any

import numpy as np

from mpidist.input import row_indices
from mpidist.input.element_spec import ArraySpec, batched, flatten_spec, map_spec, spec_of
from mpidist.input.elements import call, owned, stack
from mpidist.input.padding import Padding
from mpidist.input.parallel_calls import map_stream
from mpidist.input.pipeline import Items, Node, Rows, require_items
from mpidist.input.reordering import INFINITE, UNKNOWN, Pass, Reordering, Repeat, Shuffle, Source


class ReorderedItems(Items):
    """Items chosen and ordered as wholes."""

    def __init__(self, source: Items, reordering: Reordering) -> None:
        super().__init__((source,), reordering.cardinality(source.cardinality), str(reordering))
        self.table = source.table
        self.source = source
        self.reordering = reordering
        self.read_ahead = source.read_ahead

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the items that the reordering chooses."""
        return self.reordering.items(Source(self.source.items, self.source.cardinality), run)

    def spec(self) -> Any:
        """Return that of the input."""
        return self.source.spec()

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """Return the same choice of other items."""
        return ReorderedItems(require_items(inputs[0]), self.reordering)

    def _size_of_batches(self) -> int | None:
        return self.source.batch_size()

    def row_count(self) -> int:
        """Return that of the batches that are chosen, if it depends on their number alone."""
        rows, size, count = self.source.row_count(), self.source.batch_size(), self.source.cardinality
        if self.cardinality < 0 or rows < 0 or not count:
            return self.cardinality if self.cardinality < 0 else UNKNOWN if self.cardinality else 0
        if size is not None and rows == size * count:
            return size * self.cardinality
        if isinstance(self.reordering, (Repeat, Shuffle)):
            return rows * (self.cardinality // count)
        return UNKNOWN

    def shuffles(self) -> Iterator[Shuffle]:
        """Yield those of the input, and this one if it is a shuffle."""
        yield from super().shuffles()
        if isinstance(self.reordering, Shuffle):
            yield self.reordering


class SameItems(Items):
    """A step that leaves the elements as they are, and their number."""

    def __init__(self, source: Node, text: str) -> None:
        super().__init__((source,), source.cardinality, text)
        self.source = source

    def spec(self) -> Any:
        """Return that of the input."""
        return self.source.spec()

    def _size_of_batches(self) -> int | None:
        return self.source.batch_size()

    def row_count(self) -> int:
        """Return that of the input."""
        return self.source.row_count()


class PrefetchedItems(SameItems):
    """The same items: batches of rows are read ahead by whatever reads them, and other elements here."""

    source: Items

    def __init__(self, source: Items, size: int) -> None:
        super().__init__(source, f"prefetch({size})")
        self.table = source.table
        self.size = size
        self.read_ahead = source.read_ahead + size

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the items of the input."""
        if self.table is not None:
            return self.source.items(run)
        return run.read_ahead(lambda: self.source.items(run), self.size)

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """Return the same prefetch of other items."""
        return PrefetchedItems(require_items(inputs[0]), self.size)


class Batches(Items):
    """Groups of consecutive elements, stacked; of rows only the numbers are grouped.

    Args:
        source: The elements.
        size: Of a group.
        drop_remainder: Leave out a last group that is smaller.
        padding: Brings the elements of a group to one shape, for which all of them must be read; None: they have one.
    """

    def __init__(self, source: Node, size: int, drop_remainder: bool, padding: Padding | None = None) -> None:
        count = source.cardinality
        if count >= 0:
            count = count // size if drop_remainder else -(-count // size)
        self.size = size
        self.drop_remainder = drop_remainder
        self.padding = padding
        super().__init__((source,), count, self.text_of_size(size))
        self.source = source
        self.rows = source if isinstance(source, Rows) and padding is None else None
        self.table = None if self.rows is None else self.rows.table
        self.read_ahead = 0 if self.rows is None else -(-self.rows.read_ahead // size)
        self.batched = True
        self.dynamic = not drop_remainder

    def text_of_size(self, size: object) -> str:
        """Return the call with ``size`` as its size."""
        drop = ", drop_remainder=True" if self.drop_remainder else ""
        return f"batch({size}{drop})" if self.padding is None else f"padded_batch({size}, {self.padding}{drop})"

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the row numbers of each batch, or the batches."""
        if self.rows is not None:
            yield from row_indices.batch(self.rows.blocks(run), self.size, self.drop_remainder)
            return
        elements = self.source.elements(run)
        stacked = stack if self.padding is None else self.padding.stack
        while group := list(islice(elements, self.size)):
            if len(group) == self.size or not self.drop_remainder:
                yield stacked(group)

    def spec(self) -> Any:
        """Return that of the input with the batch in front."""
        spec = self.source.spec()
        if spec is None:
            return None
        return batched(
            spec if self.padding is None else self.padding.spec(spec), self.size if self.drop_remainder else None
        )

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """Return batches of other elements."""
        return Batches(inputs[0], self.size, self.drop_remainder, self.padding)

    def batch_size(self) -> int | None:
        """Return the size that was asked for."""
        return self.size

    def row_count(self) -> int:
        """Return the number of elements of the input, without those of a batch that is dropped."""
        count = self.source.cardinality
        return self.cardinality * self.size if self.drop_remainder and count >= 0 else count


class Mapped(Items):
    """A function of each element, ``calls`` of them at once."""

    def __init__(self, source: Node, fn: Callable[..., Any], calls: int = 1) -> None:
        super().__init__((source,), source.cardinality, "map")
        self.source = source
        self.fn = fn
        self.calls = calls

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the function of each element."""
        elements = self.source.elements(run)
        if self.calls == 1 or run.readers is None:
            return map(self._call, elements)
        return map_stream(self._call, elements, run.readers.workers(self.calls), self.calls)

    def _call(self, element: Any) -> Any:
        return owned(call(self.fn, element))

    def spec(self) -> Any:
        """Return that of the function of the first element.

        The first axis is unknown where it has the size of the first batch and batches may differ in size.
        """
        for element in self.source.elements(Pass()):
            spec = spec_of(call(self.fn, element))
            if not self.source.batched or not self.dynamic:
                return spec
            sizes = {leaf.shape[0] for leaf in flatten_spec(spec_of(element)) if leaf.shape}
            return map_spec(lambda leaf, sizes=sizes: _forget(leaf, sizes), spec)
        return None

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """Return the same function of other elements."""
        return Mapped(inputs[0], self.fn, self.calls)


def _forget(leaf: ArraySpec, sizes: set[int | None]) -> ArraySpec:
    if leaf.shape and leaf.shape[0] in sizes:
        return ArraySpec((None, *leaf.shape[1:]), leaf.dtype)
    return leaf


class Filtered(Items):
    """The elements for which a function is true."""

    def __init__(self, source: Node, predicate: Callable[..., Any]) -> None:
        super().__init__((source,), UNKNOWN if source.cardinality else 0, "filter")
        self.source = source
        self.predicate = predicate

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the elements for which it is true."""
        return (element for element in self.source.elements(run) if bool(call(self.predicate, element)))

    def spec(self) -> Any:
        """Return that of the input."""
        return self.source.spec()

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """Return the same choice of other elements."""
        return Filtered(inputs[0], self.predicate)

    def _size_of_batches(self) -> int | None:
        return self.source.batch_size()


class Enumerated(Items):
    """Elements with their numbers, which are int64 and begin with ``start``."""

    def __init__(self, source: Node, start: int) -> None:
        super().__init__((source,), source.cardinality, f"enumerate({start})" if start else "enumerate()")
        self.source = source
        self.start = start
        self.batched = False

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield numbers and elements."""
        return zip(map(np.int64, count(self.start)), self.source.elements(run), strict=False)

    def spec(self) -> Any:
        """Return the specs of both."""
        spec = self.source.spec()
        return None if spec is None else (ArraySpec((), np.dtype(np.int64)), spec)

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """Return other elements with their numbers."""
        return Enumerated(inputs[0], self.start)


class Zipped(Items):
    """Elements of several inputs side by side, until the first of them ends.

    Args:
        sources: The inputs.
        build: Makes an element of theirs.
    """

    def __init__(self, sources: Sequence[Node], build: Callable[[list[Any]], Any]) -> None:
        counts = [node.cardinality for node in sources]
        finite = [count for count in counts if count != INFINITE]
        super().__init__(sources, min(finite, default=INFINITE), "zip")
        self.build = build

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the elements of all inputs together."""
        streams = (node.elements(run) for node in self.inputs)
        return (self.build(list(parts)) for parts in zip(*streams, strict=False))

    def spec(self) -> Any:
        """Return those of the inputs."""
        specs = [node.spec() for node in self.inputs]
        return None if any(spec is None for spec in specs) else self.build(specs)

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """Return other inputs side by side."""
        return Zipped(inputs, self.build)

    def _size_of_batches(self) -> int | None:
        sizes = {node.batch_size() for node in self.inputs}
        return sizes.pop() if len(sizes) == 1 else None
