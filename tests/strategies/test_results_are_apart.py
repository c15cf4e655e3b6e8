"""What reduce and gather return is nobody else's: changing it changes no input, in any layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import IndexedSlices, VariableAggregation
from mpidist.arrays.convert import to_array
from tests.support.ranks.layouts import layouts, per_replica

pytestmark = pytest.mark.counts

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "reduce": lambda strategy, value: strategy.reduce("MEAN", value, axis=None),
    "gather": lambda strategy, value: strategy.gather(value, axis=0),
    "reduce_to": lambda strategy, value: strategy.extended.reduce_to("MIN", value, "cpu:0"),
    "batch_reduce_to": lambda strategy, value: strategy.extended.batch_reduce_to("MEAN", [(value, "cpu:0")])[0],
}


def overwrite(result: Any) -> None:
    array = to_array(result)
    # One that the ranks of a node share is read-only.
    if array.flags.writeable:
        array[...] = -1


@pytest.mark.parametrize("call", CALLS)
def test_inputs_stay_what_they_are(strategy: mpidist.Strategy, call: str) -> None:
    arrays = [np.arange(3.0) + i for i in range(strategy.num_replicas_in_sync)]
    value = per_replica(strategy, lambda i: arrays[i])
    result = CALLS[call](strategy, {"a": value})["a"]
    assert not any(np.shares_memory(to_array(result), array) for array in arrays)
    overwrite(result)
    for i, array in enumerate(arrays):
        np.testing.assert_array_equal(array, np.arange(3.0) + i)


def test_a_total_may_be_added_to(strategy: mpidist.Strategy) -> None:
    batches = [per_replica(strategy, lambda i, n=n: np.full(2, float(n))) for n in range(3)]
    total = np.zeros(2)
    for number, batch in enumerate(batches):
        reduced = strategy.reduce("MEAN", batch, axis=None)
        total = total + reduced if number else np.array(reduced)
        overwrite(reduced)
    np.testing.assert_array_equal(total, [3.0, 3.0])


def test_variables_and_slices(strategy: mpidist.Strategy) -> None:
    with strategy.scope():
        variable = mpidist.Variable(np.ones(3), aggregation=VariableAggregation.MEAN)
    overwrite(strategy.reduce("MEAN", variable, axis=None))
    overwrite(
        strategy.extended.reduce_to("MEAN", variable, variable if strategy.num_replicas_in_sync == 1 else "cpu:0")
    )
    np.testing.assert_array_equal(variable.numpy(), np.ones(3))
    slices = [IndexedSlices(np.ones((1, 2)), np.array([0]), (4, 2)) for _ in range(strategy.num_replicas_in_sync)]
    reduced = strategy.reduce("MEAN", per_replica(strategy, lambda i: slices[i]), axis=None)
    overwrite(reduced.values)
    overwrite(reduced.indices)
    for own in slices:
        assert (own.values.tolist(), own.indices.tolist()) == ([[1.0, 1.0]], [0])


@pytest.mark.torch
@pytest.mark.parametrize(
    "strategy", layouts("default", "one_device", "mirrored-2local", "multi_worker-1local"), indirect=True
)
def test_tensors_have_no_gradients(strategy: mpidist.Strategy) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")
    tensor = torch.ones(2, requires_grad=True)
    for result in (
        strategy.reduce("MEAN", per_replica(strategy, lambda i: tensor * 2), axis=None),
        strategy.gather(per_replica(strategy, lambda i: tensor * 2), axis=0),
    ):
        assert isinstance(result, torch.Tensor)
        assert not result.requires_grad
