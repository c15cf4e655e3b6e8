"""Objects that a checkpoint holds by their attributes, and values that wait until their variables are made."""

from __future__ import annotations

import copy
import json
import logging
import re
import threading
from collections import namedtuple
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import mpidist
from mpidist import Checkpoint
from mpidist.core.errors import PeerError
from mpidist.experimental import ShardedVariable
from mpidist.metrics import Mean
from mpidist.optimizers import SGD, Adam
from tests.support.ranks.layouts import layouts, per_replica

SYNC, AGGREGATION = mpidist.VariableSynchronization, mpidist.VariableAggregation


class Activation(Enum):
    RELU = "relu"


class Dense:
    def __init__(self, value: float, width: int = 2) -> None:
        self.width, self._name, self.activation = width, "dense", Activation.RELU
        self.kernel = mpidist.Variable(np.full(width, value))
        self._bias = mpidist.Variable(value)


class Model:
    """What programs have: layers in lists and dicts, a way back, settings, and things that are no one's state."""

    def __init__(self, value: float) -> None:
        self.last = Dense(value + 1)
        self.layers = [Dense(value), {"head": self.last}]
        for layer in (self.layers[0], self.last):
            layer.model = self  # type: ignore[union-attr, attr-defined]
        self.seen, self.rate, self.labels = np.full(2, int(value)), value, np.array(["cat", "dog"])
        self.lock, self.log, self.module, self.call = threading.Lock(), logging.getLogger(), np, lambda x: x
        self.shape, self.cache = (2, 3), {(1, 2): "a key that is no name"}
        self.optimizer, self.loss = Adam(value), Mean()

    def numbers(self) -> list[float]:
        first: Any = self.layers[0]
        return [float(v.numpy().sum()) for v in (first.kernel, first._bias, self.last.kernel)]


KEYS = [
    "layers/0/_bias", "layers/0/kernel", "last/_bias", "last/kernel", "loss/count", "loss/total", "seen",
    "optimizer/iterations",
]  # fmt: skip


@pytest.mark.counts
@pytest.mark.parametrize("options", [{}, {"sharded": True}, {"async_save": True}], ids=["plain", "sharded", "async"])
def test_an_object_and_all_that_its_attributes_hold(
    strategy: mpidist.Strategy, options: dict[str, bool], tmp_path: Path
) -> None:
    with strategy.scope():
        model, fresh = Model(1.0), Model(5.0)
    for those in (model, fresh):
        those.optimizer.build([those.last.kernel])
    strategy.run(lambda x: model.loss.update_state(x), args=(per_replica(strategy, float),))
    checkpoint = Checkpoint(model=model)
    path = checkpoint.save(tmp_path / "ckpt", **options)
    checkpoint.wait()
    if strategy.extended.should_checkpoint:
        manifest = json.loads((Path(path) / "manifest.json").read_text())
        slots = (f"optimizer/slots_by_path/model/last/kernel/{slot}" for slot in "ms")
        expected = {f"model/{key}" for key in (*KEYS, *slots)}
        assert manifest["tensors"].keys() == expected
        assert manifest["links"] == {
            "model/layers/1/head": "model/last", "model/last/model": "model", "model/layers/0/model": "model",
        }  # fmt: skip
    Checkpoint(model=fresh).restore(path).assert_consumed()
    # The rate is a setting of the program, but that of an optimizer is its state.
    assert fresh.numbers() == model.numbers() == [2.0, 1.0, 4.0]
    assert (fresh.seen.tolist(), fresh.rate, fresh.optimizer.learning_rate) == ([1, 1], 5.0, 1.0)
    assert fresh.loss.result() == pytest.approx(model.loss.result())


def tied(one: float, other: float | None = None) -> SimpleNamespace:
    v = mpidist.Variable(one)
    return SimpleNamespace(a=v, b=v if other is None else mpidist.Variable(other))


def test_what_is_shared_here_and_not_there(strategy: mpidist.Strategy, tmp_path: Path) -> None:
    with strategy.scope():
        shared, apart, equal, again = tied(1.0), tied(2.0, 3.0), tied(4.0, 4.0), tied(0.0)
    path = Checkpoint(model=shared).save(tmp_path / "shared")
    Checkpoint(model=apart).restore(path).assert_consumed()
    assert (apart.a.numpy(), apart.b.numpy()) == (1.0, 1.0)
    Checkpoint(model=again).restore(Checkpoint(model=equal).save(tmp_path / "equal")).assert_consumed()
    assert again.a.numpy() == 4.0
    apart.b.assign(9.0)
    differing = Checkpoint(model=apart).save(tmp_path / "apart")
    expected = ValueError if strategy.extended.should_checkpoint else PeerError
    with pytest.raises(expected, match="'model/a' and 'model/b' are one thing here, and differ in the checkpoint"):
        Checkpoint(model=again).restore(differing)
    assert again.a.numpy() == 4.0


