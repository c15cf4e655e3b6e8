"""The graph of a dataset: its nodes, one for each step, and their base class.

A node hands on its elements in one of three forms: rows of a table, and batches of such rows, as row numbers, so that
a user of a part of a batch reads that part only; and other elements, such as those of streams, as they are. Steps
keep to row numbers as long as they can.
"""

from __future__ import annotations

import operator
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar, TypeVar

import numpy as np

from mpidist.core.seed import next_seed
from mpidist.input import row_indices
from mpidist.input.element_spec import flatten_spec
from mpidist.input.tables import ArrayTable, RowTable
from mpidist.input.threads import Readers

INFINITE = -1
UNKNOWN = -2
# Row numbers that are drawn one by one come in blocks of so many.
DRAWN_AHEAD = 1024

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Seed:
    """The origin of the random choices of a step.

    Copies of the step in other graphs share this object.

    Args:
        number: The seed.
        given: Whether the user chose it; another one is replaced when ranks must agree.
        is_renewed: Whether each pass has choices of its own.
    """

    number: int
    given: bool = False
    is_renewed: bool = True

    @staticmethod
    def of(seed: int | None, is_renewed: bool) -> Seed:
        """Return the seed that a user gave, or a random one for None.

        Random ones follow ``mpidist.set_seed``.

        Raises:
            ValueError: It is negative.
        """
        if seed is not None:
            if operator.index(seed) < 0:
                raise ValueError(f"seed is {seed}; expected 0 or more, or None for one drawn at random")
            return Seed(seed, True, is_renewed)
        drawn = next_seed()
        return Seed(secrets.randbits(63) if drawn is None else drawn, False, is_renewed)

    def entropy(self, run: Pass) -> tuple[int, ...]:
        """Return the entropy that stands for the seed in a pass, or the seed itself."""
        return run.seeds.get(self, (self.number,))

    def generator(self, run: Pass) -> np.random.Generator:
        """Return the generator of the choices of a pass."""
        return np.random.default_rng([*self.entropy(run), *run.key] if self.is_renewed else list(self.entropy(run)))


@dataclass(frozen=True)
class Pass:
    """One pass over a dataset: with the graph, the origin of its random choices.

    Args:
        key: The number of the pass, then of the repetition inside it, one for each ``repeat``.
        seeds: The entropy of seeds that were not given; ranks agree on it.
        readers: Holds the threads of the pass. None, for a look at an element: nothing is read ahead.
    """

    key: tuple[int, ...] = (0,)
    seeds: Mapping[Seed, tuple[int, ...]] = field(default_factory=dict)
    readers: Readers | None = field(default=None, compare=False)

    def repetition(self, number: int) -> Pass:
        """Return the pass of repetition ``number``."""
        return Pass((*self.key, number), self.seeds, self.readers)

    def first(self) -> Pass:
        """Return the first pass of all over the same graph."""
        return replace(self, key=(0,))

    def read_ahead(self, open_source: Callable[[], Iterator[T]], size: int) -> Iterator[T]:
        """Return an iterator whose next ``size`` elements a thread keeps ready.

        For 0 there is no thread.
        """
        if size == 0 or self.readers is None:
            return open_source()
        return self.readers.open(open_source, size)


class Form(Enum):
    """The form in which a node hands on its elements."""

    ROWS = "blocks of row numbers; where one block ends and the next begins has no meaning"
    BATCHES = "the row numbers of a batch"
    ELEMENTS = "the elements themselves"


