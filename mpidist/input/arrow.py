"""Rows of Apache Arrow tables and Parquet files. Only the pieces of a file that hold the requested rows are read.

pyarrow is imported here, and only for its own objects.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.input.elements import owned, stack
from mpidist.input.nodes import Pass, RowSource
from mpidist.input.row_indices import RowIndex, as_array

# The number of rows, and a function that loads them as a table or record batch of pyarrow.
_Piece = tuple[int, Callable[[], Any]]
Columns = dict[str, Array]

_KINDS = ("Table", "RecordBatch", "FileSystemDataset", "InMemoryDataset", "UnionDataset", "ParquetFile")
# Bytes of unpacked pieces (record batches or row groups) that stay in memory, at least one piece.
_KEPT_BYTES = 128 << 20


def is_arrow(source: object) -> bool:
    """Return whether ``source`` is a table or dataset of pyarrow."""
    return type(source).__module__.split(".")[0] == "pyarrow" and type(source).__name__ in _KINDS


def arrow_rows(source: Any, columns: Sequence[str] | None = None) -> ArrowRows | Callable[[], Iterator[object]]:
    """Return the rows of an object of pyarrow. Without row numbers: a function that yields them."""
    kind = type(source).__name__
    names = source.schema_arrow.names if kind == "ParquetFile" else source.schema.names
    unknown = [name for name in columns or () if name not in names]
    if unknown:
        raise ValueError(f"columns has {unknown} in it; expected some of {names}")
    chosen = list(names if columns is None else columns)
    pieces: list[_Piece] | None
    if kind in ("Table", "RecordBatch"):
        source = source.select(chosen)
        pieces = [(batch.num_rows, batch.slice) for batch in (source.to_batches() if kind == "Table" else [source])]
    elif kind == "ParquetFile":
        sizes = [source.metadata.row_group(i).num_rows for i in range(source.num_row_groups)]
        pieces = [(n, partial(source.read_row_group, i, columns=chosen)) for i, n in enumerate(sizes)]
    else:
        pieces = _row_groups(source, chosen)
    return partial(_stream, source, chosen) if pieces is None else ArrowRows(pieces, kind)


def _row_groups(dataset: Any, columns: list[str]) -> list[_Piece] | None:
    """Return the row groups of a dataset of Parquet files. None for other files and for filtered datasets."""
    from pyarrow.dataset import ParquetFileFragment

    try:
        fragments = list(dataset.get_fragments())
    except ValueError:  # it has been filtered or projected
        return None
    if not all(isinstance(fragment, ParquetFileFragment) for fragment in fragments):
        return None
    load = partial(partial, schema=dataset.schema, columns=columns)
    groups = [group for fragment in fragments for group in fragment.split_by_row_group()]
    return [(group.row_groups[0].num_rows, load(group.to_table)) for group in groups]


def _stream(dataset: Any, columns: list[str]) -> Iterator[dict[str, object]]:
    for batch in dataset.to_batches(columns=columns):
        arrays = {name: _to_numpy(name, batch.column(name)) for name in columns}
        for i in range(batch.num_rows):
            yield _row(arrays, i)


class ArrowRows(RowSource):
    """The rows of consecutive pieces. A row is a dict of its columns."""

    def __init__(self, pieces: Sequence[_Piece], kind: str) -> None:
        held = [(size, load) for size, load in pieces if size]
        self._starts = np.array([0, *accumulate(size for size, _ in held)], np.int64)
        super().__init__(int(self._starts[-1]), f"from_source({kind} of {int(self._starts[-1])})")
        self._loaders = [load for _, load in held]
        self._kept: OrderedDict[int, tuple[int, Columns]] = OrderedDict()
        self._lock = threading.Lock()

    def _piece(self, number: int) -> Columns:
        # Several passes may read at the same time.
        with self._lock:
            if number not in self._kept:
                loaded = self._loaders[number]()
                columns = {name: _to_numpy(name, loaded.column(name)) for name in loaded.schema.names}
                self._kept[number] = (loaded.nbytes, columns)
                while len(self._kept) > 1 and sum(size for size, _ in self._kept.values()) > _KEPT_BYTES:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(number)
            return self._kept[number][1]

    def _columns(self, index: RowIndex) -> Columns:
        """Return the rows of ``index`` of each column."""
        numbers = as_array(index)
        order = np.argsort(numbers, kind="stable")
        ordered = numbers[order]
        bounds = np.searchsorted(ordered, self._starts)
        parts: list[Columns] = []
        for number in np.flatnonzero(np.diff(bounds)).tolist():
            local = ordered[bounds[number] : bounds[number + 1]] - self._starts[number]
            parts.append({name: column[local] for name, column in self._piece(number).items()})
        back = np.argsort(order)
        return {name: np.concatenate([part[name] for part in parts])[back] for name in parts[0]}

    def read_rows(self, index: RowIndex, run: Pass) -> list[object]:
        """Return the rows of ``index`` as a list."""
        columns = self._columns(index)
        return [_row(columns, i) for i in range(len(index))]

    def read(self, index: RowIndex, run: Pass) -> object:
        """Return the rows of ``index`` of each column. Text, lists and structs are as from any other source."""
        return {name: _stacked(column) for name, column in self._columns(index).items()}


def _row(columns: Columns, number: int) -> dict[str, object]:
    # Lists are views of pyarrow's memory.
    return {
        name: owned(column[number]) if column.dtype == object else column[number] for name, column in columns.items()
    }


def _stacked(column: Array) -> object:
    # An array of fixed-size bytes would lose trailing zeros.
    if column.dtype != object or any(isinstance(value, bytes) for value in column):
        return column
    return stack(column.tolist())


def _to_numpy(name: str, column: Any) -> Array:
    """Return a column of pyarrow as an array, without a copy if possible."""
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):  # too large for one array of text
            column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if hasattr(column, "to_numpy_ndarray"):
        tensors: Array = column.to_numpy_ndarray()
        return tensors
    kind = column.type
    is_fixed = pa.types.is_fixed_size_list(kind)
    if column.null_count and (pa.types.is_integer(kind) or pa.types.is_boolean(kind) or is_fixed):
        raise ValueError(
            f"column {name!r} of type {kind} has {column.null_count} nulls, for which NumPy has no {kind}. Fill them "
            "before, as table[name].fill_null(0) does, or choose others: from_source(table, columns=[...])"
        )
    if is_fixed:
        values = _to_numpy(name, column.flatten())
        return values.reshape(len(column), kind.list_size, *values.shape[1:])
    if pa.types.is_nested(kind) and not (pa.types.is_list(kind) and pa.types.is_primitive(kind.value_type)):
        objects = np.empty(len(column), object)
        for i, value in enumerate(column.to_pylist()):
            objects[i] = value
        return objects
    return np.asarray(column.to_numpy(zero_copy_only=False))