@pytest.mark.one_rank
def test_a_ring_is_told_from_a_chain(tmp_path: Path) -> None:
    def nodes(count: int, value: float) -> list[SimpleNamespace]:
        made = [SimpleNamespace(v=mpidist.Variable(value + i), next=None, before=None) for i in range(count)]
        for one, other in zip(made, [*made[1:], made[0]], strict=True):
            one.next, other.before = other, one
        return made

    # More than the depth of a key, and two to the power of that many paths.
    ring, again = nodes(150, 0.0), nodes(150, 500.0)
    path = Checkpoint(first=ring[0], ring=ring).save(tmp_path / "ckpt")
    Checkpoint(first=again[0], ring=again).restore(path).assert_consumed()
    assert [float(node.v.numpy()) for node in again] == [float(i) for i in range(150)]
    # One node that is its own neighbour was saved, and the neighbours are others here.
    alone, three = nodes(1, 7.0), nodes(3, 0.0)
    path = Checkpoint(node=alone[0]).save(tmp_path / "alone")
    Checkpoint(node=three[0]).restore(path).assert_consumed()
    assert [float(node.v.numpy()) for node in three] == [7.0, 7.0, 7.0]


@pytest.mark.one_rank
def test_many_ways_back_are_restored_where_things_are_separate(tmp_path: Path) -> None:
    names = [f"l{i}" for i in range(40)]  # two to the power of that many paths
    one: Any = SimpleNamespace(v=mpidist.Variable(1.0))
    vars(one).update(dict.fromkeys(names, one))
    path = Checkpoint(m=one).save(tmp_path / "ckpt")
    apart: Any = SimpleNamespace(v=mpidist.Variable(0.0))
    vars(apart).update((name, SimpleNamespace(v=mpidist.Variable(0.0))) for name in names)
    Checkpoint(m=apart).restore(path).assert_consumed()
    assert {float(getattr(apart, name).v.numpy()) for name in names} == {1.0}
    # One of them has yet to make its variable.
    apart.l7 = SimpleNamespace()
    status = Checkpoint(m=apart).restore(path)
    assert status.deferred == ("m/v",)
    apart.l7.v = mpidist.Variable(0.0)
    assert apart.l7.v.numpy() == 1.0
    status.assert_consumed()


@pytest.mark.one_rank
def test_an_object_that_holds_nothing_of_its_own(tmp_path: Path) -> None:
    def made(*kernels: mpidist.Variable) -> Any:
        # The encoder has the kernel of the model, its holder has the encoder, and each is there twice.
        encoders = [SimpleNamespace(k=kernels[i]) for i in (-2, -1)]
        return SimpleNamespace(kernel=kernels[0], a=SimpleNamespace(e=encoders[0]), b=SimpleNamespace(e=encoders[1]))

    one: Any = made(*[mpidist.Variable(3.0)] * 3)
    one.b = one.a
    one.b.itself = one.b
    one.empty = one.same = SimpleNamespace()
    one.empty.itself = one.empty
    path = Path(Checkpoint(m=one).save(tmp_path / "ckpt"))
    links = {"m/a/e/k": "m/kernel", "m/b": "m/a", "m/a/itself": "m/a"}
    assert json.loads((path / "manifest.json").read_text())["links"] == links
    kernels = [mpidist.Variable(0.0) for _ in range(3)]
    Checkpoint(m=made(*kernels)).restore(path).assert_consumed()
    assert [float(kernel.numpy()) for kernel in kernels] == [3.0, 3.0, 3.0]


@pytest.mark.one_rank
def test_objects_with_nothing_to_save(tmp_path: Path) -> None:
    for wrong in (object(), threading.Lock(), print, Dense, np):
        with pytest.raises(TypeError, match="'x' is a .*; expected a variable.*an object with these in its attributes"):
            Checkpoint(x=wrong)
    checkpoint = Checkpoint(x=SimpleNamespace(rate=0.5), v=mpidist.Variable(1.0))
    with pytest.raises(TypeError, match="'x' is a SimpleNamespace with nothing to save in its attributes"):
        checkpoint.save(tmp_path / "ckpt")
    checkpoint.x.weight = mpidist.Variable(2.0)
    checkpoint.save(tmp_path / "ckpt")
    with pytest.raises(TypeError, match=r"'x/by_size' has the dict key \(2, 3\); expected a string or an int"):
        Checkpoint(x=SimpleNamespace(by_size={(2, 3): [mpidist.Variable(1.0)]}))


