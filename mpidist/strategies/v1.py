"""The strategies as ``tf.compat.v1`` has them: ``reduce`` without an axis, and datasets from NumPy arrays."""

from __future__ import annotations

from typing import Any

from mpidist.core.enums import ReduceOp
from mpidist.input import Dataset
from mpidist.strategies.mirrored import MirroredStrategy
from mpidist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpidist.strategies.one_device import OneDeviceStrategy
from mpidist.strategies.strategy import Strategy


class StrategyV1(Strategy):
    """What the v1 forms add to a strategy."""

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | tuple[int, ...] | None = None) -> Any:
        """Do what ``Strategy.reduce`` does; ``axis`` may be left out (collective)."""
        return super().reduce(reduce_op, value, axis)

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: Any = None) -> Dataset:
        """Return a dataset of the slices of ``numpy_input`` along axis 0.

        Every rank builds it from its own arrays; nothing is communicated.

        Args:
            numpy_input: Nest of arrays of equal first dimension; a list of arrays is stacked into one.
            session: Ignored.

        >>> strategy = OneDeviceStrategyV1("cpu:0")
        >>> len(strategy.experimental_make_numpy_dataset([[1, 2], [3, 4], [5, 6]]))
        3
        """
        del session
        return Dataset.from_tensor_slices(numpy_input)


class OneDeviceStrategyV1(StrategyV1, OneDeviceStrategy):
    """OneDeviceStrategy in its v1 form."""


class MirroredStrategyV1(StrategyV1, MirroredStrategy):
    """MirroredStrategy in its v1 form."""


class MultiWorkerMirroredStrategyV1(StrategyV1, MultiWorkerMirroredStrategy):
    """MultiWorkerMirroredStrategy in its v1 form."""
