"""Elements cut into several, and several made a dataset of their own: unbatch and window."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any

import numpy as np

from mpidist.core import nest
from mpidist.input.element_spec import ArraySpec, DatasetSpec, map_spec
from mpidist.input.elements import as_element, map_leaves
from mpidist.input.pipeline import Items, Node
from mpidist.input.reordering import Pass
from mpidist.input.row_steps import TableRows
from mpidist.input.tables import SequenceTable


class Unbatched(Items):
    """The rows of each element one by one."""

    def __init__(self, source: Node) -> None:
        super().__init__((source,), source.row_count(), "unbatch()")
        self.source = source
        self.batched = False
        # Nothing is known of the axis that is the first one now.
        self.dynamic = True

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the rows of each element."""
        for element in map(as_element, self.source.elements(run)):
            for row in range(_rows_of(element)):
                yield nest.map_structure(itemgetter(row), element)

    def spec(self) -> Any:
        """Return that of the input without its first axis."""
        spec = self.source.spec()
        return None if spec is None else map_spec(_without_rows, spec)

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """Return the rows of other elements."""
        return Unbatched(inputs[0])


def _rows_of(element: Any) -> int:
    sizes = {np.shape(leaf)[:1] for leaf in nest.flatten(element)}
    if len(sizes) != 1 or () in sizes:
        shapes = ", ".join(str(np.shape(leaf)) for leaf in nest.flatten(element))
        raise ValueError(
            f"unbatch() got an element of arrays of the shapes {shapes}; expected a first axis of the same size in all "
            "of them, as batch() makes it"
        )
    return int(sizes.pop()[0])


def _without_rows(leaf: ArraySpec) -> ArraySpec:
    if not leaf.shape:
        raise ValueError(f"unbatch() got single values of {leaf.dtype}; expected batches, whose first axis is cut")
    return ArraySpec(leaf.shape[1:], leaf.dtype)


class Windows(Items):
    """Datasets of elements that are near each other; of a structure of arrays, the structure of a dataset for each.

    Args:
        source: The elements.
        size: Elements in a window.
        shift: How many elements further the next window begins.
        stride: How many elements further the next element in a window is.
        drop_remainder: Leave out windows that the end cuts off.
        dataset_of: Makes a dataset of a node.
    """

    def __init__(
        self,
        source: Node,
        size: int,
        shift: int,
        stride: int,
        drop_remainder: bool,
        dataset_of: Callable[[Node], Any],
    ) -> None:
        self.span = (size - 1) * stride + 1
        count = source.cardinality
        if count >= 0:
            count = max(0, (count - self.span) // shift + 1) if drop_remainder else -(-count // shift)
        drop = ", drop_remainder=True" if drop_remainder else ""
        super().__init__((source,), count, f"window({size}, shift={shift}, stride={stride}{drop})")
        self.source = source
        self.size = size
        self.shift = shift
        self.stride = stride
        self.drop_remainder = drop_remainder
        self.dataset_of = dataset_of
        self.batched = False
        self.dynamic = True

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the windows; of the elements only those are held that the next windows have."""
        elements = self.source.elements(run)
        held: deque[Any] = deque()
        while True:
            held.extend(map(as_element, islice(elements, self.span - len(held))))
            if not held or (self.drop_remainder and len(held) < self.span):
                return
            yield self._window(list(islice(held, 0, None, self.stride)))
            for _ in range(min(self.shift, len(held))):
                held.popleft()
            for _ in islice(elements, max(0, self.shift - self.span)):
                pass

    def _window(self, elements: list[Any]) -> Any:
        first = elements[0]
        for other in elements[1:]:
            nest.assert_same_structure(first, other)
        columns = zip(*map(nest.flatten, elements), strict=True)
        return nest.pack_like(first, [self.dataset_of(TableRows(SequenceTable(list(column)))) for column in columns])

    def spec(self) -> Any:
        """Return that of the datasets."""
        spec = self.source.spec()
        return None if spec is None else map_leaves(DatasetSpec, spec, leaf=ArraySpec)

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """Return windows of other elements."""
        return Windows(inputs[0], self.size, self.shift, self.stride, self.drop_remainder, self.dataset_of)