@pytest.mark.one_rank
def test_attributes_that_cannot_be_saved_are_settings(tmp_path: Path) -> None:
    variable = mpidist.Variable(1.0)
    model: Any = SimpleNamespace(v=variable, deep=chain(5000, variable), mock=Mock(), endless=[0])
    model.endless.append({"again": model.endless})
    model.mask, model.big = np.broadcast_to(np.ones(1), (3,)), np.zeros(2, ">f4")
    model.masked = np.ma.masked_array([1.0], [True])
    # No name leads there, and the variable is not lost, as one leads to it elsewhere.
    model.by_size = {(1, 2): variable, (3, 4): [model, np.ones(2)]}
    path = Checkpoint(model=model).save(tmp_path / "ckpt")
    assert json.loads((Path(path) / "manifest.json").read_text())["tensors"].keys() == {"model/v"}
    variable.assign(0.0)
    Checkpoint(model=model).restore(path).assert_consumed()
    assert variable.numpy() == 1.0
    with pytest.raises(TypeError, match="'mock' is a Mock; expected"):
        Checkpoint(mock=model.mock)
    for lost in (mpidist.Variable(2.0), SGD(0.1)):
        for model.by_size, model.deep.inner.other, error in (
            ({(1, 2): {3: lost}}, None, r"TypeError.*'model/by_size' has the dict key \(1, 2\)"),
            ({}, chain(120, lost), "ValueError.*'model/deep/inner/other.* is nested more than 100 deep"),
        ):
            with pytest.raises((TypeError, ValueError)) as raised:
                Checkpoint(model=model)
            assert re.search(error, repr(raised.value))


def chain(length: int, last: Any) -> Any:
    for _ in range(length):
        last = SimpleNamespace(inner=last)
    return last


Pair = namedtuple("Pair", "first second")


@pytest.mark.one_rank
def test_numbers_in_tuples(tmp_path: Path) -> None:
    checkpoint = Checkpoint(betas=(0.9, 0.999), nest=[Pair(1, ("a", None))])
    path = checkpoint.save(tmp_path / "ckpt")
    checkpoint.betas, checkpoint.nest[0] = (0.0, 0.0), Pair(0, ("", 1))
    checkpoint.restore(path).assert_consumed()
    assert (checkpoint.betas, checkpoint.nest) == ((0.9, 0.999), [Pair(1, ("a", None))])
    assert isinstance(checkpoint.nest[0], Pair)
    fresh = Checkpoint(betas=(0, 0), nest=[])
    fresh.restore(path).assert_consumed()
    assert fresh.nest == [(1, ("a", None))]


# Values that wait ---------------------------------------------------------------------------------------------------


class Lazy:
    """A layer that makes its variables when it first needs them."""

    def __init__(self) -> None:
        self.built = False

    def __call__(self, x: float) -> Any:
        if not self.built:
            self.kernel, self.scales = mpidist.Variable([1.0, 1.0]), [mpidist.Variable(1.0)]
            self.built = True
        return self.kernel * x + self.scales[0]


@pytest.mark.counts
def test_values_wait_for_variables_that_are_made_later(strategy: mpidist.Strategy, tmp_path: Path) -> None:
    with strategy.scope():
        model: Any = Lazy()
        model(0.0)
        total = mpidist.Variable(0.0, synchronization=SYNC.ON_READ, aggregation=AGGREGATION.SUM)
        model.total = total
    model.kernel.assign([2.0, 3.0])
    model.scales[0].assign(4.0)
    total.assign(6.0)
    path = Checkpoint(model=model).save(tmp_path / "ckpt")

    fresh: Any = Lazy()
    with strategy.scope():
        checkpoint = Checkpoint(model=fresh)
        status = checkpoint.restore(path)
        assert status.deferred == ("model/kernel", "model/scales/0", "model/total")
        with pytest.raises(
            AssertionError, match=r"wait for variables.*'model/kernel', 'model/scales/0', 'model/total'"
        ):
            status.assert_consumed()
        # Saved again before they are made, they are not lost.
        again = checkpoint.save(tmp_path / "again")
        status = checkpoint.restore(again)
        # The very first use is of what was restored, and it may be that of one rank alone.
        if strategy.extended.should_checkpoint:
            assert fresh(1.0).tolist() == [6.0, 7.0]
        else:
            fresh.kernel, fresh.scales, fresh.built = mpidist.Variable([1.0, 1.0]), [mpidist.Variable(1.0)], True
        fresh.total = mpidist.Variable(0.0, synchronization=SYNC.ON_READ, aggregation=AGGREGATION.SUM)
        assert status.deferred[-1] == "model/total"
    assert fresh.total.numpy() == pytest.approx(6.0)
    assert status.assert_consumed().deferred == ()
    assert "_mpidist_waiting" not in vars(fresh)
    results = strategy.run(lambda: fresh(1.0))
    assert all(result.tolist() == [6.0, 7.0] for result in strategy.experimental_local_results(results))


