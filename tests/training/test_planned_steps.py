"""Steps that repeat: an optimizer plans them, and notices whatever has changed since."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.optimizers import SGD, Adam, AdamW, RMSprop

pytestmark = [pytest.mark.own_strategy, pytest.mark.counts]
SHAPES = [(300, 100), (), (7,), (0, 2), (4, 3)]
MAKERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: SGD(0.1),
    "momentum": lambda: SGD(0.1, momentum=0.9),
    "nesterov": lambda: SGD(0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda: RMSprop(0.1, momentum=0.5, centered=True),
    "adam": lambda: Adam(0.1),
    "adamw": lambda: AdamW(0.1),
    "scheduled": lambda: SGD(lambda step: 0.1 / (step + 1)),
}


class Alone(SGD):
    """Takes the general path, because it overrides the update."""

    def update_variable(self, *args: Any) -> None:
        super().update_variable(*args)


@pytest.fixture(name="strategy", params=["ranks", "one_device"])
def _strategy(request: Any) -> Any:
    make = mpidist.MultiWorkerMirroredStrategy if request.param == "ranks" else mpidist.OneDeviceStrategy
    with make(*([] if request.param == "ranks" else ["cpu:0"])) as strategy:
        yield strategy


def made(strategy: Any, make: Callable[[], Any], shapes: Any = SHAPES, dtype: str = "float32") -> Any:
    with strategy.scope():
        return [mpidist.Variable(np.ones(shape, dtype), name=f"v{i}") for i, shape in enumerate(shapes)], make()


def gradients_at(step: int, variables: list[mpidist.Variable]) -> list[np.ndarray]:
    context = mpidist.get_replica_context()
    assert context is not None
    rng = np.random.default_rng([step, context.replica_id_in_sync_group])
    return [np.asarray(rng.standard_normal(v.shape)).astype(v.dtype) for v in variables]


def train(strategy: Any, variables: list[mpidist.Variable], optimizer: Any, steps: Any, lazily: bool = False) -> None:
    def step(number: int) -> None:
        pairs = list(zip(gradients_at(number, variables), variables, strict=True))
        optimizer.apply_gradients((pair for pair in pairs) if lazily else pairs)

    for number in steps:
        strategy.run(step, (number,))


def bits(variables: Any) -> list[bytes]:
    return [variable.numpy().tobytes() for variable in variables]


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_planned_steps_give_the_same_bits(strategy: Any, kind: str, dtype: str) -> None:
    found = []
    for lazily in (False, True):
        variables, optimizer = made(strategy, MAKERS[kind], dtype=dtype)
        train(strategy, variables, optimizer, range(5), lazily)
        assert optimizer.iterations.numpy() == 5
        found.append(bits([*variables, *optimizer.variables]))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("gradient", "error"),
    [(np.ones(8, np.float32), ValueError), (np.ones(7), TypeError), ("text", TypeError), (None, None), (1, None)],
)
def test_other_gradients_are_checked(strategy: Any, gradient: Any, error: Any) -> None:
    variables, optimizer = made(strategy, lambda: SGD(0.1))
    train(strategy, variables, optimizer, range(3))

    def step() -> None:
        gradients: list[Any] = gradients_at(3, variables)
        if gradient is None or error is not None:
            gradients[2] = gradient
        else:
            gradients[1] = gradient
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    before = bits(variables)
    if error is None:
        strategy.run(step)
        assert (bits(variables)[2] == before[2]) is (gradient is None)
    else:
        with pytest.raises(error):
            strategy.run(step)
        assert bits(variables) == before


def test_changes_between_steps_count(strategy: Any, tmp_path: Path) -> None:
    """Constraints, settings, assignments, restored values and iterations."""
    variables, optimizer = made(strategy, lambda: SGD(0.5, momentum=0.5), [(3,)])
    (v,) = variables

    def step() -> None:
        optimizer.apply_gradients([(np.full(3, 1.0 / strategy.num_replicas_in_sync, np.float32), v)])

    optimizer.build([v])
    checkpoint = mpidist.Checkpoint(v=v, optimizer=optimizer)
    path = checkpoint.save(tmp_path / "saved")
    expected, velocity = 1.0, 0.0

    def after(rate: float, momentum: float) -> float:
        nonlocal expected, velocity
        strategy.run(step)
        velocity = momentum * velocity - rate
        expected += velocity
        return float(v.numpy()[0])

    for _ in range(3):
        assert after(0.5, 0.5) == expected
    optimizer.learning_rate = 0.25
    assert after(0.25, 0.5) == expected
    optimizer.momentum = 0.25
    assert after(0.25, 0.25) == expected
    assert after(0.25, 0.25) == expected
    v.assign(np.full(3, 8, np.float32))
    expected = 8.0
    assert after(0.25, 0.25) == expected
    optimizer.iterations.assign(40)
    assert after(0.25, 0.25) == expected
    assert optimizer.iterations.numpy() == 41
    checkpoint.restore(path).assert_consumed()
    expected, velocity = 1.0, 0.0
    assert after(0.5, 0.25) == expected
    v.constraint = lambda array: np.minimum(array, -100)
    strategy.run(step)
    assert v.numpy().tolist() == [-100.0] * 3


def test_momentum_needs_its_slots(strategy: Any) -> None:
    variables, optimizer = made(strategy, lambda: SGD(0.1))
    train(strategy, variables, optimizer, range(3))
    optimizer.momentum = 0.5
    with pytest.raises(ValueError, match=r"no slot 'momentum' for variable 'v0', which has the slots \[\]"):
        train(strategy, variables, optimizer, [3])


def test_copies_have_plans_of_their_own(strategy: Any) -> None:
    (v,), optimizer = made(strategy, lambda: SGD(1.0), [(2,)])
    train(strategy, [v], optimizer, range(2))
    twin, (w,) = copy.deepcopy((optimizer, [v]))
    before = bits([v])
    train(strategy, [w], twin, range(3))
    assert bits([v]) == before
    assert bits([w]) != before


def test_variables_end_with_their_optimizer(strategy: Any) -> None:
    variables, optimizer = made(strategy, lambda: Adam(0.1))
    train(strategy, variables, optimizer, range(3))
    dead = [weakref.ref(each) for each in variables]
    del variables, optimizer
    gc.collect()
    assert [each() for each in dead] == [None] * len(dead)


@pytest.mark.parametrize("make", [lambda: SGD(0.1), lambda: Adam(0.1)])
@pytest.mark.parametrize("view", [lambda array: array[::-1], lambda array: np.broadcast_to(array[:1], array.shape)])
def test_gradients_may_be_views_of_variables(strategy: Any, make: Any, view: Any) -> None:
    found = []
    for copied in (np.asarray, np.array):
        (v,), optimizer = made(strategy, make, [(40_000,)])
        v.assign(np.arange(v.size, dtype=np.float32))
        for _ in range(3):
            strategy.run(
                lambda v, o, copied: o.apply_gradients([(copied(view(np.asarray(v))), v)]), (v, optimizer, copied)
            )
        found.append(v.numpy().tolist())
    assert found[0] == found[1]


def test_an_overridden_update_is_called(strategy: Any) -> None:
    results = []
    for make in (lambda: SGD(0.1), lambda: Alone(0.1)):
        variables, optimizer = made(strategy, make)
        train(strategy, variables, optimizer, range(3))
        results.append(bits(variables))
    assert results[0] == results[1]


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("strategy", ["ranks"], indirect=True)
def test_ranks_that_differ_after_planned_steps_raise(strategy: Any) -> None:
    variables, optimizer = made(strategy, lambda: SGD(0.1), [(3,), (3,), (3,)])
    rank = strategy.extended.communicator.rank
    train(strategy, variables, optimizer, range(3))
    before = bits(variables)
    with pytest.raises(mpidist.MismatchError, match="v1"):
        train(strategy, variables[::-1] if rank else variables, optimizer, [3])
    with pytest.raises(mpidist.MismatchError, match="v2"):
        train(strategy, variables[:2] if rank else variables, optimizer, [3])
    assert bits(variables) == before
    variables[0].assign(np.full(3, rank, np.float32))
    with pytest.raises(mpidist.MismatchError, match="assign outside"):
        train(strategy, variables, optimizer, [3])
    variables[0].assign(np.ones(3, np.float32))
    optimizer.learning_rate = 0.1 + rank
    with pytest.raises(mpidist.MismatchError, match="learning_rate=1.1"):
        train(strategy, variables, optimizer, [3])
