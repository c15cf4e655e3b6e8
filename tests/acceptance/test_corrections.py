"""What running TensorFlow beside mpidist corrected (tf_distribute, section 19), where no other file has it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from tests.acceptance.checks import is_default, local_ids, make_variable, same
from tests.support.ranks.layouts import layouts, per_replica

pytestmark = pytest.mark.counts


def test_a_plain_value_along_an_axis_counts_in_every_replica(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    value = np.arange(6.0).reshape(2, 3)
    for axis in (0, 1, (0, 1)):
        same(strategy.reduce("SUM", value, axis=axis), n * value.sum(axis))
        same(strategy.reduce("MEAN", value, axis=axis), value.mean(axis))
        same(strategy.reduce("MAX", value, axis=axis), value.max(axis))


def test_zeros_of_any_shape_are_their_own_sum(strategy: Any) -> None:
    same(strategy.reduce("SUM", np.zeros((2, 2)), axis=None), np.zeros((2, 2)))


@pytest.mark.parametrize(("given", "said"), [(None, "returned nothing"), ("loss", "'loss'"), ({"a": None}, "nothing")])
@pytest.mark.parametrize("axis", [None, 0])
def test_what_a_function_without_return_gives(strategy: Any, given: Any, said: str, axis: int | None) -> None:
    with pytest.raises((TypeError, mpidist.PeerError), match=said):
        strategy.reduce("SUM", strategy.run(lambda: given), axis=axis)


def test_a_nest_has_an_entry_for_each_local_replica(strategy: Any) -> None:
    nest = {"a": 1, "b": (np.ones(2), None)}
    parts = strategy.experimental_local_results(nest)
    assert len(parts) == len(local_ids(strategy))
    assert all(part["a"] == 1 and part["b"][1] is None for part in parts)
    assert strategy.experimental_local_results(5) == (5,)


def test_results_without_axes_are_numbers_of_numpy(strategy: Any) -> None:
    for value in (per_replica(strategy, float), per_replica(strategy, lambda i: np.array(float(i))), 0.0, np.zeros(())):
        assert type(strategy.reduce("SUM", value, axis=None)) is np.float64
    assert type(strategy.reduce("MEAN", per_replica(strategy, lambda i: np.ones(2)), axis=0)) is np.float64
    assert type(strategy.reduce("MAX", 3, axis=None)) is np.int64
    variable = make_variable(strategy, 1.0)
    assert type(strategy.reduce("MEAN", variable, axis=None)) is np.float64


def test_a_number_is_no_destination(strategy: Any) -> None:
    value = per_replica(strategy, float)
    for destinations in (3, 3.0, True, None, [], ""):
        with pytest.raises((ValueError, mpidist.PeerError)) as raised:
            strategy.extended.reduce_to("SUM", value, destinations=destinations)
        assert "destinations is" in str(raised.value)


def test_another_strategys_variable_is_read_in_a_scope_and_not_assigned(strategy: Any) -> None:
    variable, is_ordinary = make_variable(strategy, 2.0), is_default(strategy)
    with mpidist.OneDeviceStrategy("cpu:0").scope():
        assert float(variable) + 1 == 3.0
        if is_ordinary:
            variable.assign(2.0)
            return
        for write in (variable.assign, variable.assign_add):
            with pytest.raises(RuntimeError, match="OneDeviceStrategy"):
                write(5.0)
    assert float(variable) == 2.0


def test_this_process_by_the_name_that_tensorflow_has_for_it() -> None:
    strategy = mpidist.OneDeviceStrategy("/job:localhost/replica:0/task:0/device:CPU:0")
    assert strategy.extended.worker_devices == ("cpu:0",)


def test_a_variable_is_a_distributed_value_that_shows_itself(strategy: Any) -> None:
    variable = make_variable(strategy, [1.0, 2.5], synchronization=mpidist.VariableSynchronization.ON_READ)
    assert isinstance(variable, mpidist.DistributedValues)
    text = repr(variable)
    assert text.startswith("<Variable 'Variable")
    assert text.count("[1. , 2.5]") == len(variable.values)
    if len(variable.values) > 1:
        assert all(f"{i}: [1. , 2.5]" in text for i in local_ids(strategy))
    assert "[0., 0., ..., 0., 0.]" in repr(make_variable(strategy, np.zeros(1000)))
    passed: list[Any] = []
    strategy.run(passed.append, args=(variable,))
    assert all(value is variable for value in passed)


def test_sums_along_an_axis_are_rounded_once(strategy: Any) -> None:
    value = per_replica(strategy, lambda i: np.array([2048.0, 0.99], np.float16))
    exact = sum(np.float32(np.float16(x)) for x in (2048.0, 0.99) * strategy.num_replicas_in_sync)
    result = strategy.reduce("SUM", value, axis=0)
    assert (result.dtype, result) == (np.float16, np.float16(exact))


@pytest.mark.parametrize("strategy", layouts("mirrored-2local", "multi_worker-*"), indirect=True)
def test_a_captured_value_is_handed_on_as_the_replicas(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    captured = per_replica(strategy, lambda i: np.full(2, float(i)))

    def replica() -> Any:
        parts = mpidist.get_replica_context().merge_call(strategy_and_values, args=({"x": captured},))
        return {"x": captured, "sum": parts}

    def strategy_and_values(merged: Any, values: Any) -> Any:
        return merged.reduce("SUM", values["x"], axis=None)

    results = strategy.run(replica)
    same(strategy.reduce("SUM", results["x"], axis=None), np.full(2, n * (n - 1) / 2))
    for part in strategy.experimental_local_results(results["sum"]):
        same(part, np.full(2, n * (n - 1) / 2))


@pytest.mark.parametrize("strategy", layouts("mirrored-2local", "central-*"), indirect=True)
def test_a_captured_value_in_an_update_is_that_of_the_copy(strategy: Any) -> None:
    captured = per_replica(strategy, float)
    variable = make_variable(strategy, 0.0)
    if len(variable.values) < strategy.num_replicas_in_sync:
        with pytest.raises(ValueError, match="used as one array"):
            strategy.extended.update(variable, lambda v: v.assign_add(captured + 1.0))
        return
    strategy.extended.update(variable, lambda v: v.assign_add(captured + 1.0))
    assert [float(copy.numpy()) for copy in variable.values] == [1.0, 2.0]


@pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)
@pytest.mark.min_ranks(2)
def test_copies_that_were_made_to_differ_are_compared_again_when_equal(strategy: Any) -> None:
    rank = mpidist.rank()
    variable = make_variable(strategy, 1.0)
    one = per_replica(strategy, lambda i: 1)

    def meet() -> None:
        strategy.reduce("SUM", one, axis=None)

    variable.assign(per_replica(strategy, float))
    variable.assign_add(10.0)
    meet()
    variable.assign(2.0)
    meet()
    variable.assign(10.0 * rank)
    with pytest.raises(mpidist.MismatchError, match="assign"):
        meet()
    variable.assign(per_replica(strategy, float) if rank == 0 else 5.0)
    with pytest.raises(mpidist.MismatchError, match="PerReplica"):
        meet()


@pytest.mark.parametrize("strategy", layouts("one_device", "multi_worker-*"), indirect=True)
def test_out_takes_no_numbers_and_no_array_twice(strategy: Any) -> None:
    array = np.ones(2)

    def replica(value: Any, out: Any, said: str) -> None:
        with pytest.raises((ValueError, mpidist.PeerError), match=said):
            mpidist.get_replica_context().all_reduce("SUM", value, out=out)

    strategy.run(replica, args=({"g": np.ones(2), "loss": 3.0}, {"g": array, "loss": 3.0}, "the number 3.0"))
    strategy.run(replica, args=({"a": np.ones(2), "b": np.ones(2)}, {"a": array, "b": array}, "twice"))
