"""Metrics: numbers summed on each replica, and over replicas when they are read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpidist.arrays.convert import to_array
from mpidist.arrays.dtypes import Array, as_dtype
from mpidist.core.context import get_replica_context, has_strategy
from mpidist.core.options import VariableAggregation, VariableSynchronization
from mpidist.values import Variable
from mpidist.values.placement import array_of, on_host, place_of, place_of_operands

Result = np.floating[Any] | np.integer[Any]


class Metric:
    """The base of all metrics: totals in ON_READ variables with aggregation SUM.

    Create it inside ``with strategy.scope():`` (collective). Under a strategy that keeps one copy of each variable the
    replicas add to common totals: ``update_state`` is then collective over the replicas in sync. A subclass names its
    totals in ``total_names`` and computes the result from their sums over all replicas.

    Args:
        name: For the names of its variables.
        dtype: Dtype of the totals.
    """

    total_names: tuple[str, ...] = ("total",)

    def __init__(self, name: str, dtype: DTypeLike = "float64") -> None:
        self.name = name
        self._totals = {
            total: Variable(
                np.zeros((), as_dtype(dtype)),
                name=f"{name}/{total}",
                trainable=False,
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation.SUM,
            )
            for total in self.total_names
        }

    @property
    def variables(self) -> list[Variable]:
        """The variables that hold the totals."""
        return list(self._totals.values())

    @property
    def _has_copies(self) -> bool:
        """Whether each replica has totals of its own, as where variables have several copies."""
        return all(total.synchronization == VariableSynchronization.ON_READ for total in self._totals.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        """Update the metric by the arguments of ``update_state``, and return its value here.

        Inside ``strategy.run`` that is the metric over the values of this replica alone, which takes no messages
        beyond those of ``update_state``; ``result`` is over all replicas. Of common totals it is the same.

        >>> metric = Mean()
        >>> metric([1.0, 2.0]), metric(6.0)
        (np.float64(1.5), np.float64(3.0))
        """
        self.update_state(*args, **kwargs)
        return self._made_of(self._values())

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Add to the totals of this replica; see the subclasses."""
        raise NotImplementedError(f"{type(self).__name__} does not implement update_state()")

    def result(self) -> Result:
        """Return the metric over all that every replica has been given since the last reset.

        Collective: call it on every rank, or inside ``strategy.run`` on every replica.

        Returns:
            A NumPy scalar, the same everywhere; totals on a device are waited for.
        """
        context = get_replica_context()
        sums = self._values()
        if context is not None and has_strategy() and self._has_copies:
            sums = context.all_reduce("SUM", sums)
        return self._made_of(sums)

    def reset_state(self) -> None:
        """Start anew. No communication; call it on every rank, outside ``strategy.run``."""
        for total in self._totals.values():
            total.assign(np.zeros((), total.dtype))

    # The older of the two names that Keras has had for it.
    reset_states = reset_state

    def __repr__(self) -> str:
        # Not the result, which takes all ranks.
        return f"<{type(self).__name__} {self.name!r}>"

    def _values(self) -> list[Array]:
        return [total.value() for total in self._totals.values()]

    def _made_of(self, sums: list[Array]) -> Result:
        return self._result_of(*(on_host(to_array(value))[()] for value in sums))

    def _result_of(self, *sums: Any) -> Result:
        raise NotImplementedError(f"{type(self).__name__} does not implement _result_of()")

    def _add(self, **amounts: object) -> None:
        """Add to the totals of this replica; no communication."""
        for name, amount in amounts.items():
            total = self._totals[name]
            array = to_array(amount)
            total.assign_add(place_of(array).casts(array, total.dtype))

    def _checkpoint_children(self) -> dict[str, Variable]:
        """Return the variables that a checkpoint holds, by name."""
        return dict(self._totals)


class Sum(Metric):
    """The sum of all values (tf.keras.metrics.Sum).

    Args:
        name: For the names of its variables.
        dtype: Dtype of the total.

    >>> metric = Sum()
    >>> metric.update_state([1.0, 2.0])
    >>> metric.result()
    np.float64(3.0)
    """

    def __init__(self, name: str = "sum", dtype: DTypeLike = "float64") -> None:
        super().__init__(name, dtype)

    def update_state(self, values: object, sample_weight: object = None) -> None:
        """Add values of this replica; call it inside ``strategy.run``, or where no strategy is active.

        Args:
            values: A number or an array.
            sample_weight: A number or an array that broadcasts against the values.

        Raises:
            ValueError: Weights that do not broadcast; called in cross-replica context with several replicas.
        """
        total, _ = _weighted_sum(values, sample_weight)
        self._add(total=total)

    def _result_of(self, *sums: object) -> Any:
        return sums[0]