@dataclass(eq=False, repr=False)
class GraphNode(ABC):
    """One step of a dataset.

    Args:
        inputs: The steps before it.

    Attributes:
        text: The call that made it, for messages and for comparing graphs of several ranks.
        cardinality: Number of elements in a pass, -1 without end, -2 unknown.
        form: In which form ``items`` come.
        table: The table whose rows are numbered; None where the items are elements.
        read_ahead: The number of elements that are read ahead when rows are read by number.
        batched: Whether the elements went through ``batch``.
        dynamic: Whether the first axis of the elements may differ from element to element.
        own_seed: The origin of this step's own random choices, None where it makes none.
        keeps_batches: Whether the elements are those of the inputs, although maybe others are left out or between them.
    """

    keeps_batches: ClassVar[bool] = False

    inputs: tuple[GraphNode, ...]
    text: str = field(init=False, default="")
    cardinality: int = field(init=False, default=UNKNOWN)
    form: Form = field(init=False, default=Form.ELEMENTS)
    table: RowTable | None = field(init=False, default=None)
    read_ahead: int = field(init=False, default=0)
    batched: bool = field(init=False, default=False)
    dynamic: bool = field(init=False, default=False)
    own_seed: Seed | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.batched = bool(self.inputs) and all(node.batched for node in self.inputs)
        self.dynamic = any(node.dynamic for node in self.inputs)
        if len(self.inputs) == 1:
            self.cardinality = self.source.cardinality
        self._set_up()

    def _set_up(self) -> None:  # noqa: B027 - sources have no need
        """Set the text, and what differs from the inputs.

        The last part of making a node.
        """

    @property
    def source(self) -> GraphNode:
        """The only input."""
        return self.inputs[0]

    @property
    def identity(self) -> str:
        """The text without folders, for comparing the graphs of several jobs.

        Jobs may find their files in other folders.
        """
        return self.text

    @abstractmethod
    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the elements of a pass in the form of the node."""

    def elements(self, run: Pass) -> Iterator[object]:
        """Yield the elements of a pass."""
        if self.form is Form.ELEMENTS:
            return self.items(run)
        if self.form is Form.ROWS:
            return self.reading(run, lambda table: table.each(row_indices.rows(self.items(run))))
        return self.reading(run, lambda table: table.each_batch(self.items(run)))

    def reading(self, run: Pass, read: Callable[[RowTable], Iterator[T]]) -> Iterator[T]:
        """Return the iterator that ``read`` makes of the opened table, read ahead."""
        table = self.row_table().opened(run.readers)
        return run.read_ahead(lambda: read(table), self.read_ahead)

    def row_table(self) -> RowTable:
        """Return the table of a node whose items are row numbers."""
        assert self.table is not None
        return self.table

    def spec(self) -> object:
        """Return the nest of ArraySpec of an element, or None without an element.

        May read an element.
        """
        return self.row_table().spec() if self.form is Form.ROWS else self.source.spec()

    def with_inputs(self, inputs: Sequence[GraphNode]) -> GraphNode:
        """Return the same step with other inputs, as many as it has."""
        return replace(self, inputs=tuple(inputs)) if inputs else self

    def batch_size(self) -> int | None:
        """Return the number of rows of an element, or None if unknown.

        The last batch may have fewer. As TensorFlow finds it: in the shapes, if no element may be smaller, and else in
        ``batch``, through steps that leave elements as they are.
        """
        if self.dynamic:
            keeps = self.keeps_batches and self.form is not Form.ROWS
            sizes = {node.batch_size() for node in self.inputs} if keeps else set()
            return sizes.pop() if len(sizes) == 1 else None
        shapes = {leaf.shape[:1] for leaf in flatten_spec(self.spec() or ())}
        return next(iter(shapes.pop()), None) if len(shapes) == 1 else None

    def row_count(self) -> int:
        """Return the number of rows of all batches of a pass.

        -1 stands for endless, -2 for unknown.
        """
        return UNKNOWN if self.cardinality else 0

    def graph(self) -> Iterator[GraphNode]:
        """Yield all steps of the graph, those of the inputs first."""
        for node in self.inputs:
            yield from node.graph()
        yield self

    def seeds(self) -> Iterator[Seed]:
        """Yield the seeds of the whole graph, those of the inputs first."""
        for node in self.inputs:
            yield from node.seeds()
        if self.own_seed is not None:
            yield self.own_seed

    def files(self) -> Iterator[str]:
        """Yield the paths of the files that the whole graph reads."""
        for node in self.inputs:
            yield from node.files()

    def __str__(self) -> str:
        return described(self.text, [str(node) for node in self.inputs])


def combined(combine: Callable[[Sequence[int]], int], counts: Sequence[int]) -> int:
    """Return ``combine`` of several cardinalities.

    Endless wins over unknown, and unknown over any number.

    >>> combined(max, [3, -2, 5]), combined(sum, [3, 5])
    (-2, 8)
    """
    for special in (INFINITE, UNKNOWN):
        if special in counts:
            return special
    return combine(counts)


def described(text: str, inputs: Sequence[str]) -> str:
    """Return the text of a step after the texts of its inputs.

    >>> described("map", ["range(3)"]), described("zip", ["a", "b"])
    ('range(3).map', 'zip(a, b)')
    """
    if len(inputs) == 1:
        return f"{inputs[0]}.{text}"
    return f"{text}({', '.join(inputs)})" if inputs else text


class TableRows(GraphNode):
    """All rows of a table in their own order."""

    def __init__(self, table: RowTable) -> None:
        super().__init__(())
        self.form, self.table, self.cardinality, self.text = Form.ROWS, table, table.length, table.text

    def items(self, run: Pass) -> Iterator[object]:
        """Yield all row numbers."""
        return iter((range(self.cardinality),))


class PassThrough(GraphNode):
    """A step that hands on elements unchanged, in the same form; here all of them."""

    keeps_batches = True

    def __post_init__(self) -> None:
        self.form, self.table, self.read_ahead = self.source.form, self.source.table, self.source.read_ahead
        super().__post_init__()

    def row_count(self) -> int:
        """Return the number of rows of the input."""
        return self.source.row_count()


def array_samples(node: GraphNode) -> Iterator[int]:
    """Yield a checksum of some rows of each nest of arrays in a graph."""
    for step in node.graph():
        if isinstance(step, TableRows) and isinstance(step.table, ArrayTable):
            yield step.table.sample()
