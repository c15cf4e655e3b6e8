"""ShardedVariable under every strategy: the numbers of one variable, with optimizers and checkpoints, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import Checkpoint, IndexedSlices
from mpidist.core.errors import PeerError
from mpidist.optimizers import SGD, Adam, AdamW, GradientAccumulator, Optimizer, RMSprop, aggregate_gradients
from mpidist.parameter_server import ShardedVariable
from mpidist.values import Mirrored
from tests.acceptance.checks import FIRST, MEAN, NONE, ON_READ, SUM, is_central, make_variable
from tests.parameter_server.shards import Touched, sharded
from tests.support.ranks.layouts import layouts, per_replica

MAKERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: SGD(0.1),
    "momentum": lambda: SGD(0.1, momentum=0.9),
    "adamw": lambda: AdamW(0.1),
    "rmsprop": lambda: RMSprop(0.1, momentum=0.9, centered=True),
}
ROWS = 7


@pytest.fixture(params=MAKERS)
def optimizer(request: pytest.FixtureRequest) -> Callable[[], Optimizer]:
    return MAKERS[request.param]


def pair(strategy: Any, value: Any, shards: int = 3, **options: Any) -> tuple[ShardedVariable, Any]:
    """Return a sharded variable, and a plain one of the same value."""
    return sharded(value, shards, strategy, **options), make_variable(strategy, value, **options)


def assert_same(one: Any, other: Any) -> None:
    np.testing.assert_array_equal(one.numpy(), other.numpy())


def assert_copies_equal(variable: ShardedVariable) -> None:
    for shard in variable.variables:
        for copy in shard.values[1:]:
            np.testing.assert_array_equal(np.asarray(copy), np.asarray(shard.values[0]))


# Reading and writing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST])
def test_replicas_write_it_as_one_variable(strategy: Any, aggregation: Any) -> None:
    v, plain = pair(strategy, np.ones((ROWS, 2)), aggregation=aggregation)
    rows = per_replica(strategy, lambda i: np.full((2, 2), i + 1.0))

    def write(variable: Any, values: Any) -> Any:
        variable.assign_add(np.full((ROWS, 2), values[0, 0]))
        # Of some shards no replica has rows, of others one of two.
        index = mpidist.get_replica_context().replica_id_in_sync_group % 2
        variable.scatter_add(IndexedSlices(values, [index, 3 * index]))
        variable.assign_sub(np.ones((ROWS, 2)))
        return variable[1:4] * 1, variable.sparse_read([3, 0]), np.asarray(variable).sum()

    results = [strategy.run(write, args=(variable, rows)) for variable in (v, plain)]
    assert_same(v, plain)
    assert_copies_equal(v)
    for one, other in zip(*results, strict=True):
        one, other = (strategy.experimental_local_results(result) for result in (one, other))
        np.testing.assert_array_equal(np.stack(one), np.stack(other))


def test_across_replicas(strategy: Any) -> None:
    v, plain = pair(strategy, np.ones((ROWS, 2)))
    for variable in (v, plain):
        variable.assign(np.arange(2.0 * ROWS).reshape(ROWS, 2))
        with strategy.scope():
            variable.assign_add(Mirrored([np.ones((ROWS, 2))], [0]))
            variable.scatter_mul(IndexedSlices([[3.0, 3.0]], [6]))
    assert_same(v, plain)
    assert_copies_equal(v)
    if strategy.num_replicas_in_sync > 1:
        different = per_replica(strategy, lambda i: np.full((ROWS, 2), float(i)))
        if is_central(strategy):
            with pytest.raises((ValueError, mpidist.PeerError), match="one value"):
                v.assign(different)
        else:
            for variable in (v, plain):
                variable.assign(different)
            assert_same(v, plain)


def test_replicas_hand_it_back_as_it_is(strategy: Any) -> None:
    v = sharded(np.ones(3), 2, strategy, aggregation=SUM)
    assert strategy.run(lambda: v.assign_add(np.ones(3))) is v
    assert strategy.run(lambda x: x, args=(v,)) is v


@pytest.mark.parametrize("strategy", layouts("mirrored-2local", "one_device"), indirect=True)
def test_shards_of_a_kind_that_cannot_be(strategy: Any) -> None:
    mine, plain = make_variable(strategy, [1.0]), mpidist.Variable([1.0])
    with pytest.raises(ValueError, match="different strategies"):
        ShardedVariable([mine, plain])
    with pytest.raises(ValueError, match="synchronized ON_READ"):
        ShardedVariable([make_variable(strategy, [1.0], ON_READ, SUM)])


@pytest.mark.parametrize("strategy", layouts("mirrored-2local"), indirect=True)
def test_aggregation_is_asked_for(strategy: Any) -> None:
    v = sharded(np.ones(3), 2, strategy, aggregation=NONE)
    with pytest.raises(ValueError, match="does not say how"):
        strategy.run(lambda: v.assign(np.ones(3)))
    with pytest.raises(NotImplementedError, match="scatter_min"):
        w = sharded(np.ones(3), 2, strategy, aggregation=SUM)
        strategy.run(lambda: w.scatter_min(IndexedSlices([0.0], [0])))


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("method", ["assign", "scatter_add"])
@pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)
def test_an_error_on_one_rank_reaches_the_others(strategy: Any, method: str) -> None:
    v = sharded(np.zeros(5), 2, strategy, aggregation=SUM)
    rank = strategy.extended.local_replica_ids[0]

    def write() -> None:
        is_wrong = rank == 0
        if method == "assign":
            v.assign(np.ones(4 if is_wrong else 5))
        else:
            v.scatter_add(IndexedSlices([1.0], [9 if is_wrong else 0]))

    with pytest.raises(ValueError if rank == 0 else PeerError, match=r"shape \(4,\)|expected 0 to 4"):
        strategy.run(write)
    np.testing.assert_array_equal(v.numpy(), np.zeros(5))
    strategy.run(lambda: v.assign_add(np.ones(5)))
    assert v.numpy()[0] == strategy.num_replicas_in_sync


# Optimizers ---------------------------------------------------------------------------------------------------


def gradient(step: int, replica: int, is_sparse: bool) -> Any:
    values = np.arange(2.0 * ROWS).reshape(ROWS, 2) - step + replica
    if not is_sparse:
        return values
    indices = [step % ROWS, (step + replica) % ROWS, step % ROWS]
    return IndexedSlices(values[indices], indices)


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("kind", ["list", "generator"])
def test_optimizers_change_it_as_one_variable(
    strategy: Any, optimizer: Callable[[], Optimizer], is_sparse: bool, kind: str
) -> None:
    results = []
    for variable in pair(strategy, np.ones((ROWS, 2))):
        other, mine = make_variable(strategy, 1.0), optimizer()

        def step(t: int, replica: int, variable: Any = variable, other: Any = other, mine: Any = mine) -> None:
            pairs = [(gradient(t, replica, is_sparse), variable), (np.float64(replica), other)]
            mine.apply_gradients(pairs if kind == "list" else (each for each in pairs))

        for t in range(4):
            strategy.run(lambda i, t=t, step=step: step(t, i), args=(per_replica(strategy, lambda i: i),))
        results.append([variable.numpy(), other.numpy(), int(mine.iterations.numpy())])
    for one, plain in zip(*results, strict=True):
        np.testing.assert_allclose(one, plain, rtol=1e-14)


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_across_replicas_too(strategy: Any, optimizer: Callable[[], Optimizer], is_sparse: bool) -> None:
    v, plain = pair(strategy, np.ones((ROWS, 2)))
    for variable in (v, plain):
        mine = optimizer()
        for t in range(3):
            mine.apply_gradients([(gradient(t, 0, is_sparse), variable)])
    np.testing.assert_allclose(v.numpy(), plain.numpy(), rtol=1e-14)
    assert_copies_equal(v)


@pytest.mark.parametrize("strategy", layouts("default", "mirrored-2local"), indirect=True)
def test_a_sparse_update_touches_only_shards_with_rows(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    v = sharded(np.ones((ROWS, 2)), 3, strategy)
    sgd, adam = SGD(1.0), Adam(1.0)
    touched = Touched(monkeypatch, v)
    rows = IndexedSlices([[1.0, 1.0]], [4])
    strategy.run(lambda: sgd.apply_gradients([(rows, v)]))
    n = strategy.num_replicas_in_sync
    assert touched.writes == {1: [1] * n}
    assert touched.reads == {}
    monkeypatch.undo()
    assert v.numpy()[:, 0].tolist() == [1, 1, 1, 1, 1 - n, 1, 1]
    # The moments of all rows decay, whatever shard they are in.
    strategy.run(lambda: adam.apply_gradients([(np.ones((ROWS, 2)), v)]))
    before = adam.get_slot(v, "m").numpy()
    strategy.run(lambda: adam.apply_gradients([(IndexedSlices(np.zeros((0, 2)), []), v)]))
    np.testing.assert_allclose(adam.get_slot(v, "m").numpy(), 0.9 * before)


@pytest.mark.parametrize("strategy", layouts("default", "mirrored-2local"), indirect=True)
def test_constraints_are_kept(strategy: Any) -> None:
    v = sharded(np.arange(4.0), 2, strategy, constraint=lambda array: np.minimum(array, 2.0))
    optimizer = SGD(1.0)
    strategy.run(lambda: optimizer.apply_gradients([(IndexedSlices([0.0], [0]), v)]))
    assert v.numpy().tolist() == [0, 1, 2, 2]


def test_slots(strategy: Any) -> None:
    v, plain = pair(strategy, np.ones((ROWS, 2)), 2)
    adam = Adam()
    adam.build([plain, v.variables[1], v])
    assert len(adam.variables) == 1 + 2 * 3
    for shard in v.variables:
        assert adam.get_slot(shard, "m").shape == shard.shape
        assert adam.get_slot(shard, "m").name.endswith(f"{shard.name}/m")
    whole = adam.get_slot(v, "s")
    assert (whole.shape, whole.name) == (v.shape, "Adam/table/s")
    assert whole.variables == [adam.get_slot(shard, "s") for shard in v.variables]
    before = len(adam.variables)
    adam.build([v, plain])
    assert len(adam.variables) == before
    with pytest.raises(ValueError, match="no slot 'momentum' for variable 'table'"):
        adam.get_slot(v, "momentum")


@pytest.mark.parametrize("strategy", layouts("mirrored-2local", "default"), indirect=True)
def test_sums_and_accumulated_gradients(strategy: Any) -> None:
    v = sharded(np.zeros(5), 2, strategy)
    sgd, accumulator = SGD(1.0), GradientAccumulator(2)
    n = strategy.num_replicas_in_sync

    def by_hand() -> Any:
        pairs = aggregate_gradients([(np.ones(5), v)])
        assert [variable for _, variable in pairs] == v.variables
        sgd.apply_gradients(pairs, experimental_aggregate_gradients=False)

    strategy.run(by_hand)
    assert v.numpy().tolist() == [-n] * 5
    for expected in (False, True):
        done = strategy.run(lambda: accumulator.apply_gradients(sgd, [(IndexedSlices([1.0, 1.0], [0, 4]), v)]))
        assert all(result is expected for result in strategy.experimental_local_results(done))
    assert v.numpy().tolist() == [-3 * n, -n, -n, -n, -3 * n]


def test_wrong_gradients() -> None:
    v = sharded(np.ones(5, np.float32), 2)
    for wrong, error, match in [
        (np.ones(4, np.float32), ValueError, r"shape \(4,\) was given for variable 'table' of shape \(5,\)"),
        (np.ones(5), TypeError, "dtype float64 was given for variable 'table'"),
        (IndexedSlices(np.ones(1, np.float32), [5]), ValueError, "expected 0 to 4"),
    ]:
        with pytest.raises(error, match=match):
            SGD().apply_gradients([(wrong, v)])
    with pytest.raises(ValueError, match=r"only None for the variables \['table'\]"):
        SGD().apply_gradients([(None, v)])
    assert v.numpy().tolist() == [1] * 5


# Checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"sharded": True}, {"async_save": True}], ids=str)
def test_saved_as_one_array_and_restored_to_any_shards(strategy: Any, options: Any, tmp_path: Path) -> None:
    value = np.arange(2.0 * ROWS).reshape(ROWS, 2)

    def saved(variable: Any, name: str) -> str:
        checkpoint = Checkpoint(v=variable)
        path = checkpoint.save(tmp_path / name, **options)
        checkpoint.wait()
        return path

    path = saved(sharded(value, 3, strategy), "ckpt")
    two, plain = pair(strategy, value * 0, 2)
    for other in (two, plain):
        Checkpoint(v=other).restore(path).assert_consumed()
        np.testing.assert_array_equal(other.numpy(), value)
    assert_copies_equal(two)
    plain.assign(value * 2)
    back = sharded(value * 0, 5, strategy)
    Checkpoint(v=back).restore(saved(plain, "plain")).assert_consumed()
    np.testing.assert_array_equal(back.numpy(), value * 2)


def trained(strategy: Any, variable: Any, mine: Any, steps: range) -> Any:
    for t in steps:
        strategy.run(lambda t=t: mine.apply_gradients([(gradient(t, 0, False), variable)]))
    return variable


@pytest.mark.parametrize("is_built", [True, False], ids=["built", "not built"])
@pytest.mark.parametrize("strategy", layouts("default", "mirrored-2local", "multi_worker-1local"), indirect=True)
def test_training_goes_on_in_other_shards(
    strategy: Any, optimizer: Callable[[], Optimizer], is_built: bool, tmp_path: Path
) -> None:
    value = np.ones((ROWS, 2))
    mine, first = sharded(value, 3, strategy), optimizer()
    trained(strategy, mine, first, range(3))
    path = Checkpoint(v=mine, optimizer=first).save(tmp_path / "ckpt")
    trained(strategy, mine, first, range(3, 6))
    for other in (*pair(strategy, value * 0, 2), sharded(value * 0, 7, strategy)):
        second = optimizer()
        if is_built:
            second.build([other])
        status = Checkpoint(v=other, optimizer=second).restore(path)
        trained(strategy, other, second, range(3, 6))
        status.assert_consumed()
        np.testing.assert_allclose(other.numpy(), mine.numpy(), rtol=1e-14)
        assert second.iterations.numpy() == 6
        for slot in first.slot_names:
            np.testing.assert_allclose(second.get_slot(other, slot).numpy(), first.get_slot(mine, slot).numpy())


@pytest.mark.parametrize("strategy", layouts("default", "mirrored-2local"), indirect=True)
def test_a_checkpoint_of_another_shape(strategy: Any, tmp_path: Path) -> None:
    path = Checkpoint(v=sharded(np.ones(5), 2, strategy)).save(tmp_path / "ckpt")
    other = sharded(np.zeros(6), 2, strategy)
    with pytest.raises(ValueError, match=r"'v' has shape \(5,\).*and shape \(6,\)"):
        Checkpoint(v=other).restore(path)
    assert other.numpy().tolist() == [0] * 6
