"""Sums and equal values over the ranks of a strategy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import keras
import numpy as np
from keras import ops

from mpidist.arrays.dtypes import Array
from mpidist.strategies import Strategy

T = TypeVar("T")
# Name of the variable of a layer's seed and the count of its random numbers.
_SEED = "seed_generator_state"
_MORE_THAN_STEPS = 1_000_003
# Smallest item of a dtype that counts rows: float32 is exact to 16 million.
_COUNTING_BYTES = 4


class RankSums:
    """Combines values of a model over the ranks of a strategy. With one rank, values stay unchanged."""

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
        """Replace arrays by their sums over ranks, or write these into ``out`` (collective).

        No two arrays may share memory. Return the sum of the ranks' ``rows``, and for each mark the number of ranks
        that have set it.
        """
        # Counts of the arrays' dtype travel in the same message.
        counts_rows = arrays and arrays[0].dtype.itemsize >= _COUNTING_BYTES
        counts = np.array([rows, *marks], arrays[0].dtype if counts_rows else np.float64)
        if self._communicator is not None:
            self._communicator.all_reduce("SUM", [*arrays, counts], out=[*(arrays if out is None else out), counts])
        return counts

    def total(self, variables: Iterable[keras.Variable]) -> None:
        """Set each variable of a metric to its value over all ranks (collective)."""
        if self._communicator is None:
            return
        kinds: dict[str, list[keras.Variable]] = {"sum": [], "mean": [], "first": []}
        for variable in variables:
            kinds[variable.aggregation if variable.aggregation in kinds else "first"].append(variable)
        for op in ("sum", "mean"):
            if kinds[op]:
                values = self._communicator.all_reduce(op.upper(), list(map(ops.convert_to_numpy, kinds[op])))
                for variable, value in zip(kinds[op], values, strict=True):
                    variable.assign(value)
        self.make_equal(kinds["first"])

    def mean_of_logs(self, logs: dict[str, object], rows: int) -> dict[str, float]:
        """Return the logs of a step, averaged over ranks by their rows (collective)."""
        values = {name: np.float64(ops.convert_to_numpy(value)) for name, value in logs.items()}
        if self._communicator is None:
            return values
        # Logs of a rank without rows are arbitrary, for example NaN.
        weighted = {name: value * rows if rows else np.float64(0) for name, value in values.items()}
        sums, count = self._communicator.all_reduce("SUM", [weighted, np.float64(rows)])
        return {name: value / count for name, value in sums.items()}

    def make_equal(self, variables: Sequence[keras.Variable]) -> None:
        """Set each variable to the first rank's value (collective). Seeds differ, so that ranks draw other numbers."""
        if self._communicator is None or not variables:
            return
        values = self._communicator.broadcast(list(map(ops.convert_to_numpy, variables)))
        for variable, value in zip(variables, values, strict=True):
            if variable.name == _SEED:
                # The generators of PyTorch's backend add seed and count.
                value = value + np.array([self.rank * _MORE_THAN_STEPS, 0]).astype(value.dtype)
            variable.assign(value)

    def of_first(self, value: T) -> T:
        """Return the small object of the first rank (collective)."""
        of_first: T = value if self._communicator is None else self._communicator.broadcast_object(value)
        return of_first

    def any_of(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank (collective)."""
        return flag if self._communicator is None else bool(self._communicator.all_reduce("MAX", np.int64(flag)))

    def concatenate(self, value: object) -> object:
        """Return the rows of all ranks, in rank order (collective)."""
        if self._communicator is None:
            return value
        return keras.tree.map_structure(self._communicator.all_gather, value)
