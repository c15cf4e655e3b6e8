"""Steps that do something with each element or read it ahead: map, filter, enumerate and prefetch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from mpidist.input.derived_tables import MappedTable
from mpidist.input.element_spec import ArraySpec, flatten_spec, map_spec, spec_of
from mpidist.input.elements import call, owned
from mpidist.input.graph import UNKNOWN, Form, GraphNode, Pass, PassThrough
from mpidist.input.threads import map_stream


@dataclass(eq=False, repr=False)
class Mapped(GraphNode):
    """A function of each element, ``calls`` of them at once; rows go through it when they are read."""

    fn: Callable[..., Any]
    calls: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.text = "map"
        if self.source.form is Form.ROWS:
            self.form, self.read_ahead = Form.ROWS, self.source.read_ahead
            self.table = MappedTable(self.source.row_table(), self.fn, self.calls)

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the row numbers of the input, or the function of each element."""
        if self.form is Form.ROWS:
            return self.source.items(run)
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
        if self.form is Form.ROWS:
            return super().spec()
        for element in self.source.elements(Pass()):
            spec = spec_of(call(self.fn, element))
            if not self.source.batched or not self.dynamic:
                return spec
            sizes = {leaf.shape[0] for leaf in flatten_spec(spec_of(element)) if leaf.shape}
            return map_spec(lambda leaf, sizes=sizes: _forget(leaf, sizes), spec)
        return None


def _forget(leaf: ArraySpec, sizes: set[int | None]) -> ArraySpec:
    if leaf.shape and leaf.shape[0] in sizes:
        return ArraySpec((None, *leaf.shape[1:]), leaf.dtype)
    return leaf


@dataclass(eq=False, repr=False)
class Filtered(GraphNode):
    """The elements for which a function is true."""

    keeps_batches = True

    predicate: Callable[..., Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.text = "filter"
        self.cardinality = UNKNOWN if self.cardinality else 0

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the elements for which it is true."""
        return (element for element in self.source.elements(run) if bool(call(self.predicate, element)))


@dataclass(eq=False, repr=False)
class Enumerated(GraphNode):
    """Elements with their numbers, which are int64 and begin with ``start``."""

    start: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.text = f"enumerate({self.start})" if self.start else "enumerate()"
        self.batched = False

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield numbers and elements."""
        return zip(map(np.int64, count(self.start)), self.source.elements(run), strict=False)

    def spec(self) -> Any:
        """Return the specs of both."""
        spec = self.source.spec()
        return None if spec is None else (ArraySpec((), np.dtype(np.int64)), spec)


@dataclass(eq=False, repr=False)
class Prefetched(PassThrough):
    """The same elements, read ahead: rows and batches of rows by whatever reads them, and other elements here."""

    size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.text = f"prefetch({self.size})"
        self.read_ahead += self.size

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the items of the input."""
        if self.form is not Form.ELEMENTS:
            return self.source.items(run)
        return run.read_ahead(lambda: self.source.items(run), self.size)