@pytest.mark.one_rank
def test_the_objects_keep_what_waits_for_them(tmp_path: Path) -> None:
    model = Lazy()
    model(0.0)
    model.kernel.assign([5.0, 5.0])
    path = Checkpoint(model=model).save(tmp_path / "ckpt")
    fresh = Lazy()
    Checkpoint(model=fresh).restore(path)
    assert vars(copy.copy(fresh)) == vars(fresh)
    assert vars(copy.deepcopy(fresh)) == {"built": False, "_mpidist_waiting": None}
    # What is assigned first stays, as it would if the variable had been there.
    kernel = mpidist.Variable([0.0, 0.0])
    assert kernel.shape == (2,)
    fresh.kernel = kernel
    kernel.assign_add([1.0, 1.0])
    assert kernel.numpy().tolist() == [6.0, 6.0]
    # Nobody has used the second one when the program lets go of all of them.
    with pytest.warns(UserWarning, match=r"values that no variable has got: \['model/scales/0'\]"):
        vars(fresh).pop("_mpidist_waiting").__del__()
    Checkpoint(model=fresh).restore(path).expect_partial()


@pytest.mark.one_rank
def test_what_does_not_fit_when_it_comes(tmp_path: Path) -> None:
    path = Checkpoint(model=SimpleNamespace(v=mpidist.Variable([1.0, 2.0]))).save(tmp_path / "ckpt")
    early, fresh = mpidist.Variable([0.0, 0.0]).assign([3.0, 3.0]), SimpleNamespace()
    status = Checkpoint(model=fresh).restore(path).expect_partial()
    with pytest.raises(AssertionError, match=r"has given no object a value; it has \['model/v'\]"):
        status.assert_nontrivial_match()
    fresh.v = mpidist.Variable([0.0, 0.0, 0.0])
    for use in (fresh.v.numpy, status.assert_consumed):
        with pytest.raises(ValueError, match=r"'model/v' has shape \(2,\).* made for it has shape \(3,\)"):
            use()
    # What was in use before may have been trained since: it is not filled.
    fresh.v = early
    with pytest.raises(AssertionError, match=r"wait for variables.*'model/v'"):
        status.assert_consumed()
    assert early.numpy().tolist() == [3.0, 3.0]
    fresh.v, fresh.new = mpidist.Variable([0.0, 0.0]), mpidist.Variable(8.0)
    with pytest.raises(AssertionError, match=r"has no value for \['model/new'\]"):
        status.assert_existing_objects_matched()
    assert (fresh.v.numpy().tolist(), status.deferred) == ([1.0, 2.0], ())
    assert status.assert_nontrivial_match() is status


@pytest.mark.one_rank
def test_a_value_that_waits_is_given_once(tmp_path: Path) -> None:
    model = SimpleNamespace(v=mpidist.Variable(1.0), w=mpidist.Variable(2.0))
    path = Checkpoint(model=model).save(tmp_path / "ckpt")
    fresh: Any = SimpleNamespace(new=mpidist.Variable(3.0))
    status = Checkpoint(model=fresh).restore(path)
    fresh.v = mpidist.Variable(0.0)
    assert fresh.v.numpy() == 1.0
    fresh.v = mpidist.Variable(5.0)
    assert (fresh.v.numpy(), status.deferred, status.missing) == (5.0, ("model/w",), ("model/new",))
    status.expect_partial()


