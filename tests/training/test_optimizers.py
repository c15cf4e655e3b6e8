"""Optimizers: their formulas against slow ones, the sum over replicas, contexts, dtypes, sparse gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.optimizers import SGD, Adam, AdamW, Optimizer, RMSprop
from mpidist.values import Mirrored
from tests.support.ranks.layouts import layouts, per_replica

MAKERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda **more: SGD(0.1, **more),
    "momentum": lambda **more: SGD(0.1, momentum=0.9, **more),
    "nesterov": lambda **more: SGD(0.1, momentum=0.9, nesterov=True, **more),
    "adam": lambda **more: Adam(0.1, **more),
    "adamw": lambda **more: AdamW(0.1, weight_decay=0.2, **more),
    "rmsprop": lambda **more: RMSprop(0.1, rho=0.8, epsilon=1e-3, **more),
    "centered": lambda **more: RMSprop(0.1, rho=0.8, momentum=0.5, epsilon=1e-3, centered=True, **more),
}


@pytest.fixture(params=MAKERS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def reference(kind: str, value: float, gradients: list[float]) -> float:
    """Written from the docstrings, one number at a time."""
    m = s = a = 0.0
    for t, g in enumerate(gradients, 1):
        if kind == "sgd":
            value -= 0.1 * g
        elif kind in ("rmsprop", "centered"):
            s = 0.8 * s + (1 - 0.8) * g * g
            a = 0.8 * a + (1 - 0.8) * g if kind == "centered" else 0.0
            m = (0.5 * m if kind == "centered" else 0.0) + 0.1 * g / math.sqrt(s - a * a + 1e-3)
            value -= m
        elif kind in ("adam", "adamw"):
            value -= value * 0.1 * 0.2 if kind == "adamw" else 0.0
            m += (1 - 0.9) * (g - m)
            s += (1 - 0.999) * (g * g - s)
            value -= 0.1 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (math.sqrt(s) + 1e-7)
        else:
            m = 0.9 * m - 0.1 * g
            value += 0.9 * m - 0.1 * g if kind == "nesterov" else m
    return value


def make(strategy: mpidist.Strategy, value: Any, **more: Any) -> mpidist.Variable:
    with strategy.scope():
        return mpidist.Variable(value, **more)


def assert_copies_equal(*variables: mpidist.Variable) -> None:
    for variable in variables:
        for copy in variable.values[1:]:
            np.testing.assert_array_equal(np.asarray(copy), np.asarray(variable.values[0]))


def test_example_23(strategy: mpidist.Strategy) -> None:
    v = make(strategy, 1.0)
    gradients = per_replica(strategy, lambda i: 1.0 + 2.0 * i)
    optimizer = SGD(learning_rate=0.1)
    strategy.run(lambda g: optimizer.apply_gradients([(g, v)]), args=(gradients,))
    n = strategy.num_replicas_in_sync
    assert v.numpy() == pytest.approx(1 - 0.1 * n * n)  # 1 + 3 + 5 + ... = n * n
    assert_copies_equal(v)


def test_formulas_and_layouts(strategy: mpidist.Strategy, kind: str) -> None:
    n = strategy.num_replicas_in_sync
    v, w = make(strategy, [1.0, -2.0], name="v"), make(strategy, [[3.0]], name="w")
    optimizer = MAKERS[kind]()

    def step(g: Any) -> None:
        optimizer.apply_gradients(zip([np.array([g, 2 * g]), np.array([[-g]])], [v, w], strict=True))

    sums = []
    for t in range(5):
        strategy.run(step, args=(per_replica(strategy, lambda i, t=t: float(t - 2 + i)),))
        sums.append(float(sum(t - 2 + i for i in range(n))))
    expected = [
        reference(kind, 1.0, sums),
        reference(kind, -2.0, [2 * g for g in sums]),
        reference(kind, 3.0, [-g for g in sums]),
    ]
    np.testing.assert_allclose([*v.numpy(), w.numpy()[0, 0]], expected, rtol=1e-12)
    assert optimizer.iterations.numpy() == 5
    assert_copies_equal(v, w, *optimizer.variables)


def test_where_no_strategy_is_active(kind: str) -> None:
    v = mpidist.Variable(1.0)
    optimizer = MAKERS[kind]()
    for g in (1.0, 2.0, -1.0):
        optimizer.apply_gradients([(g, v)])
    assert v.numpy() == pytest.approx(reference(kind, 1.0, [1.0, 2.0, -1.0]), rel=1e-12)


@pytest.mark.one_rank
def test_what_an_optimizer_is_shown_as() -> None:
    optimizer = Adam(name="mine")
    assert repr(optimizer) == "<Adam learning_rate=0.001>"
    optimizer.learning_rate = mpidist_dtype  # type: ignore[assignment]
    assert repr(optimizer) == "<Adam learning_rate=mpidist_dtype(step)>"
    # Where the step is known to a server alone nobody asks for it.
    optimizer._iterations = object()  # type: ignore[assignment]
    optimizer.learning_rate = partial(max, 0.1)
    assert repr(optimizer) == "<Adam learning_rate=partial(step)>"
    # A twin for a server is told the rate with each update.
    assert repr(optimizer.rule()) == "<Adam learning_rate=None>"


def test_steps_computed_by_hand() -> None:
    v = mpidist.Variable(1.0)
    RMSprop(0.5, rho=0.75, epsilon=1e-12).apply_gradients([(3.0, v)])  # 3 / sqrt(9 / 4) = 2
    assert v.numpy() == pytest.approx(0.0, abs=1e-10)
    v.assign(1.0)
    centered = RMSprop(1.5, rho=0.5, momentum=0.5, epsilon=1e-12, centered=True)
    # 1.5 * 2 / sqrt(2 - 1) = 3; then half of that and 3 / sqrt(3 - 1.5 ** 2).
    for expected in (-2.0, -3.5 - 2 * math.sqrt(3)):
        centered.apply_gradients([(2.0, v)])
        assert v.numpy() == pytest.approx(expected)
    v.assign(2.0)
    AdamW(0.5, weight_decay=0.25).apply_gradients([(7.0, v)])  # any first step of Adam is the rate: 2 - 1 / 4 - 1 / 2
    assert v.numpy() == pytest.approx(1.25)


def test_across_replicas_gradients_are_sums_already(strategy: mpidist.Strategy) -> None:
    v = make(strategy, [1.0, 2.0])
    optimizer = SGD(0.5, momentum=0.5)
    with strategy.scope():
        optimizer.apply_gradients([([1.0, 1.0], v)])
    optimizer.apply_gradients([(np.ones(2), v)])
    assert optimizer.iterations.numpy() == 2
    np.testing.assert_allclose(v.numpy(), [1 - 0.5 - 0.75, 2 - 0.5 - 0.75])
    assert_copies_equal(v, *optimizer.variables)


def test_mirrored_gradients_are_taken_and_per_replica_ones_refused() -> None:
    with mpidist.MirroredStrategy(["cpu:0", "cpu:1"], communicator=comm_self()) as strategy:
        v = make(strategy, 1.0)
        SGD(0.5).apply_gradients([(Mirrored((np.array(1.0), np.array(1.0))), v)])
        assert v.numpy() == 0.5
        with pytest.raises(ValueError, match="PerReplica, which differs between replicas"):
            SGD(0.5).apply_gradients([(per_replica(strategy, [1.0, 2.0]), v)])


def comm_self() -> Any:
    from mpi4py import MPI

    return MPI.COMM_SELF


def test_gradients_that_were_summed_and_clipped_by_the_user(strategy: mpidist.Strategy) -> None:
    n = strategy.num_replicas_in_sync
    v = make(strategy, [0.0, 0.0])
    optimizer = SGD(1.0)

    def step() -> Any:
        [(g, _)] = optimizer.aggregate_gradients([(np.array([3.0, 4.0]), v), (None, v)])
        [g], norm = mpidist.optimizers.clip_by_global_norm([g], 1.0)
        optimizer.apply_gradients([(g, v)], experimental_aggregate_gradients=False)
        return norm

    norms = strategy.experimental_local_results(strategy.run(step))
    assert norms == (5.0 * n,) * len(norms)
    np.testing.assert_allclose(v.numpy(), [-0.6, -0.8])


def test_none_leaves_a_variable_as_it_is(strategy: mpidist.Strategy) -> None:
    v, w = make(strategy, 1.0), make(strategy, 2.0)
    optimizer = SGD(0.1, momentum=0.9)
    strategy.run(lambda: optimizer.apply_gradients([(None, v), (0.0, w)]))
    assert v.numpy() == 1.0
    with pytest.raises(ValueError, match="only None for the variables"):
        strategy.run(lambda: optimizer.apply_gradients([(None, v)]))
    with pytest.raises(ValueError, match="no gradients"):
        optimizer.apply_gradients([])
    # A variable that joins later gets its slots then.
    strategy.run(lambda: optimizer.apply_gradients([(0.0, v), (0.0, w)]))
    assert len(optimizer.variables) == 3


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (3,), (0, 2)])
def test_dtypes_are_kept(strategy: mpidist.Strategy, kind: str, dtype: str, shape: tuple[int, ...]) -> None:
    kind_of = mpidist_dtype(dtype)
    v = make(strategy, np.ones(shape, kind_of))
    optimizer = MAKERS[kind]()
    for _ in range(2):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(shape, kind_of), v)]))
    assert v.dtype == kind_of
    n = strategy.num_replicas_in_sync
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6, "float64": 1e-12}[dtype]
    expected = np.full(shape, reference(kind, 1.0, [float(n)] * 2))
    np.testing.assert_allclose(v.numpy().astype(float), expected, rtol=tolerance, atol=tolerance)


def mpidist_dtype(name: str) -> np.dtype[Any]:
    if name != "bfloat16":
        return np.dtype(name)
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)


def test_half_precision_keeps_its_slots_in_float32() -> None:
    v = mpidist.Variable(np.ones(2, np.float16))
    optimizer = Adam()
    optimizer.build([v])
    assert optimizer.get_slot(v, "s").dtype == np.float32


def test_sparse_gradients_do_what_the_dense_ones_do(strategy: mpidist.Strategy, kind: str) -> None:
    sparse, dense = make(strategy, np.ones((4, 2))), make(strategy, np.ones((4, 2)))
    optimizers = MAKERS[kind](), MAKERS[kind]()
    rows = per_replica(strategy, lambda i: np.array([i % 4, 1]))

    def step(indices: np.ndarray, factor: float) -> None:
        slices = mpidist.IndexedSlices(np.array([[1.0, 2.0], [3.0, 4.0]]) * factor, indices)
        optimizers[0].apply_gradients([(slices, sparse)])
        whole = mpidist.IndexedSlices(slices.values, indices, (4, 2)).to_dense()
        optimizers[1].apply_gradients([(whole, dense)])

    for factor in (1.0, -2.0):
        strategy.run(step, args=(rows, factor))
    np.testing.assert_allclose(sparse.numpy(), dense.numpy(), rtol=1e-12)
    assert_copies_equal(sparse, *optimizers[0].variables)


def test_variables_of_the_optimizer(strategy: mpidist.Strategy) -> None:
    v, w = make(strategy, np.ones((2, 3)), name="v"), make(strategy, 1.0, name="w")
    optimizer = Adam()
    with pytest.raises(RuntimeError, match="build"):
        optimizer.iterations
    assert optimizer.variables == []
    with strategy.scope():
        optimizer.build([v, w])
    optimizer.build([w, v])
    names = [variable.name for variable in optimizer.variables]
    assert names == ["Adam/iterations", "Adam/v/m", "Adam/v/s", "Adam/w/m", "Adam/w/s"]
    for variable in optimizer.variables:
        assert variable.distribute_strategy is strategy
        assert variable.synchronization == mpidist.VariableSynchronization.ON_WRITE
        assert variable.aggregation == mpidist.VariableAggregation.ONLY_FIRST_REPLICA
        assert not variable.trainable
    assert optimizer.get_slot(v, "m").shape == (2, 3)
    with pytest.raises(ValueError, match="no slot 'momentum'"):
        optimizer.get_slot(v, "momentum")


def test_constraints_hold_after_each_update(strategy: mpidist.Strategy) -> None:
    v = make(strategy, [1.0, 1.0], constraint=lambda x: np.clip(x, 0.5, None))
    optimizer = SGD(1.0)
    strategy.run(lambda: optimizer.apply_gradients([([1.0, 0.0], v)]))
    np.testing.assert_array_equal(v.numpy(), [0.5, 1.0])
    assert_copies_equal(v)


def test_learning_rate_is_a_number_or_a_function_of_the_step(strategy: mpidist.Strategy) -> None:
    v = make(strategy, 0.0)
    n = strategy.num_replicas_in_sync
    optimizer = SGD(lambda step: 1.0 / (step + 1))
    assert optimizer.learning_rate == 1.0
    for _ in range(2):
        strategy.run(lambda: optimizer.apply_gradients([(1.0, v)]))
    assert v.numpy() == pytest.approx(-1.5 * n)
    assert optimizer.learning_rate == pytest.approx(1 / 3)
    optimizer.learning_rate = 4
    assert optimizer.learning_rate == 4.0
    strategy.run(lambda: optimizer.apply_gradients([(1.0, v)]))
    assert v.numpy() == pytest.approx(-5.5 * n)
    with pytest.raises(TypeError, match="learning_rate"):
        SGD("fast")  # type: ignore[arg-type]


def test_one_reduction_a_step(strategy: mpidist.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = mpidist.ReplicaContext.all_reduce

    def counted(*args: Any, **more: Any) -> Any:
        calls.append(args[1])
        return real(*args, **more)

    monkeypatch.setattr(mpidist.ReplicaContext, "all_reduce", counted)
    variables = [make(strategy, np.zeros(i)) for i in range(4)]
    optimizer = Adam()
    strategy.run(lambda: optimizer.apply_gradients([(np.zeros(i), v) for i, v in enumerate(variables)]))
    n = strategy.num_replicas_in_sync
    assert len(calls) == (len(strategy.extended.local_replica_ids) if n > 1 else 0)


@pytest.mark.parametrize("strategy", layouts("mirrored-2local", "one_device"), indirect=True)
def test_variables_of_another_strategy(strategy: mpidist.Strategy) -> None:
    mine, plain = make(strategy, 1.0), mpidist.Variable(1.0)
    kind = type(strategy).__name__
    scope = r"inside `with strategy.scope\(\):`"
    told = rf"'Variable.*' belongs to DefaultStrategy \(it was created outside.*, and {kind} is current; .*{scope}"
    with pytest.raises(ValueError, match=told):
        optimizer = SGD()
        strategy.run(lambda: optimizer.apply_gradients([(1.0, plain)]))
    with pytest.raises(ValueError, match=rf"different strategies: 'Variable.*' to {kind}, and 'Variable.*' to Default"):
        SGD().apply_gradients([(1.0, mine), (1.0, plain)])


@pytest.mark.one_rank
def test_another_strategy_of_the_same_class() -> None:
    with mpidist.OneDeviceStrategy("cpu:0") as one, mpidist.OneDeviceStrategy("cpu:0") as other:
        v, w = make(one, 1.0), make(other, 1.0)
        optimizer = SGD()
        with pytest.raises(ValueError, match="to OneDeviceStrategy, and another OneDeviceStrategy is current"):
            other.run(lambda: optimizer.apply_gradients([(1.0, v)]))
        with pytest.raises(ValueError, match="to OneDeviceStrategy, and .* to another OneDeviceStrategy; expected"):
            optimizer.apply_gradients([(1.0, v), (1.0, w)])


@pytest.mark.parametrize("strategy", layouts("mirrored-2local"), indirect=True)
def test_an_optimizer_for_each_replica_is_refused(strategy: mpidist.Strategy) -> None:
    v = make(strategy, 1.0)
    with pytest.raises(RuntimeError, match="create the optimizer once"):
        strategy.run(lambda: SGD().apply_gradients([(1.0, v)]))


def test_a_schedule_takes_the_step() -> None:
    with pytest.raises(TypeError, match=r"learning_rate is the function .*\(\), which.*expected.*lambda step: 0.1"):
        SGD(lambda: 0.1)  # type: ignore[arg-type,misc]
    optimizer = SGD(lambda step: 0.1 * (step + 1))
    with pytest.raises(TypeError, match="cannot be called with the step alone"):
        optimizer.learning_rate = lambda step, epoch: 0.1  # type: ignore[assignment,misc]
    assert optimizer.learning_rate == 0.1


def test_wrong_gradients() -> None:
    v = mpidist.Variable(np.ones((2, 3), np.float32), name="v")
    for gradient, error, match in [
        (np.ones((3, 2), np.float32), ValueError, r"shape \(3, 2\).*'v' of shape \(2, 3\)"),
        (np.ones((2, 3)), TypeError, r"dtype float64.*astype\('float32'\)"),
        (mpidist.IndexedSlices(np.ones((1, 2), np.float32), [0]), ValueError, r"shape \(2, 2\)"),
    ]:
        with pytest.raises(error, match=match):
            SGD().apply_gradients([(gradient, v)])
    with pytest.raises(TypeError, match="pairs"):
        SGD().apply_gradients([v])  # type: ignore[list-item]
    for value, gradient in ((1, 1), (1, 0.5), (np.zeros(2, int), np.ones(2)), (np.zeros(2, int), np.ones(2, int))):
        with pytest.raises(TypeError, match=r"expects floating-point variables, for example mpidist"):
            SGD().apply_gradients([(gradient, mpidist.Variable(value))])
    on_read = mpidist.Variable(1.0, synchronization=mpidist.VariableSynchronization.ON_READ)
    with pytest.raises(ValueError, match="ON_READ"):
        SGD().apply_gradients([(1.0, on_read)])


@pytest.mark.parametrize(
    "make_wrong",
    [
        lambda: SGD(momentum=1.0),
        lambda: Adam(beta_1=-0.1),
        lambda: Adam(beta_2=1),
        lambda: Adam(epsilon=0),
        lambda: AdamW(weight_decay=-0.1),
        lambda: RMSprop(rho=1.0),
        lambda: RMSprop(momentum=-1),
        lambda: RMSprop(epsilon=0),
    ],
)
def test_wrong_parameters(make_wrong: Callable[[], Optimizer]) -> None:
    with pytest.raises(ValueError, match="expected a number"):
        make_wrong()
