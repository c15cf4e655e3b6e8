"""What code inside run can ask and do, in every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from tests.acceptance.checks import check_each, is_default, local_ids, num_workers, replica_id, same
from tests.support.ranks.layouts import layouts, per_replica

pytestmark = [pytest.mark.nodes, pytest.mark.counts]

FAILURES = (ValueError, mpidist.PeerError)
SEVERAL_LOCAL = pytest.mark.parametrize(
    "strategy", layouts("mirrored-[234]local", "mirrored_node-2local", "multi_worker-2local"), indirect=True
)


def context() -> Any:
    return mpidist.get_replica_context()


def test_identity_of_a_replica(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    seen: list[Any] = []

    def replica() -> int:
        mine = context()
        assert type(mine.replica_id_in_sync_group) is int
        assert mine.strategy is strategy
        assert mine.num_replicas_in_sync == n
        if not is_single_default:
            assert mine.devices == (strategy.extended.worker_devices[len(seen)],)
        assert mine.is_first_replica == (mine.replica_id_in_sync_group == 0)
        seen.append(mine.replica_id_in_sync_group)
        return int(mine.replica_id_in_sync_group)

    is_single_default = is_default(strategy)
    check_each(strategy, strategy.run(replica), lambda i: i)
    assert tuple(seen) == local_ids(strategy)
    check_each(
        strategy, strategy.run(lambda: context().all_gather(np.array([replica_id()]), axis=0)), lambda _: range(n)
    )


def test_merge_call_runs_once_per_rank_with_the_local_values(strategy: Any) -> None:
    ids = local_ids(strategy)
    calls: list[Any] = []

    def merge(merged: Any, value: Any, same_text: str, *, key: Any) -> Any:
        assert merged is strategy
        assert same_text == "t"
        calls.append(merged.experimental_local_results(value))
        assert merged.experimental_local_results(key) == tuple(10 * i for i in ids)
        return {"per": value, "plain": 3, "none": None}

    def replica() -> Any:
        i = replica_id()
        return context().merge_call(merge, args=(i, "t"), kwargs={"key": 10 * i})

    result = strategy.run(replica)
    assert calls == [ids]
    for i, part in zip(ids, strategy.experimental_local_results(result), strict=True):
        assert part == {"per": i, "plain": 3, "none": None}


def test_merge_call_uses_the_first_replicas_function(strategy: Any) -> None:
    def replica() -> Any:
        mine = local_ids(strategy).index(replica_id())
        return context().merge_call(lambda s: f"function of local replica {mine}")

    for part in strategy.experimental_local_results(strategy.run(replica)):
        assert part == "function of local replica 0"


def test_an_exception_in_merge_fn_reaches_the_caller_of_run(strategy: Any) -> None:
    def merge(_: Any) -> None:
        raise KeyError("in merge_fn")

    with pytest.raises(KeyError, match="in merge_fn"):
        strategy.run(lambda: context().merge_call(merge))
    same(strategy.reduce("SUM", strategy.run(lambda: 1), axis=None), strategy.num_replicas_in_sync)


@SEVERAL_LOCAL
def test_local_replicas_that_do_not_make_the_same_calls(strategy: Any) -> None:
    first = local_ids(strategy)[0]

    def skips() -> None:
        if replica_id() == first:
            context().merge_call(lambda s: None)

    def reduces_alone() -> None:
        if replica_id() != first:
            context().all_reduce("SUM", 1.0)

    def differs() -> None:
        if replica_id() == first:
            context().all_reduce("SUM", np.zeros(2))
        else:
            context().all_gather(np.zeros(2), axis=0)

    def another_op() -> None:
        context().all_reduce("SUM" if replica_id() == first else "MEAN", np.zeros(2))

    for fn in (skips, reduces_alone):
        with pytest.raises(RuntimeError, match="replica"):
            strategy.run(fn)
    for fn in (differs, another_op):
        with pytest.raises((ValueError, RuntimeError)):
            strategy.run(fn)
    same(strategy.reduce("SUM", strategy.run(lambda: 1), axis=None), strategy.num_replicas_in_sync)


@SEVERAL_LOCAL
def test_one_replica_that_fails_frees_those_that_wait(strategy: Any) -> None:
    first = local_ids(strategy)[0]

    def fails() -> None:
        if replica_id() == first:
            raise KeyError("one replica")
        context().all_reduce("SUM", 1.0)

    with pytest.raises(KeyError, match="one replica"):
        strategy.run(fails)
    same(strategy.reduce("SUM", strategy.run(lambda: 1), axis=None), strategy.num_replicas_in_sync)


def test_many_collectives_in_one_run(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync

    def replica() -> Any:
        value = float(replica_id())
        for _ in range(3):
            value = context().all_reduce("MEAN", value) + context().merge_call(
                lambda s, v: s.reduce("MAX", v, axis=None), args=(value,)
            )
        return value

    value = [float(i) for i in range(n)]
    for _ in range(3):
        value = [sum(value) / n + max(value)] * n
    check_each(strategy, strategy.run(replica), lambda i: value[i])


def test_all_reduce_keeps_structure_kind_and_dtype(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    nest = {"f": (np.ones((2, 1), np.float32), [np.zeros(0)]), "i": [np.array(3, np.int16), 5], "c": 1 + 2j}

    def replica() -> Any:
        result = context().all_reduce("SUM", nest)
        assert result["f"][0].dtype == np.float32
        assert np.asarray(result["i"][0]).dtype == np.int16
        return result

    def times(leaf: Any) -> Any:
        return leaf * n

    expected = {"f": (times(nest["f"][0]), [np.zeros(0)]), "i": [np.array(3 * n), 5 * n], "c": n * (1 + 2j)}
    check_each(strategy, strategy.run(replica), lambda _: expected)
    same(nest["f"][0], np.ones((2, 1)))


def test_all_reduce_min_max_prod(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync

    def replica() -> Any:
        value = np.array([replica_id() + 1.0, -replica_id()])
        return [context().all_reduce(op, value) for op in ("min", "Max", mpidist.ReduceOp.PROD)]

    every = np.array([[i + 1.0, -i] for i in range(n)])
    check_each(strategy, strategy.run(replica), lambda _: [every.min(0), every.max(0), every.prod(0)])


def started(*args: Any, **kwargs: Any) -> Any:
    return context().all_reduce_async(*args, **kwargs).wait()


def finished(*args: Any, **kwargs: Any) -> Any:
    return context().all_reduce(*args, **kwargs)


def test_all_reduce_into_out(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync

    def replica(all_reduce: Any) -> None:
        mine = np.full(3, float(replica_id()))
        out = np.empty(3)
        assert all_reduce("SUM", mine, out=out) is out
        same(out, np.full(3, float(sum(range(n)))))
        same(mine, np.full(3, float(replica_id())))
        both = {"a": np.empty(2), "b": np.empty(())}
        all_reduce("MEAN", {"a": np.ones(2), "b": np.array(2.0)}, out=both)
        same(both, {"a": np.ones(2), "b": np.array(2.0)})

    for all_reduce in (finished, started):
        strategy.run(replica, args=(all_reduce,))


def test_out_that_does_not_fit(strategy: Any) -> None:
    frozen = np.empty(2)
    frozen.flags.writeable = False
    for out in (np.empty(3), np.empty((2, 1)), np.empty(2, np.float32), np.empty(2, np.int64), frozen, [np.empty(2)]):
        for all_reduce in (finished, started):
            with pytest.raises((ValueError, TypeError, mpidist.PeerError), match="out"):
                strategy.run(lambda o=out, f=all_reduce: f("SUM", np.ones(2), out=o))
    same(strategy.reduce("SUM", strategy.run(lambda: 1), axis=None), strategy.num_replicas_in_sync)


def test_results_of_replicas_are_their_own(strategy: Any) -> None:
    def replica() -> Any:
        result = context().all_reduce("SUM", np.ones(2))
        result += replica_id()
        return result

    check_each(strategy, strategy.run(replica), lambda i: np.full(2, strategy.num_replicas_in_sync + i))


def test_all_reduce_async(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync

    def replica() -> Any:
        first = context().all_reduce_async("SUM", np.full(2, replica_id()))
        second = context().all_reduce_async("MEAN", {"a": 4.0})
        result = second.wait(), first.wait()
        assert first.done()
        assert second.done()
        return result

    check_each(strategy, strategy.run(replica), lambda _: ({"a": 4.0}, np.full(2, sum(range(n)))))


def test_works_may_be_waited_for_in_any_order(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync

    def replica() -> Any:
        works = [context().all_reduce_async("SUM", np.full(k, float(k))) for k in range(4)]
        order = works if local_ids(strategy)[0] == 0 else works[::-1]
        waited = [work.wait() for work in order]
        return waited if local_ids(strategy)[0] == 0 else waited[::-1]

    check_each(strategy, strategy.run(replica), lambda _: [np.full(k, float(k * n)) for k in range(4)])


def test_wrong_arguments(strategy: Any) -> None:
    def replica() -> None:
        with pytest.raises(ValueError, match="AVERAGE"):
            context().all_reduce("AVERAGE", 1.0)
        with pytest.raises(TypeError, match="ReduceOp"):
            context().all_reduce(3, 1.0)

    strategy.run(replica)
    if strategy.num_replicas_in_sync == 1:
        return  # one replica is handed its value back
    for value in (np.array([True]), True, "text", None, np.array(["a"]), np.array([object()])):
        with pytest.raises((TypeError, mpidist.PeerError)):
            strategy.run(lambda v=value: context().all_reduce("SUM", v))
    for value in (np.array(1.0), 2.0):
        with pytest.raises(FAILURES):
            strategy.run(lambda v=value: context().all_gather(v, axis=0))
    slices = mpidist.IndexedSlices(np.ones((1, 2)), np.array([0]), (4, 2))
    with pytest.raises((NotImplementedError, mpidist.PeerError)):
        strategy.run(lambda: context().all_gather(slices, axis=0))
    same(strategy.reduce("SUM", strategy.run(lambda: 1), axis=None), strategy.num_replicas_in_sync)


def test_replicas_that_differ(strategy: Any) -> None:
    if strategy.num_replicas_in_sync == 1:
        return
    for make in (
        lambda i: np.zeros(1 + i % 2),
        lambda i: np.zeros(2, np.float32 if i % 2 else np.float64),
        lambda i: [np.zeros(2)] * (1 + i % 2),
        lambda i: {"a": 1.0} if i % 2 else {"b": 1.0},
        lambda i: [1.0] if i % 2 else (1.0,),
    ):
        with pytest.raises(FAILURES):
            strategy.run(lambda m=make: context().all_reduce("SUM", m(replica_id())))
    with pytest.raises(FAILURES):
        strategy.run(lambda: context().all_gather(np.zeros((1, 2 + replica_id() % 2)), axis=0))
    with pytest.raises(FAILURES):
        strategy.run(lambda: context().all_gather(np.zeros((2, 2)), axis=replica_id() % 2))
    same(strategy.reduce("SUM", strategy.run(lambda: 1), axis=None), strategy.num_replicas_in_sync)


def test_sparse_all_reduce_concatenates(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync

    def slices(i: int) -> Any:
        return mpidist.IndexedSlices(np.full((i % 2 + 1, 2), i + 1.0), np.arange(i % 2 + 1), (3, 2))

    def replica() -> Any:
        mine = slices(replica_id())
        return context().all_reduce("SUM", mine), context().all_reduce("MEAN", [mine, 1.0])

    dense = sum(slices(i).to_dense() for i in range(n))
    rows = sum(len(slices(i).indices) for i in range(n))
    for total, (mean, one) in strategy.experimental_local_results(strategy.run(replica)):
        assert isinstance(total, mpidist.IndexedSlices)
        assert len(total.indices) == rows
        assert total.dense_shape == (3, 2)
        same(total.to_dense(), dense)
        np.testing.assert_allclose(mean.to_dense(), dense / n, rtol=1e-15)
        same(one, 1.0)


def test_the_default_context_hands_values_back() -> None:
    default = context()
    array = np.arange(2)
    same(default.all_reduce("SUM", array), array)
    same(default.all_gather(array, axis=0), array)
    assert default.merge_call(lambda s, x: (s, mpidist.get_replica_context(), x), args=(1,)) == (
        mpidist.get_strategy(),
        None,
        1,
    )


def test_seeds_by_replica_id_differ(strategy: Any) -> None:
    draws = strategy.run(lambda: np.random.default_rng([7, replica_id()]).random(1))
    gathered = strategy.gather(draws, axis=0) if num_workers(strategy) > 1 or local_ids(strategy)[1:] else draws
    assert len(set(np.atleast_1d(gathered).tolist())) == strategy.num_replicas_in_sync


def test_per_replica_arguments_arrive_by_id(strategy: Any) -> None:
    value = per_replica(strategy, lambda i: 3 * i)
    check_each(strategy, strategy.run(lambda v: v == 3 * replica_id(), args=(value,)), lambda _: True)
