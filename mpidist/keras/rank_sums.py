"""Sums and equal values, over the ranks of a strategy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import keras
import numpy as np
from keras import ops

from mpidist.arrays.dtypes import Array
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

    def add_up(
        self, arrays: Sequence[Array], rows: int, marks: Sequence[bool] = (), out: Sequence[Array] | None = None
    ) -> Array:
        """Replace arrays by their sums over ranks (collective).

        Args:
            arrays: No two of them share memory.
            rows: How many rows of the global batch this rank has.
            marks: Flags that go along.
            out: Gets the sums in place of the arrays.

        Returns:
            How many rows all ranks have, and on how many ranks each of the marks is set.
        """
        counts = _counted(arrays, [rows, *marks])
        if self._communicator is not None:
            self._communicator.all_reduce("SUM", [*arrays, counts], out=[*(arrays if out is None else out), counts])
        return counts

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


def _assign(variables: Iterable[KerasObject], values: Iterable[object]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