@pytest.mark.one_rank
def test_shards_that_come_later_and_variables_that_come_from_before(tmp_path: Path) -> None:
    model = SimpleNamespace(rows=mpidist.Variable([[1.0], [2.0], [3.0]]), v=mpidist.Variable(4.0))
    path = Checkpoint(model=model).save(tmp_path / "ckpt")
    fresh: Any = SimpleNamespace()
    made_before, shards = mpidist.Variable(0.0), [mpidist.Variable([[0.0], [0.0]]), mpidist.Variable([[0.0]])]
    status = Checkpoint(model=fresh).restore(path)
    fresh.v, fresh.rows = made_before, ShardedVariable(shards)
    # Also where it is by going through the attributes that they are used.
    assert [value.numpy().sum() for value in vars(fresh).values() if hasattr(value, "numpy")] == [4.0, 6.0]
    status.assert_consumed()


@pytest.mark.one_rank
def test_what_waits_is_saved_as_it_was(tmp_path: Path) -> None:
    model: Any = SimpleNamespace(a=mpidist.Variable(1.0, synchronization=SYNC.ON_READ, aggregation=AGGREGATION.SUM))
    model.b, model.layers = model.a, {"first": SimpleNamespace(model=model, w=mpidist.Variable(2.0))}
    first = Path(Checkpoint(model=model).save(tmp_path / "ckpt"))
    fresh: Any = SimpleNamespace(layers={"first": SimpleNamespace(model=mpidist.Variable(3.0))})
    checkpoint = Checkpoint(model=fresh)
    checkpoint.restore(first).expect_partial()
    second = Path(checkpoint.save(tmp_path / "ckpt"))
    before, after = (json.loads((path / "manifest.json").read_text()) for path in (first, second))
    # What is another thing by now is no link.
    assert before["links"] == {"model/b": "model/a", "model/layers/first/model": "model"}
    assert after["links"] == {"model/b": "model/a"}
    assert after["tensors"]["model/a"]["aggregation"] == "SUM"
    other: Any = SimpleNamespace()
    Checkpoint(model=other).restore(second).expect_partial()
    other.b = mpidist.Variable(0.0)
    assert other.b.numpy() == 1.0
    # Of links to what holds things that wait and things that are here, too.
    checkpoint = Checkpoint(model=SimpleNamespace(v=mpidist.Variable(0.0)))
    checkpoint.restore(first).expect_partial()
    third = Path(checkpoint.save(tmp_path / "ckpt"))
    assert json.loads((third / "manifest.json").read_text())["links"] == before["links"]


@pytest.mark.one_rank
def test_what_is_wrong_with_one_object_is_told_where_that_is_used(tmp_path: Path) -> None:
    path = Checkpoint(model=SimpleNamespace(v=mpidist.Variable(1.0), w=mpidist.Variable(2.0))).save(tmp_path / "ckpt")
    fresh: Any = SimpleNamespace()
    checkpoint = Checkpoint(model=fresh)
    status = checkpoint.restore(path).expect_partial()
    fresh.table, fresh.v = {(0, 1): mpidist.Variable(3.0)}, mpidist.Variable([9.0])
    fresh.w, other = mpidist.Variable(0.0), mpidist.Variable(8.0)
    assert (other.numpy(), fresh.w.numpy(), status.deferred) == (8.0, 2.0, ("model/v",))
    with pytest.raises(ValueError, match=r"'model/v' has shape \(\).* made for it has shape \(1,\)"):
        fresh.v.numpy()
    for meet in (status.assert_consumed, lambda: checkpoint.save(tmp_path / "again")):
        with pytest.raises(TypeError, match=r"'model/table' has the dict key \(0, 1\)"):
            meet()


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)
def test_attributes_that_one_rank_alone_has(strategy: mpidist.Strategy, tmp_path: Path) -> None:
    is_chief = strategy.extended.should_checkpoint
    with strategy.scope():
        model, more = SimpleNamespace(v=mpidist.Variable(1.0)), mpidist.Variable(2.0)
    checkpoint = Checkpoint(model=model)
    if is_chief:
        model.more = more
    with pytest.raises(ValueError, match="different objects: 'model/more' only on rank 0; expected the same on each"):
        checkpoint.save(tmp_path / "ckpt")
    model.more = more
    path = checkpoint.save(tmp_path / "ckpt")
    more.assign(0.0)
    if not is_chief:
        del model.more
    # It is there for the one, and would wait for the other.
    with pytest.raises(
        ValueError, match=r"'model/more' only on rank 0; 'model/more \(yet to be made\)' only on ranks? 1"
    ):
        checkpoint.restore(path)
    assert more.numpy() == 0.0
