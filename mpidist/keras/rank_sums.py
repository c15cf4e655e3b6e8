"""Sums and equal values, over the ranks of a strategy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import keras
import numpy as np
from keras import ops

from mpidist.arrays.dtypes import Array, is_half
from mpidist.keras.untyped import KerasObject, Tensors
from mpidist.strategies import Strategy

# Where a layer keeps the seed and the count of its random numbers.
_SEED = "seed_generator_state"
_MORE_THAN_STEPS = 1_000_003
# Of a dtype that counts rows: float32 does to 16 millions.
_COUNTING_BYTES = 4


class RankSums:
    """Combines values of a model over the ranks of a strategy.

    With one rank nothing is sent, and values stay as they are.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._communicator = strategy.extended.communicator
        self.replica_counts = strategy.extended.replica_counts
        self.rank = 0 if self._communicator is None else self._communicator.rank

    @property
    def are_needed(self) -> bool:
        """Whether there are other ranks."""
        return self._communicator is not None

    def take_mean(self, arrays: Sequence[Array], rows: int, marks: Sequence[bool] = ()) -> list[bool]:
        """Average arrays over ranks by their rows, where they lie (collective).

        Those of a rank without rows count as zeros.

        Args:
            arrays: No two of them share memory.
            rows: How many rows of the global batch this rank has.
            marks: Flags that go along.

        Returns:
            Which of the marks are set on any rank.
        """
        if self._communicator is None:
            return list(marks)
        wide = [array.astype(np.float32) if is_half(array.dtype) else array for array in arrays]
        for array in wide:
            if rows:
                np.multiply(array, array.dtype.type(rows), out=array)
            else:
                array.fill(0)
        together = [*wide, _counted(wide, [rows, *marks])]
        self._communicator.all_reduce("SUM", together, out=together)
        count, *found = together[-1]
        for array, total in zip(arrays, wide, strict=True):
            np.divide(total, total.dtype.type(count), out=total)
            if total is not array:
                array[...] = total.astype(array.dtype)
        return [ranks > 0 for ranks in found]

    def mean_by_rows(self, flats: Sequence[object], rows: int) -> list[object]:
        """Return packed values, averaged over ranks by their rows (collective).

        Args:
            flats: Those of :func:`pack`.
            rows: How many rows of the global batch this rank has.
        """
        if self._communicator is None:
            return list(flats)
        arrays = [*map(ops.convert_to_numpy, flats)]
        *sums, count = self._communicator.all_reduce("SUM", [*arrays, _counted(arrays, [rows])])
        return [np.divide(array, array.dtype.type(count[0]), out=array) for array in sums]

    def total(self, variables: Iterable[KerasObject]) -> None:
        """Give each variable of a metric the value that it has over all ranks (collective)."""
        if self._communicator is None:
            return
        kinds: dict[str, list[KerasObject]] = {"sum": [], "mean": [], "first": []}
        for variable in variables:
            kinds[variable.aggregation if variable.aggregation in kinds else "first"].append(variable)
        for op in ("sum", "mean"):
            if kinds[op]:
                values = self._communicator.all_reduce(op.upper(), list(map(ops.convert_to_numpy, kinds[op])))
                _assign(kinds[op], values)
        self.make_equal(kinds["first"])

    def mean_of_logs(self, logs: dict[str, object], rows: int) -> dict[str, float]:
        """Return the logs of a step, averaged over ranks by their rows (collective)."""
        values = {name: np.float64(ops.convert_to_numpy(value)) for name, value in logs.items()}
        if self._communicator is None:
            return values
        # Those of a rank without rows may be anything, also NaN.
        weighted = {name: value * rows if rows else np.float64(0) for name, value in values.items()}
        sums, count = self._communicator.all_reduce("SUM", [weighted, np.float64(rows)])
        return {name: value / count for name, value in sums.items()}

    def make_equal(self, variables: Sequence[KerasObject]) -> None:
        """Give each variable the value of the first rank (collective).

        Seeds are moved apart, so that ranks draw different numbers.
        """
        if self._communicator is None or not variables:
            return
        values = self._communicator.broadcast(list(map(ops.convert_to_numpy, variables)))
        for variable, value in zip(variables, values, strict=True):
            if variable.name == _SEED:
                # The generators of PyTorch's backend add seed and count up.
                value = value + np.array([self.rank * _MORE_THAN_STEPS, 0]).astype(value.dtype)
            variable.assign(value)

    def of_first(self, value: object) -> KerasObject:
        """Return the small object of the first rank (collective)."""
        return value if self._communicator is None else self._communicator.broadcast_object(value)

    def any_of(self, flag: bool) -> bool:
        """Return whether any rank says so (collective)."""
        return flag if self._communicator is None else bool(self._communicator.all_reduce("MAX", np.int64(flag)))

    def concatenate(self, value: Tensors) -> Tensors:
        """Return the rows of all ranks, in rank order (collective)."""
        if self._communicator is None:
            return value
        return keras.tree.map_structure(self._communicator.all_gather, value)


def _counted(arrays: Sequence[Array], numbers: Sequence[int]) -> Array:
    """Return counts as an array of the dtype of others, or float64.

    All are then one message.
    """
    counts = arrays and arrays[0].dtype.itemsize >= _COUNTING_BYTES
    return np.array(numbers, arrays[0].dtype if counts else np.float64)


def pack(tensors: Sequence[Tensors], rows: int) -> list[object]:
    """Return tensors, times the number of rows, as one flat tensor for each dtype.

    Those of 16 bits become float32, which has room for such products.
    """
    return [
        ops.concatenate([ops.reshape(ops.multiply(_wide(tensors[i]), float(rows)), (-1,)) for i in places])
        for places in _places_by_dtype(tensors)
    ]


def _wide(tensor: Tensors) -> Tensors:
    return ops.cast(tensor, "float32") if _dtype_of(tensor) in ("float16", "bfloat16") else tensor


def unpack(flats: Iterable[object], like: Sequence[Tensors]) -> list[object]:
    """Return the tensors of :func:`pack`, in the shapes and dtypes of ``like``."""
    tensors: list[object] = [None] * len(like)
    for flat, places in zip(flats, _places_by_dtype(like), strict=True):
        flat, start = ops.convert_to_tensor(flat), 0
        for i in places:
            end = start + int(np.prod(like[i].shape))
            tensors[i] = ops.cast(ops.reshape(flat[start:end], tuple(like[i].shape)), _dtype_of(like[i]))
            start = end
    return tensors


def _places_by_dtype(tensors: Sequence[Tensors]) -> list[list[int]]:
    places: dict[str, list[int]] = {}
    for i, tensor in enumerate(tensors):
        places.setdefault(_dtype_of(tensor), []).append(i)
    return list(places.values())


def _dtype_of(tensor: Tensors) -> str:
    name: str = keras.backend.standardize_dtype(tensor.dtype)
    return name


def _assign(variables: Iterable[KerasObject], values: Iterable[object]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
