"""Which strategy and which context is current where."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import mpidist
from tests.acceptance.checks import is_default, local_ids
from tests.support.ranks.layouts import layouts

REPLICATED = ("mirrored-*", "mirrored_node-*", "multi_worker-*", "central*", "one_device")


def where() -> tuple[Any, bool, Any, bool]:
    """One row of the table of contexts."""
    context = mpidist.get_replica_context()
    assert (context is not None) != mpidist.in_cross_replica_context()
    return mpidist.get_strategy(), mpidist.has_strategy(), context, mpidist.in_cross_replica_context()


def check_top_level() -> None:
    current, has, context, cross = where()
    assert isinstance(current, mpidist.Strategy)
    assert (has, cross) == (False, False)
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (0, 1)
    assert context.strategy is current


def in_a_thread(fn: Any) -> None:
    errors: list[BaseException] = []

    def body() -> None:
        try:
            fn()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_table_of_contexts(strategy: Any) -> None:
    check_top_level()
    real = not is_default(strategy)
    with strategy.scope() as entered:
        assert entered is strategy
        if real:
            assert where() == (strategy, True, None, True)
        else:
            check_top_level()  # the default strategy's scope changes nothing
    rows: list[Any] = []

    def merge(merged_strategy: Any) -> None:
        assert merged_strategy is strategy
        rows.append(where())

    def replica() -> None:
        current, has, context, cross = where()
        assert (current, has, cross) == (strategy, real, False)
        assert context.strategy is strategy
        assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
        context.merge_call(merge)
        assert where() == (strategy, real, context, False)

    strategy.run(replica)
    assert rows == [(strategy, real, None, True)]
    check_top_level()


@pytest.mark.parametrize("strategy", layouts(*REPLICATED), indirect=True)
def test_context_of_an_update(strategy: Any) -> None:
    with strategy.scope():
        variable = mpidist.Variable(0.0)
    seen: list[Any] = []
    strategy.extended.update(variable, lambda _: seen.append(where()))
    assert seen == [(strategy, True, None, True)] * len(variable.values)
    check_top_level()


def test_the_default_strategy_is_one_object_that_never_grows() -> None:
    assert mpidist.get_strategy() is mpidist.get_strategy()
    assert mpidist.get_strategy().num_replicas_in_sync == 1


def test_a_scope_counts_and_restores_also_on_exceptions(strategy: Any) -> None:
    with strategy.scope(), strategy.scope() as inner:
        assert inner is strategy
        assert mpidist.get_strategy() is strategy
    check_top_level()

    def fail() -> None:
        with strategy.scope(), strategy.scope():
            raise KeyError("out")

    with pytest.raises(KeyError, match="out"):
        fail()
    check_top_level()

    def replica() -> None:
        raise ZeroDivisionError("in the replica")

    with strategy.scope():
        with pytest.raises(ZeroDivisionError, match="in the replica"):
            strategy.run(replica)
        assert mpidist.get_strategy() is strategy
    check_top_level()


def test_run_inside_and_outside_of_a_scope_restores_the_context(strategy: Any) -> None:
    strategy.run(lambda: None)
    check_top_level()
    with strategy.scope():
        before = where()
        strategy.run(lambda: None)
        assert where() == before


@pytest.mark.parametrize("strategy", layouts(*REPLICATED), indirect=True)
def test_another_strategys_scope_inside_a_scope(strategy: Any) -> None:
    other = mpidist.OneDeviceStrategy("cpu:0")
    default = mpidist.get_strategy()
    with strategy.scope():
        with pytest.raises(RuntimeError, match=type(strategy).__name__) as info, other.scope():
            pass
        assert "OneDeviceStrategy" in str(info.value)
        with pytest.raises(RuntimeError), default.scope():
            pass
        assert mpidist.get_strategy() is strategy
        assert mpidist.in_cross_replica_context()
    with default.scope(), strategy.scope():
        assert mpidist.get_strategy() is strategy
    with default.scope(), default.scope():
        assert mpidist.get_strategy() is default
    check_top_level()


@pytest.mark.parametrize("strategy", layouts(*REPLICATED), indirect=True)
def test_scope_and_run_inside_run(strategy: Any) -> None:
    errors: list[str] = []

    def replica() -> None:
        with pytest.raises(RuntimeError) as info, strategy.scope():
            pass
        errors.append(str(info.value))
        with pytest.raises(RuntimeError) as info:
            strategy.run(lambda: None)
        errors.append(str(info.value))
        assert mpidist.get_replica_context() is not None

    strategy.run(replica)
    assert len(errors) == 2 * len(local_ids(strategy))
    assert all("replica" in text for text in errors)
    assert any("merge_call" in text for text in errors)


@pytest.mark.parametrize("strategy", layouts(*REPLICATED), indirect=True)
def test_a_scope_left_where_it_was_not_entered(strategy: Any) -> None:
    scopes: list[Any] = []

    def enter() -> None:
        scopes.append(strategy.scope())
        scopes[0].__enter__()
        assert mpidist.get_strategy() is strategy

    in_a_thread(enter)
    with pytest.raises(RuntimeError, match="nest"):
        scopes[0].__exit__(None, None, None)
    check_top_level()


@pytest.mark.parametrize("strategy", layouts(*REPLICATED), indirect=True)
def test_experimental_set_strategy(strategy: Any) -> None:
    other = mpidist.OneDeviceStrategy("cpu:0")
    try:
        mpidist.experimental_set_strategy(strategy)
        assert where() == (strategy, True, None, True)
        with strategy.scope():
            assert where() == (strategy, True, None, True)
            with pytest.raises(RuntimeError, match="scope"):
                mpidist.experimental_set_strategy(other)
        with pytest.raises(RuntimeError), other.scope():
            pass
        assert mpidist.get_strategy() is strategy
        mpidist.experimental_set_strategy(other)
        assert mpidist.get_strategy() is other
    finally:
        mpidist.experimental_set_strategy(None)
    check_top_level()
    with strategy.scope(), pytest.raises(RuntimeError, match="scope"):
        mpidist.experimental_set_strategy(None)
    check_top_level()


def test_a_new_thread_starts_in_the_default_context(strategy: Any) -> None:
    with strategy.scope():
        in_a_thread(check_top_level)
    strategy.run(lambda: in_a_thread(check_top_level))
    check_top_level()


@pytest.mark.parametrize("strategy", layouts(*REPLICATED), indirect=True)
def test_set_strategy_holds_for_one_thread(strategy: Any) -> None:
    def body() -> None:
        mpidist.experimental_set_strategy(strategy)
        assert mpidist.get_strategy() is strategy
        mpidist.experimental_set_strategy(None)

    in_a_thread(body)
    mpidist.experimental_set_strategy(strategy)
    try:
        in_a_thread(check_top_level)
    finally:
        mpidist.experimental_set_strategy(None)


def test_value_fn_and_dataset_fn_run_in_the_default_context(strategy: Any) -> None:
    calls: list[str] = []

    def value_fn(context: Any) -> int:
        check_top_level()
        calls.append("value")
        return int(context.replica_id_in_sync_group)

    def dataset_fn(context: Any) -> Any:
        check_top_level()
        calls.append("dataset")
        return mpidist.Dataset.range(4).batch(1)

    with strategy.scope():
        strategy.experimental_distribute_values_from_function(value_fn)
        strategy.distribute_datasets_from_function(dataset_fn)
    assert calls == ["value"] * len(local_ids(strategy)) + ["dataset"]


def test_creators_nest_inside_the_scope(strategy: Any) -> None:
    names: list[str] = []

    def outer(create: Any, **kwargs: Any) -> Any:
        names.append("outer")
        return create(**kwargs)

    def inner(create: Any, **kwargs: Any) -> Any:
        names.append("inner")
        kwargs["name"] = f"renamed_{kwargs['name']}"
        return create(**kwargs)

    with strategy.scope(), mpidist.variable_creator_scope(outer), mpidist.variable_creator_scope(inner):
        variable = mpidist.Variable(3.0, name="v")
    assert names == ["inner", "outer"]
    assert variable.name == "renamed_v"
    with strategy.scope():
        assert mpidist.Variable(3.0, name="v").name == "v"


def test_run_of_the_default_strategy_is_a_replica_context() -> None:
    default = mpidist.get_strategy()
    other = mpidist.OneDeviceStrategy("cpu:0")
    with other.scope():
        variable = mpidist.Variable(1.0)

    def replica() -> int:
        check_top_level()
        refused = {
            "run": lambda: default.run(int),
            "reduce": lambda: default.reduce("SUM", 1.0, axis=None),
            "experimental_distribute_dataset": lambda: default.experimental_distribute_dataset(
                mpidist.Dataset.range(4).batch(2)
            ),
        }
        for name, call in refused.items():
            with pytest.raises(RuntimeError, match=name.replace("(", r"\(")):
                call()
        with pytest.raises(RuntimeError, match="OneDeviceStrategy.*default strategy"):
            other.run(int)
        with default.scope() as entered:
            assert entered is default
            check_top_level()
        default.extended.update(mpidist.Variable(1.0), lambda v: v.assign_add(1.0))
        other.extended.update(variable, lambda v: v.assign_add(1.0))
        with other.scope():
            assert where() == (other, True, None, True)
            return other.run(lambda: 5)

    assert default.run(replica) == 5
    assert float(variable.numpy()) == 2.0
    check_top_level()


def test_run_in_a_merge_call_of_the_default_strategy() -> None:
    def merge(strategy: Any, x: int) -> Any:
        assert mpidist.in_cross_replica_context()
        return strategy.run(lambda: (mpidist.get_replica_context().replica_id_in_sync_group, x))

    assert mpidist.get_replica_context().merge_call(merge, args=(3,)) == (0, 3)
    check_top_level()


def test_state_of_no_variable_under_the_default_strategy() -> None:
    extended = mpidist.get_strategy().extended
    devices = extended.non_slot_devices([mpidist.Variable(1.0)])
    assert devices == ("cpu:0",)
    assert extended.update_non_slot(devices, lambda x: 2 * x, args=(4,)) == 8
    assert extended.update_non_slot(devices, lambda x: 2 * x, args=(4,), group=False) == (8,)
