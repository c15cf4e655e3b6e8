"""Creation, attributes, scatter and copies of variables, in every layout."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import numpy as np
import pytest

import mpidist
from tests.acceptance.checks import (
    AUTO,
    FIRST,
    MEAN,
    NONE,
    ON_READ,
    ON_WRITE,
    SUM,
    check_components,
    fill,
    is_central,
    is_default,
    local_ids,
    make_variable,
    num_workers,
    replica_id,
    same,
)
from tests.support.ranks.layouts import WITH_COPIES, layouts

REPLICATED = ("mirrored-*", "mirrored_node-*", "multi_worker-*", "central*")
REFUSED = (ValueError, TypeError, mpidist.PeerError)


def test_a_callable_is_called_once_and_the_first_ranks_value_counts(strategy: Any) -> None:
    calls: list[int] = []
    first = local_ids(strategy)[0]

    def initial() -> Any:
        calls.append(1)
        return np.full(3, float(first + 1))

    variable = make_variable(strategy, initial)
    assert len(calls) == 1 or (first > 0 and not calls)
    check_components(strategy, variable, lambda _: np.ones(3))
    variable = make_variable(strategy, np.full(3, float(first + 1)))
    check_components(strategy, variable, lambda _: np.ones(3))


def test_variables_without_a_name_are_counted(strategy: Any) -> None:
    numbers = [int(make_variable(strategy, 1.0).name.partition("_")[2] or 0) for _ in range(3)]
    assert numbers == list(range(numbers[0], numbers[0] + 3))


def test_defaults(strategy: Any) -> None:
    variable = make_variable(strategy, 1.0)
    assert variable.synchronization == ON_WRITE
    assert variable.aggregation == NONE
    assert variable.trainable is True
    assert re.fullmatch(r"Variable(_\d+)?", variable.name)
    assert variable.dtype == np.float64
    assert variable.shape == ()
    assert variable.constraint is None
    assert variable.is_initialized()
    assert make_variable(strategy, 1).dtype == np.int64
    assert make_variable(strategy, 1.0, ON_READ, SUM).trainable is False
    assert make_variable(strategy, 1.0, ON_READ, SUM, trainable=False).trainable is False
    assert make_variable(strategy, 1.0, trainable=False).trainable is False


def test_attributes(strategy: Any) -> None:
    variable = make_variable(strategy, [1, 2], dtype=np.float32, name="w", shape=(2,), constraint=np.abs)
    assert (variable.name, variable.dtype, variable.shape) == ("w", np.float32, (2,))
    assert variable.constraint is np.abs
    same(np.asarray(variable.initial_value), [1, 2])
    same(variable.numpy(), [1.0, 2.0])
    assert len(variable) == 2
    assert variable.ndim == 1
    snapshot, copied = np.array(variable.value()), variable.numpy()
    copied[0] = 99
    variable.assign([5, 6])
    same(snapshot, [1.0, 2.0])
    same(variable.numpy(), [5.0, 6.0])
    view = np.asarray(variable)
    assert not view.flags.writeable
    if not is_default(strategy):
        assert variable.distribute_strategy is strategy
        assert variable.devices == strategy.extended.parameter_devices
        assert variable.device == variable.devices[0]


def test_names_of_components(strategy: Any) -> None:
    variable = make_variable(strategy, 1.0, name="kernel")
    assert variable.name == "kernel"
    if num_workers(strategy) == 1:
        names = [component.name for component in variable.values]
        assert names == ["kernel", *(f"kernel/replica_{i}" for i in range(1, len(names)))]


def test_identity_makes_variables_keys(strategy: Any) -> None:
    one, two = make_variable(strategy, [1.0, 1.0]), make_variable(strategy, [1.0, 1.0])
    table = {one: "one", two: "two"}
    assert table[one] == "one"
    assert one == one
    assert one != two
    assert one in [two, one]
    assert one.ref() == one.ref()
    assert one.ref() != two.ref()
    assert one.ref().deref() is one
    assert {one.ref(): 1}[one.ref()] == 1


def test_operators(strategy: Any) -> None:
    variable = make_variable(strategy, [1.0, 4.0])
    array = np.array([1.0, 4.0])
    same(variable + 1, array + 1)
    same(2 - variable, 2 - array)
    same(variable * variable, array * array)
    same(variable / 2, array / 2)
    same(-variable, -array)
    same(abs(-variable), array)
    same(variable**2, array**2)
    same(variable @ array, 17.0)
    same(array @ np.asarray(variable), 17.0)
    same(array + variable, 2 * array)
    same(np.sqrt(variable), np.sqrt(array))
    same(np.sum(variable), 5.0)
    same(variable > 2, array > 2)
    same(variable[1], 4.0)
    assert float(variable[0]) == 1.0


def test_refused_arguments(strategy: Any) -> None:
    with strategy.scope():
        for arguments in (
            {"synchronization": mpidist.VariableSynchronization.NONE},
            {"synchronization": 17},
            {"synchronization": "ON_READ"},
            {"aggregation": 17},
            {"aggregation": "SUM"},
            {"shape": (3,)},
        ):
            with pytest.raises(ValueError):
                mpidist.Variable(np.zeros(2), **arguments)
        for initial in (None, "text", object(), np.array(["a"]), np.array([None]), np.array([1.0], ">f8")):
            with pytest.raises((ValueError, TypeError)):
                mpidist.Variable(initial)
        with pytest.raises((ValueError, TypeError)):
            mpidist.Variable()


@pytest.mark.parametrize("strategy", layouts("one_device", *REPLICATED), indirect=True)
def test_creation_inside_run(strategy: Any) -> None:
    messages: list[str] = []

    def replica() -> None:
        with pytest.raises(RuntimeError) as info:
            mpidist.Variable(1.0)
        messages.append(str(info.value))

    strategy.run(replica)
    assert len(messages) == len(local_ids(strategy))
    assert all("scope()" in message for message in messages)


def test_an_ordinary_variable_outside_of_any_strategy() -> None:
    variable = mpidist.Variable(1.0, aggregation=SUM, synchronization=AUTO)
    assert len(variable.values) == 1
    variable.assign_add(2.0)
    same(variable.numpy(), 3.0)


def test_an_ordinary_variable_inside_run_of_a_strategy(strategy: Any) -> None:
    variable = mpidist.Variable(1.0)
    if strategy.num_replicas_in_sync > 1:
        # It would count per rank, and so depend on the layout.
        with pytest.raises((RuntimeError, mpidist.PeerError), match="scope"):
            strategy.run(lambda: variable.assign_add(1.0))
        same(variable.numpy(), 1.0)
    else:
        strategy.run(lambda: variable.assign_add(1.0))
        same(variable.numpy(), 2.0)


def test_a_variable_works_outside_and_under_no_scope(strategy: Any) -> None:
    variable = make_variable(strategy, 1.0, ON_READ, MEAN)
    variable.assign(4.0)
    same(variable.numpy(), 4.0)
    assert mpidist.get_strategy() is not strategy or is_default(strategy)


@pytest.mark.parametrize("strategy", layouts(*WITH_COPIES), indirect=True)
def test_deepcopy(strategy: Any) -> None:
    variable = make_variable(strategy, np.array([1.0]), ON_READ, SUM, name="v")
    fill(strategy, variable, lambda i: np.array([i + 1.0]))
    if strategy.num_replicas_in_sync > 1:
        with pytest.raises((RuntimeError, mpidist.PeerError), match="copied inside strategy.run"):
            strategy.run(lambda: copy.deepcopy(variable))
    with strategy.scope():
        copy.deepcopy(variable)
    twin = copy.deepcopy(variable)
    check_components(strategy, twin, lambda i: np.array([i + 1.0]))
    assert (twin.synchronization, twin.aggregation, twin.dtype) == (ON_READ, SUM, np.float64)
    fill(strategy, twin, lambda i: np.array([-1.0]))
    check_components(strategy, variable, lambda i: np.array([i + 1.0]))
    with pytest.raises(Exception, match="pickle"):
        pickle.dumps(variable)


def test_trainable_variables_that_are_synchronized_on_read(strategy: Any) -> None:
    """TensorFlow's testTrainable: an explicit trainable=True is kept."""
    variable = make_variable(strategy, 1.0, ON_READ, SUM, trainable=True)
    assert variable.trainable is True
    assert make_variable(strategy, 1.0, ON_READ, SUM).trainable is False


