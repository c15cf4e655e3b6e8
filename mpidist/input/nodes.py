"""The base class of the steps of a dataset, and sources whose rows have numbers.

A node yields row numbers of its ``table``, batches of row numbers, or elements. Steps keep row numbers as long as they
can, so that a rank reads only the rows of its own replicas.
"""

from __future__ import annotations

import operator
import secrets
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar, Protocol, TypeGuard, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpidist.arrays.dtypes import Array, DType
from mpidist.core import nest
from mpidist.core.seed import next_seed
from mpidist.input import row_indices
from mpidist.input.elements import (
    ArraySpec,
    as_element,
    batched,
    flatten_spec,
    list_to_array,
    map_leaves,
    owned,
    spec_of,
    stack,
    stopped,
)
from mpidist.input.row_indices import RowIndex, as_array
from mpidist.input.threads import Readers

INFINITE = -1
UNKNOWN = -2
_SAMPLES = 8
# One slice with all rows of a chunk is faster than single rows if this many of them are used.
_ROWS_WORTH_A_SLICE = 4

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Seed:
    """The seed of the random choices of a step. Copies of the step share this object."""

    number: int
    given: bool = False  # the user chose it. Ranks agree on other seeds.
    is_renewed: bool = True  # each pass has other choices

    @staticmethod
    def of(seed: int | None, is_renewed: bool) -> Seed:
        """Return the seed of a user, or a random one that follows ``mpidist.set_seed``."""
        if seed is not None:
            if operator.index(seed) < 0:
                raise ValueError(f"seed is {seed}; expected 0 or more, or None for a random one")
            return Seed(seed, True, is_renewed)
        drawn = next_seed()
        return Seed(secrets.randbits(63) if drawn is None else drawn, False, is_renewed)

    def entropy(self, run: Pass) -> tuple[int, ...]:
        """Return the entropy that replaces this seed in a pass, or the seed."""
        return run.seeds.get(self, (self.number,))

    def generator(self, run: Pass) -> np.random.Generator:
        """Return the random generator of a pass."""
        return np.random.default_rng([*self.entropy(run), *run.key] if self.is_renewed else list(self.entropy(run)))


@dataclass(frozen=True)
class Pass:
    """One pass over a dataset. It and the graph determine all random choices."""

    # The number of the pass, then of the repetition in it, one for each repeat().
    key: tuple[int, ...] = (0,)
    # The entropy that ranks have agreed on, for seeds that the user did not choose.
    seeds: Mapping[Seed, tuple[int, ...]] = field(default_factory=dict)
    # The threads of the pass. None: no threads, because only an element is inspected.
    readers: Readers | None = field(default=None, compare=False)

    def repetition(self, number: int) -> Pass:
        """Return the pass of repetition ``number``."""
        return Pass((*self.key, number), self.seeds, self.readers)

    def read_ahead(self, open_source: Callable[[], Iterator[T]], size: int) -> Iterator[T]:
        """Return an iterator that reads ``size`` elements ahead in a thread. 0: without a thread."""
        return open_source() if size == 0 or self.readers is None else self.readers.open(open_source, size)


class Form(Enum):
    """The form of the items of a node."""

    ROWS = "blocks of row numbers"
    BATCHES = "the row numbers of a batch"
    ELEMENTS = "elements"


