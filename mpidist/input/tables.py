"""Tables: sources whose rows are read by number, one row or one batch at a time, and only those asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpidist.core import nest
from mpidist.input.element_spec import ArraySpec, spec_of
from mpidist.input.elements import call, list_to_array, map_leaves, owned, stack
from mpidist.input.row_indices import RowIndex, as_array, rows


class Table(ABC):
    """Rows that can be read by number, in any order and any number of times."""

    def __init__(self, length: int, text: str) -> None:
        self.length = length
        self.text = text

    @abstractmethod
    def row(self, index: int) -> Any:
        """Return row ``index`` as the source gives it."""

    def read(self, index: RowIndex) -> Any:
        """Return the rows of ``index``, at least one, as one batch of new arrays."""
        return stack([self.row(i) for i in rows([index])])

    def spec(self) -> Any:
        """Return what a row looks like, None where that cannot be told because there is none."""
        return spec_of(self.row(0)) if self.length else None


class RangeTable(Table):
    """The int64 numbers of a ``range``; nothing is stored."""

    def __init__(self, numbers: range) -> None:
        super().__init__(len(numbers), str(numbers))
        self.numbers = numbers

    def row(self, index: int) -> Any:
        """Return number ``index``."""
        return np.int64(self.numbers[index])

    def read(self, index: RowIndex) -> Any:
        """Return the numbers of ``index``."""
        if isinstance(index, range):
            return as_array(self.numbers[index.start : index.stop : index.step])
        return self.numbers.start + self.numbers.step * index

    def spec(self) -> Any:
        """Return that of an int64 number."""
        return ArraySpec((), np.dtype(np.int64))


class ArrayTable(Table):
    """A nest of arrays with a common first axis; a batch is one slice or one fancy index of each.

    Args:
        columns: NumPy arrays (memory-mapped ones too), or arrays in a file as h5py and zarr have them.
    """

    def __init__(self, columns: Any) -> None:
        leaves = nest.flatten(columns)
        super().__init__(len(leaves[0]), "")
        self.columns = columns
        self.text = f"from_tensor_slices({', '.join(f'{leaf.shape} {leaf.dtype}' for leaf in leaves)})"

    def row(self, index: int) -> Any:
        """Return row ``index`` of each array."""
        return map_leaves(lambda column: _own(column[index]), self.columns)

    def read(self, index: RowIndex) -> Any:
        """Return the rows of ``index`` of each array."""
        return map_leaves(lambda column: _read_column(column, index), self.columns)

    def spec(self) -> Any:
        """Return that of the arrays without their first axis."""
        return map_leaves(lambda leaf: ArraySpec(tuple(leaf.shape[1:]), leaf.dtype), self.columns)


def _own(value: Any) -> Any:
    """Return a copy of an array, so that changing an element in place cannot change the source."""
    return np.array(value) if getattr(value, "ndim", 0) else value


def _read_column(column: Any, index: RowIndex) -> np.ndarray[Any, Any]:
    if isinstance(index, range):
        return np.array(column[index.start : index.stop : index.step])
    if isinstance(column, np.ndarray):
        taken: np.ndarray[Any, Any] = column[index]
        return taken
    # Arrays in files take row numbers only in increasing order and each once.
    ordered, back = np.unique(index, return_inverse=True)
    return np.asarray(column[ordered])[back]


class SequenceTable(Table):
    """Any object with ``__len__`` and ``__getitem__``, asked for one row at a time."""

    def __init__(self, source: Any) -> None:
        super().__init__(len(source), f"from_source({type(source).__name__} of {len(source)})")
        self.source = source

    def row(self, index: int) -> Any:
        """Return a copy of ``source[index]``."""
        return owned(self.source[index])


class MappedTable(Table):
    """A table whose rows go through a function when they are read, and only then."""

    def __init__(self, table: Table, fn: Callable[..., Any]) -> None:
        super().__init__(table.length, f"{table.text}.map")
        self.table = table
        self.fn = fn

    def row(self, index: int) -> Any:
        """Return the function of row ``index``."""
        return owned(call(self.fn, self.table.row(index)))


class ZippedTable(Table):
    """Several tables side by side, as long as the shortest.

    Args:
        tables: The tables.
        build: Makes an element of theirs.
    """

    def __init__(self, tables: Sequence[Table], build: Callable[[list[Any]], Any]) -> None:
        text = ", ".join(table.text for table in tables)
        super().__init__(min(table.length for table in tables), f"zip({text})")
        self.tables = tables
        self.build = build

    def row(self, index: int) -> Any:
        """Return row ``index`` of each table."""
        return self.build([table.row(index) for table in self.tables])

    def read(self, index: RowIndex) -> Any:
        """Return the rows of ``index`` of each table."""
        return self.build([table.read(index) for table in self.tables])

    def spec(self) -> Any:
        """Return the specs of the tables."""
        specs = [table.spec() for table in self.tables]
        return None if any(spec is None for spec in specs) else self.build(specs)


def array_table(tensors: Any) -> ArrayTable:
    """Return the table of a nest of arrays: tuples and dicts are structure, a list is one array.

    Raises:
        ValueError: No arrays, an array without axes, or first axes of different sizes.
    """
    columns = map_leaves(_as_column, tensors)
    sizes: dict[int, str] = {}
    for path, column in nest.flatten_with_path(columns):
        if not column.shape:
            raise ValueError(
                f"from_tensor_slices() got a value without axes{' at ' + path if path else ''}; expected "
                "arrays whose first axis is cut into elements; for a single element give it as "
                "np.array([value])"
            )
        sizes.setdefault(column.shape[0], path)
    if len(sizes) != 1:
        found = ", ".join(f"{size} at {path}" for size, path in sizes.items())
        raise ValueError(
            f"from_tensor_slices() got arrays whose first axes differ: {found or 'no arrays at all'}; "
            "expected arrays with one row per element each"
        )
    return ArrayTable(columns)


def is_stored_array(value: Any) -> bool:
    """Whether ``value`` is an array in a file, of h5py or zarr, to be read by slices and not whole."""
    return isinstance(getattr(value, "dtype", None), np.dtype) and all(
        hasattr(value, name) for name in ("shape", "chunks", "__getitem__", "__len__")
    )


def _as_column(leaf: Any) -> Any:
    if isinstance(leaf, list):
        return list_to_array(leaf)
    return leaf if is_stored_array(leaf) else np.asarray(leaf)