def test_an_integer_variable_with_aggregation_mean(strategy: Any) -> None:
    if not is_central(strategy):
        with pytest.raises(ValueError, match="a mean need not be an integer"):
            make_variable(strategy, 3, aggregation=MEAN)
        return
    variable = make_variable(strategy, 3, aggregation=MEAN)
    variable.assign_add(1)
    same(variable.numpy(), 4)
    if strategy.num_replicas_in_sync > 1:
        with pytest.raises((ValueError, mpidist.PeerError), match="need not be an integer"):
            strategy.run(lambda: variable.assign(5))
        same(variable.numpy(), 4)


def test_names_that_tensorflow_takes(strategy: Any) -> None:
    table = make_variable(strategy, np.arange(6.0).reshape(3, 2), aggregation=SUM)
    assert table.initializer is None
    table.scatter_add(slices([[1.0, 1.0]], [0]), use_locking=True, name="add")
    same(table.sparse_read([0], name="read"), [[1.0, 2.0]])
    same(table.gather_nd([[0, 1]], name="gather"), [2.0])


SCATTERS = [name for name in dir(mpidist.Variable) if name.startswith("scatter_") and name != "scatter_by"]


@pytest.mark.parametrize("strategy", layouts(*WITH_COPIES), indirect=True)
@pytest.mark.parametrize("name", SCATTERS)
def test_scatter_on_read(strategy: Any, name: str) -> None:
    """TensorFlow's SyncOnReadScatterReplicaTest: NotImplementedError, although the rows do not fit dense_shape."""
    variable = make_variable(strategy, np.ones(3), ON_READ, SUM)
    rows = mpidist.IndexedSlices([[0.0], [1.0]], [0, 1], dense_shape=(3,))
    if strategy.num_replicas_in_sync > 1:
        with pytest.raises((NotImplementedError, mpidist.PeerError), match="synchronized ON_READ"):
            strategy.run(getattr(variable, name), args=(rows,))
    with pytest.raises(ValueError, match="do not fit dense_shape"):
        rows.to_dense()


