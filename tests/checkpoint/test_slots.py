"""An optimizer's slots are saved by their variable, and restored whatever the order of the variables."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import Checkpoint
from mpidist.experimental import ShardedVariable
from mpidist.optimizers import SGD, Adam
from tests.support.ranks.layouts import layouts

MakeOptimizer = Callable[[], Any]
# A checkpoint of format version 2, which has slots by position: three steps of Adam and SGD on model.a and model.b.
BY_POSITION = Path(__file__).parent / "data" / "by_position_version_2"


def adam() -> Any:
    return Adam(0.1)


def momentum() -> Any:
    return SGD(0.1, momentum=0.9)


def step(strategy: mpidist.Strategy, optimizer: Any, variables: Sequence[Any]) -> None:
    """Update each variable by a gradient of its own."""
    strategy.run(lambda: optimizer.apply_gradients([(np.asarray(v) * 0.5, v) for v in variables]))


def pair(strategy: mpidist.Strategy, start: float = 1.0, **names: str) -> Any:
    with strategy.scope():
        variables = {
            key: mpidist.Variable([value * start, -value * start], name=names.get(key))
            for key, value in (("a", 1.0), ("b", 3.0))
        }
    return SimpleNamespace(**variables)


def numbers(model: Any) -> list[list[float]]:
    return [model.a.numpy().tolist(), model.b.numpy().tolist()]


def slot_keys(path: str | Path) -> set[str]:
    manifest = json.loads((Path(path) / "manifest.json").read_text())
    return {key for key in manifest["tensors"] if "/slots" in key}


@pytest.mark.counts
@pytest.mark.parametrize(
    ("make", "is_built", "options"),
    [(adam, False, {}), (adam, True, {"async_save": True}), (momentum, False, {"sharded": True}), (momentum, True, {})],
    ids=["adam", "adam-built-async", "momentum-sharded", "momentum-built"],
)
def test_slots_follow_variables_in_another_order(
    strategy: mpidist.Strategy, make: MakeOptimizer, is_built: bool, options: dict[str, bool], tmp_path: Path
) -> None:
    model, optimizer = pair(strategy), make()
    for _ in range(3):
        step(strategy, optimizer, [model.a, model.b])
    checkpoint = Checkpoint(model=model, optimizer=optimizer)
    path = checkpoint.save(tmp_path / "ckpt", **options)
    checkpoint.wait()
    step(strategy, optimizer, [model.a, model.b])

    fresh, resumed = pair(strategy, 7.0), make()
    if is_built:
        resumed.build([fresh.b, fresh.a])
    status = Checkpoint(model=fresh, optimizer=resumed).restore(path)
    step(strategy, resumed, [fresh.b, fresh.a])
    status.assert_existing_objects_matched()
    assert numbers(fresh) == numbers(model)
    for name in optimizer.slot_names:
        for mine, saved in ((fresh.a, model.a), (fresh.b, model.b)):
            np.testing.assert_array_equal(resumed.get_slot(mine, name), optimizer.get_slot(saved, name))


@pytest.mark.one_rank
def test_slots_are_saved_under_the_path(tmp_path: Path) -> None:
    strategy = mpidist.get_strategy()
    model, wrapper = pair(strategy), SimpleNamespace(inner=momentum(), scale=2.0)
    other = wrapper.inner
    wrapper.inner.build([model.b, model.a])
    path = Checkpoint(model=model, wrapper=wrapper, other=other).save(tmp_path / "ckpt")
    assert slot_keys(path) == {f"other/slots_by_path/model/{name}/momentum" for name in "ab"}


@pytest.mark.one_rank
@pytest.mark.parametrize("is_built", [True, False])
def test_two_optimizers_of_one_variable(is_built: bool, tmp_path: Path) -> None:
    strategy = mpidist.get_strategy()

    def trained(model: Any, one: Any, other: Any) -> Checkpoint:
        return Checkpoint(model=model, wrapper=SimpleNamespace(inner=one), other=other)

    model, one, other = pair(strategy), momentum(), adam()
    for optimizer in (one, other):
        step(strategy, optimizer, [model.a, model.b])
    path = trained(model, one, other).save(tmp_path / "ckpt")
    fresh, again = pair(strategy, 7.0), (momentum(), adam())
    if is_built:
        for optimizer in again:
            optimizer.build([fresh.b, fresh.a])
    status = trained(fresh, *again).restore(path)
    for optimizer in again:
        optimizer.build([fresh.b, fresh.a])
    status.assert_consumed()
    np.testing.assert_array_equal(again[0].get_slot(fresh.a, "momentum"), one.get_slot(model.a, "momentum"))
    np.testing.assert_array_equal(again[1].get_slot(fresh.b, "s"), other.get_slot(model.b, "s"))


@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize("strategy", layouts("mirrored-2local"), indirect=True)
def test_slots_of_a_variable_with_another_path(strategy: mpidist.Strategy, is_built: bool, tmp_path: Path) -> None:
    model, optimizer = pair(strategy), adam()
    step(strategy, optimizer, [model.a, model.b])
    model.layers = [model.b]
    path = Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "ckpt")
    fresh, resumed = pair(strategy, 7.0), adam()
    here = SimpleNamespace(a=fresh.a, layers=[fresh.b])
    if is_built:
        resumed.build([fresh.b, fresh.a])
    status = Checkpoint(model=here, optimizer=resumed).restore(path).expect_partial()
    resumed.build([fresh.b, fresh.a])
    # The attribute model.b is missing here, so its value still waits.
    assert status.deferred == ("model/b",)
    np.testing.assert_array_equal(resumed.get_slot(fresh.b, "m"), optimizer.get_slot(model.b, "m"))


@pytest.mark.parametrize("strategy", layouts("mirrored-2local"), indirect=True)
def test_slots_of_an_optimizer_made_later(strategy: mpidist.Strategy, tmp_path: Path) -> None:
    model = pair(strategy)
    model.optimizer = adam()
    step(strategy, model.optimizer, [model.a, model.b])
    path = Checkpoint(model=model).save(tmp_path / "ckpt")
    fresh = SimpleNamespace()
    status = Checkpoint(model=fresh).restore(path)
    vars(fresh).update(vars(pair(strategy, 7.0)), optimizer=adam())
    fresh.optimizer.learning_rate = 0.1
    for those in (model, fresh):
        step(strategy, those.optimizer, [those.b, those.a])
    status.expect_partial()
    assert status.deferred == ()
    assert numbers(fresh) == numbers(model)


@pytest.mark.one_rank
def test_shards_in_another_order(tmp_path: Path) -> None:
    def sharded(value: float, *rows: int) -> ShardedVariable:
        return ShardedVariable([mpidist.Variable(np.full((count, 2), value)) for count in rows])

    strategy = mpidist.get_strategy()
    model, optimizer = SimpleNamespace(a=sharded(1.0, 2, 1), b=sharded(3.0, 1, 2)), adam()
    step(strategy, optimizer, [model.a, model.b])
    path = Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "ckpt")
    fresh, resumed = SimpleNamespace(a=mpidist.Variable(np.zeros((3, 2))), b=sharded(0.0, 3)), adam()
    status = Checkpoint(model=fresh, optimizer=resumed).restore(path)
    resumed.build([fresh.b, fresh.a])
    status.assert_consumed()
    for mine, saved in ((fresh.a, model.a), (fresh.b, model.b)):
        np.testing.assert_array_equal(resumed.get_slot(mine, "s").numpy(), optimizer.get_slot(saved, "s").numpy())


@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize("strategy", layouts("mirrored-2local"), indirect=True)
def test_unreached_variables_count_by_name(strategy: mpidist.Strategy, is_built: bool, tmp_path: Path) -> None:
    model, optimizer = pair(strategy, a="layer/a", b="b"), momentum()
    step(strategy, optimizer, [model.a, model.b])
    path = Checkpoint(optimizer=optimizer).save(tmp_path / "ckpt")
    if strategy.extended.should_checkpoint:
        assert slot_keys(path) == {f"optimizer/slots_by_name/{name}/momentum" for name in ("layer%2Fa", "b")}
    fresh, resumed = pair(strategy, 7.0, a="layer/a", b="b"), momentum()
    if is_built:
        resumed.build([fresh.b, fresh.a])
    with strategy.scope():
        status = Checkpoint(optimizer=resumed).restore(path)
    resumed.build([fresh.b, fresh.a])
    status.assert_consumed()
    np.testing.assert_array_equal(resumed.get_slot(fresh.a, "momentum"), optimizer.get_slot(model.a, "momentum"))


@pytest.mark.one_rank
@pytest.mark.parametrize("names", [{}, {"a": "same", "b": "same"}], ids=["unnamed", "same name"])
def test_without_path_and_name_by_position(names: dict[str, str], tmp_path: Path) -> None:
    strategy = mpidist.get_strategy()
    model, optimizer = pair(strategy, **names), momentum()
    step(strategy, optimizer, [model.a, model.b])
    path = Checkpoint(optimizer=optimizer).save(tmp_path / "ckpt")
    assert slot_keys(path) == {f"optimizer/slots_by_position/{index}/momentum" for index in (0, 1)}
    fresh, resumed = pair(strategy, 7.0, **names), momentum()
    with pytest.warns(UserWarning, match="'optimizer' by the position of their variables") as caught:
        status = Checkpoint(optimizer=resumed).restore(path)
    assert len(caught) == 1
    resumed.build([fresh.a, fresh.b])
    status.assert_consumed()
    np.testing.assert_array_equal(resumed.get_slot(fresh.b, "momentum"), optimizer.get_slot(model.b, "momentum"))


@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize("strategy", layouts("mirrored-2local", "multi_worker-1local"), indirect=True)
def test_version_2_is_restored_by_position(strategy: mpidist.Strategy, is_built: bool, tmp_path: Path) -> None:
    model, optimizers = pair(strategy, 7.0), {"adam": adam(), "sgd": momentum()}
    if is_built:
        for optimizer in optimizers.values():
            optimizer.build([model.a, model.b])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint = Checkpoint(model=model, **optimizers)
        status = checkpoint.restore(BY_POSITION)
    expected = ["the order of the variables could not be checked"] * bool(strategy.extended.should_checkpoint)
    assert [text for text in expected if text in str(caught[0].message)] == expected
    assert len(caught) == len(expected)
    if not is_built:
        # Saved again before they are built, slots still have their positions.
        again = checkpoint.save(tmp_path / "again")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint.restore(again)
        for optimizer in optimizers.values():
            optimizer.build([model.a, model.b])
    assert status.assert_existing_objects_matched().unused == ()
    np.testing.assert_allclose(optimizers["adam"].get_slot(model.a, "m").numpy(), [0.271, 0.542])
    np.testing.assert_allclose(optimizers["adam"].get_slot(model.b, "m").numpy(), [-0.813, 1.355])
    np.testing.assert_allclose(optimizers["sgd"].get_slot(model.a, "momentum").numpy(), [-0.271, -0.542])
    path = checkpoint.save(tmp_path / "new")
    if strategy.extended.should_checkpoint:
        assert {key.split("/")[1] for key in slot_keys(path)} == {"slots_by_path"}


@pytest.mark.one_rank
@pytest.mark.filterwarnings("ignore:.*by the position of their variables")
def test_positions_of_other_shapes_are_refused(tmp_path: Path) -> None:
    strategy = mpidist.get_strategy()
    model, new, optimizer = pair(strategy, 7.0), mpidist.Variable([1.0, 2.0, 3.0]), adam()
    before = numbers(model)
    optimizer.build([new, model.a, model.b])
    objects = {"model": model, "new": new, "adam": optimizer}
    with pytest.raises(ValueError, match=r"'adam/slots_by_path/new/m' has shape \(2,\).* and shape \(3,\) .* here"):
        Checkpoint(**objects).restore(BY_POSITION)
    assert numbers(model) == before
    objects["adam"] = later = adam()
    Checkpoint(**objects).restore(BY_POSITION).expect_partial()
    with pytest.raises(ValueError, match=r"slots/0/m of shape \(2,\).*Build the optimizer with the variables"):
        later.build([new, model.a, model.b])


@pytest.mark.one_rank
def test_a_variable_that_has_no_place_yet(tmp_path: Path) -> None:
    strategy = mpidist.get_strategy()
    model, optimizer = pair(strategy), momentum()
    step(strategy, optimizer, [model.a, model.b])
    path = Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "ckpt")
    fresh, resumed = SimpleNamespace(a=mpidist.Variable([0.0, 0.0])), momentum()
    status = Checkpoint(model=fresh, optimizer=resumed).restore(path).expect_partial()
    late = mpidist.Variable([0.0, 0.0], name="late")
    with pytest.warns(UserWarning, match=r"slots of the variables \['late'\] start from zero.*model/b/momentum"):
        resumed.build([fresh.a, late])
    assert "optimizer/slots_by_path/model/b/momentum" in status.deferred
    # From now on the slots of this variable are saved, and not the restored ones.
    fresh.b = late
    again = Checkpoint(model=fresh, optimizer=resumed).save(tmp_path / "again")
    resumed.get_slot(late, "momentum").assign([5.0, 5.0])
    Checkpoint(model=fresh, optimizer=resumed).restore(again).assert_existing_objects_matched()
    assert resumed.get_slot(late, "momentum").numpy().tolist() == [0.0, 0.0]