@dataclass(eq=False, repr=False)
class GraphNode(ABC):
    """One step of a dataset."""

    keeps_batches: ClassVar[bool] = False  # all elements are elements of the inputs

    inputs: tuple[GraphNode, ...]
    # The call that made it, for messages, comparisons between ranks and saved positions.
    text: str = field(init=False, default="")
    # The text without folders, if another job may find its files in other folders.
    identity: str = field(init=False, default="")
    cardinality: int = field(init=False, default=UNKNOWN)  # elements in a pass
    form: Form = field(init=False, default=Form.ELEMENTS)  # of items()
    # It yields all its rows in order, and can read any of them by number.
    is_table: bool = field(init=False, default=False)
    # Of other nodes with row numbers: the table to which these belong.
    chosen_from: GraphNode | None = field(init=False, default=None)
    is_source: bool = field(init=False, default=False)  # a source of rows, or a zip of sources
    read_ahead: int = field(init=False, default=0)  # elements that are read ahead if rows are read by number
    batched: bool = field(init=False, default=False)  # the elements went through batch()
    dynamic: bool = field(init=False, default=False)  # the first axis may differ between elements
    own_seed: Seed | None = field(init=False, default=None)  # of this step's random choices

    def __post_init__(self) -> None:
        self.batched = bool(self.inputs) and all(node.batched for node in self.inputs)
        self.dynamic = any(node.dynamic for node in self.inputs)
        if len(self.inputs) == 1:
            self.cardinality = self.source.cardinality
        self._set_up()

    def _set_up(self) -> None:  # noqa: B027 - sources do not need it
        """Set the text and the attributes that differ from the inputs."""

    @property
    def source(self) -> GraphNode:
        """The only input."""
        return self.inputs[0]

    @abstractmethod
    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the items of a pass in the form of the node."""

    def elements(self, run: Pass) -> Iterator[object]:
        """Yield the elements of a pass."""
        if self.form is Form.ELEMENTS:
            return self.items(run)
        if self.form is Form.ROWS:
            return run.read_ahead(lambda: self.table.each(row_indices.rows(self.items(run)), run), self.read_ahead)
        return run.read_ahead(lambda: self.table.each_batch(self.items(run), run), self.read_ahead)

    # Rows by number. These methods are called for tables only.

    @property
    def table(self) -> GraphNode:
        """The node whose rows are numbered."""
        # A node does not hold itself: a cycle would keep its arrays until the garbage collector runs.
        table = self if self.is_table else self.chosen_from
        assert table is not None
        return table

    def row(self, index: int) -> object:
        """Return row ``index``."""
        return self.read_rows(range(index, index + 1), Pass())[0]

    def each(self, numbers: Iterable[int], run: Pass) -> Iterator[object]:
        """Yield the rows of ``numbers``."""
        return map(self.row, numbers)

    def read_rows(self, index: RowIndex, run: Pass) -> list[object]:
        """Return the rows of ``index`` as a list."""
        return list(map(self.row, row_indices.rows([index])))

    def read(self, index: RowIndex, run: Pass) -> object:
        """Return the rows of ``index``, at least one, as one batch of new arrays."""
        return stack(self.read_rows(index, run))

    def each_batch(self, indices: Iterable[RowIndex], run: Pass) -> Iterator[object]:
        """Yield the batch of each index."""
        return (self.read(index, run) for index in indices)

    def each_step(self, steps: Iterable[list[RowIndex]], run: Pass) -> Iterator[list[object]]:
        """Yield a list of batches for each list of indices. An empty index becomes None."""
        return ([self.read(index, run) if len(index) else None for index in step] for step in steps)

    def caching(self) -> GraphNode | None:
        """Return the table that keeps its rows in memory, this one or a copy. None: it does not."""
        return None

    def batch_spec(self, size: int | None) -> object:
        """Return the spec of a batch of ``size`` rows."""
        spec = self.spec()
        return None if spec is None else batched(spec, size)

    def spec(self) -> object:
        """Return the nest of ArraySpec of an element, or None without an element. May read an element."""
        if self.is_table:
            return spec_of(self.row(0)) if self.cardinality else None
        return self.table.spec() if self.form is Form.ROWS else self.source.spec()

    def with_inputs(self, inputs: Sequence[GraphNode]) -> GraphNode:
        """Return the same step with other inputs."""
        return replace(self, inputs=tuple(inputs)) if inputs else self

    def batch_size(self) -> int | None:
        """Return the number of rows of an element, or None if unknown. The last batch may have fewer."""
        # As in TensorFlow: by the shapes if no element may be smaller, else by batch() and steps that keep batches.
        if self.dynamic:
            keeps = self.keeps_batches and self.form is not Form.ROWS
            sizes = {node.batch_size() for node in self.inputs} if keeps else set()
            return sizes.pop() if len(sizes) == 1 else None
        shapes = {leaf.shape[:1] for leaf in flatten_spec(self.spec() or ())}
        return next(iter(shapes.pop()), None) if len(shapes) == 1 else None

    def row_count(self) -> int:
        """Return the number of rows of all batches of a pass, INFINITE or UNKNOWN."""
        return UNKNOWN if self.cardinality else 0

    def graph(self) -> Iterator[GraphNode]:
        """Yield all steps of the graph, inputs first."""
        for node in self.inputs:
            yield from node.graph()
        yield self

    def seeds(self) -> Iterator[Seed]:
        """Yield the seeds of the graph, inputs first."""
        for node in self.inputs:
            yield from node.seeds()
        if self.own_seed is not None:
            yield self.own_seed

    def __str__(self) -> str:
        return described(self.text, [str(node) for node in self.inputs])


class PassThrough(GraphNode):
    """A step that does not change elements. It has the form of its input."""

    keeps_batches = True

    def __post_init__(self) -> None:
        self.form, self.read_ahead = self.source.form, self.source.read_ahead
        self.chosen_from = None if self.form is Form.ELEMENTS else self.source.table
        super().__post_init__()

    def row_count(self) -> int:
        """Return the number of rows of the input."""
        return self.source.row_count()


def combined(combine: Callable[[Sequence[int]], int], counts: Sequence[int]) -> int:
    """Return ``combine`` of cardinalities. INFINITE wins over UNKNOWN, and UNKNOWN over numbers."""
    return next((special for special in (INFINITE, UNKNOWN) if special in counts), None) or combine(counts)


def described(text: str, inputs: Sequence[str]) -> str:
    """Return the text of a step with the texts of its inputs."""
    if len(inputs) == 1:
        return f"{inputs[0]}.{text}"
    return f"{text}({', '.join(inputs)})" if inputs else text


class RowSource(GraphNode):
    """A source whose rows can be read by number."""

    def __init__(self, length: int, text: str) -> None:
        super().__init__(())
        self.form, self.is_table, self.is_source = Form.ROWS, True, True
        self.cardinality, self.text = length, text

    def items(self, run: Pass) -> Iterator[object]:
        """Yield all row numbers."""
        return iter((range(self.cardinality),))


class RangeRows(RowSource):
    """The numbers of a ``range``, which are computed."""

    def __init__(self, numbers: range, dtype: DType) -> None:
        super().__init__(len(numbers), str(numbers))
        self.numbers = numbers
        self.dtype = dtype
        self._fits_int64 = max(map(abs, (numbers.start, numbers.stop, numbers.step))) < 1 << 62

    def row(self, index: int) -> object:
        """Return number ``index``."""
        return self.dtype.type(self.numbers[index])

    def read(self, index: RowIndex, run: Pass) -> object:
        """Return the numbers of ``index``."""
        if not self._fits_int64:
            return np.array([self.numbers[int(i)] for i in index], self.dtype)
        if isinstance(index, range):
            return as_array(self.numbers[index.start : index.stop : index.step]).astype(self.dtype, copy=False)
        return (self.numbers.start + self.numbers.step * index).astype(self.dtype, copy=False)

    def caching(self) -> GraphNode:
        """Return itself."""
        return self

    def spec(self) -> object:
        """Return the spec of a number."""
        return ArraySpec((), self.dtype)


class StoredArray(Protocol):
    """An array in a file of h5py or zarr."""

    shape: tuple[int, ...]
    dtype: DType
    chunks: tuple[int, ...] | None

    def __getitem__(self, index: slice | Array) -> Array: ...


class ArrayRows(RowSource):
    """A nest of arrays, in memory or in files, with a common first axis. If ``is_element``, its row is one element."""

    def __init__(self, columns: object, *, is_element: bool = False) -> None:
        leaves = nest.flatten(columns)
        method, first = ("from_tensors", 1) if is_element else ("from_tensor_slices", 0)
        arrays = ", ".join(f"{leaf.shape[first:]} {leaf.dtype}" for leaf in leaves)
        super().__init__(leaves[0].shape[0], f"{method}({arrays})")
        self.columns = columns
        self.is_element = is_element

    @staticmethod
    def of_element(tensors: object) -> ArrayRows:
        """Return the source whose one row is ``tensors``."""
        columns = map_leaves(lambda leaf: np.asarray(leaf)[np.newaxis], as_element(tensors))
        if not nest.flatten(columns):
            raise ValueError(f"from_tensors() got {tensors!r}, which has no arrays; expected a nest of arrays")
        return ArrayRows(columns, is_element=True)

    @staticmethod
    def of_slices(tensors: object) -> ArrayRows:
        """Return the source of the rows of a nest of arrays."""
        columns = map_leaves(_as_column, tensors)
        sizes: dict[int, str] = {}
        for path, column in nest.flatten_with_path(columns):
            if not column.shape:
                where = f" at {path}" if path else ""
                raise ValueError(
                    f"from_tensor_slices() got a value without axes{where}. Pass a single element as np.array([value])"
                )
            sizes.setdefault(column.shape[0], path)
        if len(sizes) != 1:
            found = ", ".join(f"{size} at {path}" for size, path in sizes.items())
            raise ValueError(
                f"from_tensor_slices() got arrays whose first axes differ: {found or 'no arrays at all'}. "
                "Pass arrays with one row for each element"
            )
        return ArrayRows(columns)

    def row(self, index: int) -> object:
        """Return a copy of row ``index`` of each array."""

        def copied(column: Any) -> object:
            value = column[index]
            return np.array(value) if getattr(value, "ndim", 0) else value

        return map_leaves(copied, self.columns)

    def read(self, index: RowIndex, run: Pass) -> object:
        """Return the rows of ``index`` of each array."""
        columns = self.columns
        if type(columns) is np.ndarray and type(index) is np.ndarray:  # the most frequent case
            return columns[index]
        return map_leaves(lambda column: _read_column(column, index), columns)

    def caching(self) -> GraphNode | None:
        """Return itself if all arrays are in memory."""
        return self if all(type(column) is np.ndarray for column in nest.flatten(self.columns)) else None

    def sample(self) -> int:
        """Return the CRC-32 of some rows, to detect different data of the same shape."""
        found, last = 0, self.cardinality - 1
        numbers = sorted({last * i // _SAMPLES for i in range(_SAMPLES + 1)}) if self.cardinality else []
        for column in nest.flatten(self.columns):
            if isinstance(column, np.ndarray) and not column.dtype.hasobject:
                found = zlib.crc32(np.asarray(column[numbers]).tobytes(), found)
        return found

    def spec(self) -> object:
        """Return the spec of the arrays without their first axis."""
        return map_leaves(lambda leaf: ArraySpec(tuple(leaf.shape[1:]), leaf.dtype), self.columns)

    def is_cut_from_arrays(self) -> bool:
        """Return whether all arrays have several axes. A single element may be a batch."""
        return not self.is_element and all(len(column.shape) > 1 for column in nest.flatten(self.columns))


def array_samples(node: GraphNode) -> Iterator[int]:
    """Yield a checksum of some rows of each nest of arrays in a graph."""
    return (step.sample() for step in node.graph() if isinstance(step, ArrayRows))


def _as_column(leaf: object) -> object:
    if isinstance(leaf, list):
        return list_to_array(leaf)
    return leaf if is_stored_array(leaf) else np.asarray(leaf)


def is_stored_array(value: object) -> TypeGuard[StoredArray]:
    """Return whether ``value`` is an array in a file, which is read by slices."""
    return isinstance(getattr(value, "dtype", None), np.dtype) and all(
        hasattr(value, name) for name in ("shape", "chunks", "__getitem__")
    )


def _read_column(column: Array | StoredArray, index: RowIndex) -> Array:
    if isinstance(index, range):
        return np.array(column[index.start : index.stop : index.step])
    return column[index] if isinstance(column, np.ndarray) else read_stored(column, index)


def read_stored(column: StoredArray, index: NDArray[np.int64]) -> Array:
    """Return the rows of an array in a file in any order."""
    # h5py and zarr accept only increasing row numbers without repetitions.
    ordered, back = np.unique(index, return_inverse=True)
    return _read_ordered(column, ordered)[back]


def _read_ordered(column: StoredArray, ordered: NDArray[np.int64]) -> Array:
    """Read increasing row numbers, each chunk once, because the library unpacks whole chunks."""
    first, last = int(ordered[0]), int(ordered[-1])
    if last - first + 1 == len(ordered):
        return np.asarray(column[first : last + 1])
    chunk_rows = column.chunks[0] if column.chunks else None
    if not isinstance(chunk_rows, int):
        return np.asarray(column[ordered])
    starts = np.flatnonzero(np.diff(ordered // chunk_rows, prepend=-1)).tolist()
    if len(ordered) < _ROWS_WORTH_A_SLICE * len(starts):
        return np.asarray(column[ordered])
    rows = np.empty((len(ordered), *column.shape[1:]), column.dtype)
    for start, stop in zip(starts, [*starts[1:], len(ordered)], strict=True):
        first = int(ordered[start])
        rows[start:stop] = column[first : int(ordered[stop - 1]) + 1][ordered[start:stop] - first]
    return rows


class SequenceRows(RowSource):
    """An object with ``__len__`` and ``__getitem__``."""

    def __init__(self, sequence: Sequence[object]) -> None:
        super().__init__(len(sequence), f"from_source({type(sequence).__name__} of {len(sequence)})")
        self.sequence = sequence

    def row(self, index: int) -> object:
        """Return a copy of item ``index``."""
        try:
            return owned(self.sequence[index])
        except StopIteration as error:
            raise stopped(f"{type(self.sequence).__name__}[{index}]") from error

    def read_rows(self, index: RowIndex, run: Pass) -> list[object]:
        """Return copies of the items, in one call if the sequence has PyTorch's ``__getitems__``."""
        get_items = getattr(self.sequence, "__getitems__", None)
        if get_items is None:
            return super().read_rows(index, run)
        return list(map(owned, get_items(list(row_indices.rows([index])))))