def slices(values: Any, indices: Any) -> Any:
    return mpidist.IndexedSlices(np.asarray(values), np.asarray(indices))


def test_scatter_in_cross_replica_context(strategy: Any) -> None:
    duplicates = slices([1.0, 2.0, 4.0], [0, 2, 0])
    start = np.array([1.0, 2.0, 3.0])
    expected = {
        "scatter_add": [6.0, 2.0, 5.0],
        "scatter_sub": [-4.0, 2.0, 1.0],
        "scatter_mul": [4.0, 2.0, 6.0],
        "scatter_div": [0.25, 2.0, 1.5],
        "scatter_min": [1.0, 2.0, 2.0],
        "scatter_max": [4.0, 2.0, 3.0],
    }
    for name, result in expected.items():
        for aggregation in (NONE, FIRST):
            variable = make_variable(strategy, start, aggregation=aggregation)
            getattr(variable, name)(duplicates)
            check_components(strategy, variable, lambda _, r=result: np.array(r))
    variable = make_variable(strategy, start)
    variable.scatter_update(slices([9.0, 7.0], [2, 0]))
    check_components(strategy, variable, lambda _: np.array([7.0, 2.0, 9.0]))
    same(np.asarray(variable.sparse_read(np.array([2, 0, 2]))), [9.0, 7.0, 9.0])
    same(np.asarray(variable.gather_nd(np.array([[2], [1]]))), [9.0, 2.0])


def test_scatter_of_the_first_replica(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    # One copy takes what every replica scatters, one after the other.
    last, total = (n - 1.0, n * (n - 1) / 2) if is_central(strategy) else (0.0, 0.0)
    table = {"scatter_update": last, "scatter_min": 0.0, "scatter_max": max(3.0, last), "scatter_add": 3.0 + total}
    for name, expected in table.items():
        variable = make_variable(strategy, np.full(2, 3.0), aggregation=FIRST)
        strategy.run(lambda v=variable, m=name: getattr(v, m)(slices([float(replica_id())], [1])))
        check_components(strategy, variable, lambda _, e=expected: np.array([3.0, e]))


def test_scatter_refusals(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    good = slices([1.0], [0])
    names = [f"scatter_{name}" for name in ("add", "sub", "mul", "div", "min", "max", "update")]
    variable = make_variable(strategy, np.zeros(2))
    for name in names:
        for bad in (1.0, np.zeros(2), [1.0], None):
            with pytest.raises(TypeError, match="IndexedSlices"):
                getattr(variable, name)(bad)
        with pytest.raises((*REFUSED, IndexError)):
            getattr(variable, name)(slices([1.0], [5]))
        with pytest.raises(REFUSED):
            getattr(variable, name)(slices([[1.0, 2.0]], [0]))
    if n == 1:
        return
    if is_central(strategy):
        for aggregation in (NONE, SUM, MEAN, FIRST):
            variable = make_variable(strategy, np.full(2, 2.0), aggregation=aggregation)
            strategy.run(lambda v=variable: v.scatter_add(good))
            check_components(strategy, variable, lambda _: np.array([2.0 + n, 2.0]))
            strategy.run(lambda v=variable: v.scatter_max(slices([replica_id() + 5.0], [1])))
            check_components(strategy, variable, lambda _: np.array([2.0 + n, n + 4.0]))
        return
    for name in names[4:]:
        for aggregation in (SUM, MEAN):
            variable = make_variable(strategy, np.zeros(2), aggregation=aggregation)
            with pytest.raises((NotImplementedError, mpidist.PeerError)):
                strategy.run(lambda v=variable, m=name: getattr(v, m)(good))
    for aggregation in (SUM, MEAN, FIRST, NONE):
        variable = make_variable(strategy, np.zeros(2), ON_READ, aggregation)
        for name in names:
            with pytest.raises(NotImplementedError):
                getattr(variable, name)(good)
            with pytest.raises((NotImplementedError, mpidist.PeerError)):
                strategy.run(lambda v=variable, m=name: getattr(v, m)(good))
    variable = make_variable(strategy, np.zeros(2), aggregation=NONE)
    with pytest.raises(REFUSED, match="aggregation="):
        strategy.run(lambda: variable.scatter_add(good))
    check_components(strategy, variable, lambda _: np.zeros(2))


PUBLIC = """
aggregation assign assign_add assign_sub constraint device devices distribute_strategy dtype gather_nd initial_value
initializer is_initialized name ndim numpy read_value ref scatter_add scatter_div scatter_max scatter_min scatter_mul
scatter_sub scatter_update shape size sparse_read synchronization trainable value values
"""


def test_completion_shows_names_for_programs(strategy: Any) -> None:
    variable = make_variable(strategy, np.zeros(2))
    assert [name for name in dir(variable) if not name.startswith("_")] == PUBLIC.split()