class Mean(Metric):
    """The mean of all values, by weight where weights are given (tf.keras.metrics.Mean); 0 before any.

    Args:
        name: For the names of its variables.
        dtype: Dtype of total and count.

    >>> metric = Mean()
    >>> metric.update_state([1.0, 2.0, 6.0])
    >>> metric.result()
    np.float64(3.0)
    """

    total_names = ("total", "count")

    def __init__(self, name: str = "mean", dtype: DTypeLike = "float64") -> None:
        super().__init__(name, dtype)

    def update_state(self, values: object, sample_weight: object = None) -> None:
        """Add values of this replica; see ``Sum.update_state``."""
        total, count = _weighted_sum(values, sample_weight)
        self._add(total=total, count=count)

    def _result_of(self, *sums: Any) -> Any:
        total, count = sums
        return total / count if count else total.dtype.type(0)


class Accuracy(Mean):
    """How often predicted labels are the true ones (tf.keras.metrics.Accuracy).

    Args:
        name: For the names of its variables.
        dtype: Dtype of total and count.

    >>> metric = Accuracy()
    >>> metric.update_state([1, 2, 3, 4], [1, 2, 3, 0])
    >>> metric.result()
    np.float64(0.75)
    """

    def __init__(self, name: str = "accuracy", dtype: DTypeLike = "float64") -> None:
        super().__init__(name, dtype)

    def update_state(self, y_true: object, y_pred: object, sample_weight: object = None) -> None:  # type: ignore[override]
        """Compare labels of this replica; see ``Sum.update_state``.

        Args:
            y_true: True labels.
            y_pred: Predicted labels, of the same shape: take ``argmax`` of scores first.
            sample_weight: A number or an array that broadcasts against the labels.

        Raises:
            ValueError: Shapes that differ, or weights that do not broadcast.
        """
        true, predicted = array_of(y_true, "y_true"), array_of(y_pred, "y_pred")
        if true.shape != predicted.shape:
            raise ValueError(
                f"y_true has shape {true.shape} and y_pred {predicted.shape}; expected a predicted label for each "
                "true one: scores.argmax(axis=-1)"
            )
        place = place_of_operands((true, predicted))
        with place.current():
            hits = np.equal(place.brings(true), place.brings(predicted))
        super().update_state(hits, sample_weight)


class SparseCategoricalAccuracy(Mean):
    """How often the class with the highest score is the true one (tf.keras.metrics.SparseCategoricalAccuracy).

    Args:
        name: For the names of its variables.
        dtype: Dtype of total and count.

    >>> metric = SparseCategoricalAccuracy()
    >>> metric.update_state([2, 1], [[0.1, 0.6, 0.3], [0.05, 0.95, 0.0]])
    >>> metric.result()
    np.float64(0.5)
    """

    def __init__(self, name: str = "sparse_categorical_accuracy", dtype: DTypeLike = "float64") -> None:
        super().__init__(name, dtype)

    def update_state(self, y_true: object, y_pred: object, sample_weight: object = None) -> None:  # type: ignore[override]
        """Compare classes of this replica with the highest scores; see ``Sum.update_state``.

        Args:
            y_true: True classes, as numbers from 0; a last axis of length 1 more is allowed.
            y_pred: Scores or probabilities, along the last axis those of each class. Of equal ones the first counts.
            sample_weight: A number or an array that broadcasts against the classes.

        Raises:
            ValueError: Shapes that do not fit, no classes, or weights that do not broadcast.
        """
        true, scores = array_of(y_true, "y_true"), array_of(y_pred, "y_pred")
        rows = scores.shape[:-1]
        if not scores.ndim or not scores.shape[-1] or true.shape not in (rows, (*rows, 1)):
            raise ValueError(
                f"y_true has shape {true.shape} and y_pred {scores.shape}; expected a class for each row of scores, "
                "y_true of y_pred.shape[:-1]; labels that are one-hot: y_true.argmax(axis=-1)"
            )
        place = place_of_operands((true, scores))
        with place.current():
            hits = np.equal(place.brings(true), place.brings(scores).argmax(axis=-1).reshape(true.shape))
        super().update_state(hits, sample_weight)


def _weighted_sum(values: object, sample_weight: object) -> tuple[object, object]:
    """Return the weighted sum of the values, and the sum of the weights."""
    given = array_of(values, "values")
    place = place_of(given)
    with place.current():
        array = given.astype(np.float64)
        if sample_weight is None:
            return np.sum(array), array.size
        weights = place.brings(array_of(sample_weight, "sample_weight")).astype(np.float64)
        weights = _fitted(weights, array)
        return np.sum(array * weights), np.sum(weights)


def _fitted(weights: Array, array: Array) -> Array:
    """Return ``weights`` in the shape of ``array``."""
    if 0 < weights.ndim == array.ndim - 1:
        weights = weights[..., np.newaxis]
    try:
        return np.broadcast_to(weights, array.shape)
    except ValueError:
        raise ValueError(
            f"sample_weight of shape {weights.shape} does not broadcast against values of shape {array.shape}; "
            f"expected a number, or shape {array.shape}"
        ) from None
