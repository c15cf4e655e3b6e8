"""Arrays in files, of h5py and zarr: recognising them, and reading some of their rows and no others."""

from __future__ import annotations

from typing import Any

import numpy as np

# So many rows of a chunk are cheaper to pick out of one slice than to ask for one by one.
_ROWS_WORTH_A_SLICE = 4


def is_stored_array(value: Any) -> bool:
    """Whether ``value`` is an array in a file, of h5py or zarr, to be read by slices and not whole."""
    return isinstance(getattr(value, "dtype", None), np.dtype) and all(
        hasattr(value, name) for name in ("shape", "chunks", "__getitem__")
    )


def read_rows(column: Any, index: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, Any]:
    """Return the rows of ``index``, in its order, from an array in a file.

    A chunk, which the library reads and unpacks as a whole, is asked for once.
    """
    # Arrays in files take row numbers only in increasing order and each once.
    ordered, back = np.unique(index, return_inverse=True)
    return _read_ordered(column, ordered)[back]


def _read_ordered(column: Any, ordered: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, Any]:
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
