"""What servers do to variables: no update lost, no read torn, any size and dtype, the same bits as in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.optimizers import SGD, Adam, AdamW, RMSprop
from mpidist.parameter_server.remote import component_of
from mpidist.parameter_server.transport import Request
from mpidist.values import IndexedSlices
from tests.acceptance.checks import same
from tests.parameter_server.workers import Strategy, error_of, on_workers, resolver_of, worker_of
from tests.support import fake_cupy
from tests.support.ranks.jobs import run_alone

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank, pytest.mark.timeout(300)]

STEPS = 10_000


# No update is lost --------------------------------------------------------------------------------------------------


def increments(strategy: Any, steps: int) -> int:
    with strategy.scope():
        count = mpidist.Variable(0, name="count")
    for _ in range(steps):
        count.assign_add(1)
    strategy.barrier()
    return int(count.numpy())


def test_increments_of_four_workers() -> None:
    assert on_workers(increments, 1, 4, STEPS) == [4 * STEPS] * 4


def sparse_pushes(strategy: Any, pushes: int) -> Any:
    """Push whole numbers, whose sums are exact in any order, and return what is there and what this worker pushed."""
    rng = np.random.default_rng(worker_of(strategy))
    with strategy.scope():
        table, learned = (mpidist.Variable(np.zeros((50, 3)), name=name) for name in ("table", "learned"))
        optimizer = SGD(1.0)
    own = np.zeros((50, 3))
    for _ in range(pushes):
        rows = rng.integers(0, 50, rng.integers(0, 9))
        values = rng.integers(-9, 9, (len(rows), 3)).astype(float)
        np.add.at(own, rows, values)
        table.scatter_add(IndexedSlices(values, rows))
        gradient = IndexedSlices(-values, rows, (50, 3))
        strategy.run(lambda gradient=gradient: optimizer.apply_gradients([(gradient, learned)]))
    strategy.barrier()
    return table.numpy(), learned.numpy(), own, int(optimizer.iterations.numpy())


@pytest.mark.long
def test_sparse_rows_of_eight_workers() -> None:
    found = on_workers(sparse_pushes, 2, 8, 40)
    total = sum(own for *_, own, _ in found)
    for table, learned, _, iterations in found:
        same(table, total)
        same(learned, total)
        assert iterations == 8 * 40


def trainings(strategy: Any, steps: int) -> Any:
    """Train with constant gradients, of which any order gives the same; by three optimizers."""
    made: list[tuple[Any, Any]] = []
    with strategy.scope():
        for make in (SGD, partial(SGD, 0.5, momentum=0.5), Adam):
            made.append((make(), mpidist.Variable(np.zeros(4), name="w")))
    for _ in range(steps):
        for optimizer, weight in made:
            strategy.run(lambda o=optimizer, w=weight: o.apply_gradients([(np.ones(4), w)]))
    strategy.barrier()
    return [(int(optimizer.iterations.numpy()), weight.numpy()) for optimizer, weight in made]


def test_optimizers_of_several_workers() -> None:
    found = on_workers(trainings, 2, 3, 20)
    sgd, momentum, adam = found[0]
    for other in found:
        same([weight for _, weight in other], [sgd[1], momentum[1], adam[1]])
        assert [count for count, _ in other] == [60] * 3
    np.testing.assert_allclose(sgd[1], np.full(4, -0.01 * 60))
    alone = mpidist.Variable(np.zeros(4))
    optimizer = SGD(0.5, momentum=0.5)
    for _ in range(60):
        optimizer.apply_gradients([(np.ones(4), alone)])
    same(momentum[1], alone.numpy())
    # Equal gradients make equal steps, but where a worker knows of an update that has still to reach this server: the
    # count lies on the other one. Were the steps not counted at all they would be off by 70 %.
    np.testing.assert_allclose(adam[1], np.full(4, -0.001 * 60), rtol=0.05)


# The same bits as in one process ------------------------------------------------------------------------------------


def halved(value: Any) -> Any:
    return np.minimum(np.abs(value), value.dtype.type(2.0))


def schedule(step: int) -> float:
    return 0.3 / (1 + step)


def optimizers() -> list[Any]:
    return [
        SGD(0.1),
        SGD(schedule, momentum=0.9),
        SGD(0.1, momentum=0.9, nesterov=True),
        Adam(0.05),
        AdamW(schedule, beta_1=0.8, epsilon=1e-5),
        RMSprop(schedule, momentum=0.9, centered=True),
    ]


def dtypes() -> list[Any]:
    import ml_dtypes

    return [np.float64, np.float32, np.float16, np.dtype(ml_dtypes.bfloat16)]


def train(optimizer: Any, variables: list[Any], step: Callable[[Callable[[], Any]], Any]) -> list[Any]:
    """Train for some steps, and go back to an earlier number of steps in between; returns all values."""
    rng = np.random.default_rng(7)
    seen = []
    for number in range(9):
        pairs: list[tuple[Any, Any]] = []
        for index, variable in enumerate(variables):
            if index % 2 == 0:
                pairs.append((rng.normal(size=variable.shape).astype(variable.dtype), variable))
            else:
                rows = rng.integers(0, 5, 4)
                values = rng.normal(size=(4, 2)).astype(variable.dtype)
                pairs.append((IndexedSlices(values, rows, variable.shape), variable))
        if number % 3 == 1:
            pairs[0] = (None, pairs[0][1])
        step(lambda pairs=pairs: optimizer.apply_gradients(pairs))
        if number == 5:
            optimizer.iterations.assign(2)
        seen.append([np.asarray(variable.numpy()).tobytes() for variable in variables])
    return [seen, int(optimizer.iterations.numpy())]


def initial_values(dtype: Any) -> list[Any]:
    rng = np.random.default_rng(3)
    return [rng.normal(size=(5, 2)).astype(dtype) for _ in range(4)]


def same_bits(strategy: Any) -> int:
    cases = 0
    for dtype in dtypes():
        for on_servers, alone in zip(optimizers(), optimizers(), strict=True):
            values = initial_values(dtype)
            constraints = [None, None, halved, halved]
            with strategy.scope():
                remote = [mpidist.Variable(v, constraint=c) for v, c in zip(values, constraints, strict=True)]
            local = [mpidist.Variable(v, constraint=c) for v, c in zip(values, constraints, strict=True)]
            expected = train(alone, local, lambda call: call())
            found = train(on_servers, remote, strategy.run)
            assert found == expected, (dtype, type(alone).__name__)
            cases += 1
    return cases


def test_one_worker_gets_the_bits_of_one_process() -> None:
    assert on_workers(same_bits, 2, 1) == [24]


# No read is torn ----------------------------------------------------------------------------------------------------


def reads_of_constants(strategy: Any, count: int, times: int) -> Any:
    with strategy.scope():
        big = mpidist.Variable(np.zeros(count, np.float32), name="big")
        other = mpidist.Variable(np.zeros(count, np.float32), name="other")
    strategy.barrier()
    seen = set()
    for number in range(times):
        if worker_of(strategy) == 0:
            for value in (big.numpy(), *strategy.extended.read_all([big, other])[:1]):
                assert value.min() == value.max()
                seen.add(float(value[0]))
        elif number % 3 < 2:
            big.assign(np.full(count, worker_of(strategy) * 1000.0 + number, np.float32))
        else:
            big.assign_add(np.ones(count, np.float32))
    strategy.barrier()
    return len(seen)


def test_a_reader_sees_no_half_of_a_64_mib_assignment() -> None:
    changes, *_ = on_workers(reads_of_constants, 1, 3, 16 << 20, 8)
    assert changes > 1


# Sizes and dtypes ---------------------------------------------------------------------------------------------------


def sizes(strategy: Any) -> int:
    # 16 KiB, less the preamble of a message, less what tells of one part.
    limit = (16 << 10) - 32 - 48
    shapes = [(), (0,), (0, 3), (1,), (limit - 1,), (limit,), (limit + 1,), (limit + 48,), (limit + 49,), (3 << 20,)]
    for shape in shapes:
        with strategy.scope():
            variable = mpidist.Variable(np.zeros(shape, np.uint8), name=str(shape))
        value = np.random.default_rng(1).integers(0, 255, shape).astype(np.uint8)
        variable.assign(value)
        same(variable.numpy(), value)
        variable.assign_add(np.ones(shape, np.uint8))
        same(variable.numpy(), (value + np.uint8(1)).astype(np.uint8))
        variable.assign_sub(np.ones(shape, np.uint8))
        if shape:
            rows = np.arange(0, shape[0], 2)
            same(variable.sparse_read(rows), value[rows])
            same(variable.sparse_read(rows.reshape(1, -1)), value[rows][None])
            variable.scatter_update(IndexedSlices(value[rows] // 2, rows))
            value[rows] //= 2
        same(variable.numpy(), value)
        same(variable.read_value(), value)
    return len(shapes)


def kinds(strategy: Any) -> int:
    import ml_dtypes

    names = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
    dtypes = [*map(np.dtype, names.split()), np.dtype(ml_dtypes.bfloat16)]
    for dtype in dtypes:
        value = (np.arange(24).reshape(4, 6) % 2).astype(dtype)
        with strategy.scope():
            variable = mpidist.Variable(value, name=dtype.name)
        assert variable.dtype == dtype
        same(variable.numpy(), value)
        wide = np.repeat(value, 2, axis=1)
        for odd in (np.asfortranarray(value), value[::-1], wide[:, ::2], np.broadcast_to(value[0], (4, 6))):
            variable.assign(odd)
            same(variable.numpy(), odd)
        variable.assign(value)
        same(variable.sparse_read([3, 0, 3]), value[[3, 0, 3]])
        if dtype.kind != "b":
            variable.assign_add(value.T.copy().T)
            same(variable.numpy(), value + value)
            variable.scatter_sub(IndexedSlices(np.asfortranarray(value[:2]), np.array([1, 1], np.int32)))
            expected = value + value
            np.subtract.at(expected, [1, 1], value[:2])
            same(variable.numpy(), expected)
    return len(dtypes)


def many(strategy: Any) -> None:
    with strategy.scope():
        variables = [mpidist.Variable(np.full(7, float(i)), name=f"v{i}") for i in range(1000)]
        optimizer = SGD(1.0)
    same(strategy.extended.read_all(variables), [np.full(7, float(i)) for i in range(1000)])
    strategy.run(lambda: optimizer.apply_gradients([(np.full(7, 1.0), v) for v in variables]))
    same(strategy.extended.read_all(variables[::-1]), [np.full(7, i - 1.0) for i in reversed(range(1000))])
    assert strategy.extended.read_all([]) == []


def wrong_values(strategy: Any) -> list[tuple[str, str]]:
    with strategy.scope():
        variable = mpidist.Variable(np.zeros((3, 2), np.float32), name="v")
    found = [
        error_of(call)
        for call in (
            lambda: variable.assign(np.zeros(3, np.float32)),
            lambda: variable.assign(np.zeros((3, 2))),
            lambda: variable.scatter_add(IndexedSlices(np.zeros((1, 2), np.float32), [3])),
            lambda: variable.scatter_add([1.0]),
            lambda: variable.sparse_read([3]),
        )
    ]
    variable.assign(np.ones((3, 2), np.float32))
    same(variable.numpy(), np.ones((3, 2)))
    return found


def raising(value: Any) -> Any:
    if value[0] < 0:
        raise FloatingPointError("less than nothing")
    return value


def errors_of_servers(strategy: Any) -> Any:
    with strategy.scope():
        weight = mpidist.Variable(np.zeros(2), name="weight", constraint=raising)
        optimizer = SGD(1.0)
    found = error_of(lambda: strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), weight)])))
    strategy.run(lambda: optimizer.apply_gradients([(np.full(2, -5.0), weight)]))
    return found, weight.numpy().tolist()


def on_gpus(ps: int) -> list[str]:
    """Give and take arrays of devices, of which every rank has stand-ins."""
    cupy = fake_cupy.install()
    resolver = resolver_of(ps)
    if resolver.task_type == "ps":
        mpidist.Server(resolver).join()
        return []
    with Strategy(resolver, devices=["gpu:0", "gpu:1"]) as strategy:
        with strategy.scope():
            weight = mpidist.Variable(cupy.arange(6.0).reshape(3, 2), name="w")
            optimizer = SGD(1.0)
        assert isinstance(weight.value(), np.ndarray)
        weight.assign(cupy.asarray(weight.numpy().T.copy()).T + 1.0)
        weight.assign_sub(cupy.ones((3, 2)))
        weight.scatter_add(IndexedSlices(cupy.ones((1, 2)), cupy.asarray([2])))
        same(weight.sparse_read(cupy.asarray([2, 0])), [[5.0, 6.0], [0.0, 1.0]])
        strategy.run(lambda: optimizer.apply_gradients([(cupy.ones((3, 2)), weight)]))
        rows = IndexedSlices(cupy.ones((1, 2)), cupy.asarray([0]), (3, 2))
        strategy.run(lambda: optimizer.apply_gradients([(rows, weight)]))
        same(weight.numpy(), [[-4.0, -3.0], [0.0, 1.0], [3.0, 4.0]])
        return list(strategy.extended.worker_devices)


def test_arrays_of_gpus() -> None:
    assert run_alone(on_gpus, 2, 1, timeout=60) == [[], ["gpu:0", "gpu:1"]]


def everything_of_one_worker(strategy: Any) -> Any:
    many(strategy)
    return sizes(strategy), kinds(strategy), wrong_values(strategy), errors_of_servers(strategy)


def test_sizes_dtypes_and_errors() -> None:
    ((shapes, dtypes, wrong, (error, value)),) = on_workers(everything_of_one_worker, 2, 1)
    assert (shapes, dtypes) == (10, 15)
    assert [kind for kind, _ in wrong] == ["ValueError", "TypeError", "ValueError", "TypeError", "IndexError"]
    assert error[0] == "FloatingPointError"
    assert "an optimizer's update of variable 'weight'" in error[1]
    assert "(rank 1): less than nothing" in error[1]
    assert value == [4.0, 4.0]


# Staleness ----------------------------------------------------------------------------------------------------------


def paced(strategy: Any, bound: int, slow_steps: int) -> Any:
    """Return how far this worker was ahead of the slow one, worker 0, at most."""
    with strategy.scope():
        weight, slowest = mpidist.Variable(np.zeros(2)), mpidist.Variable(0, name="slowest")
        optimizer = SGD(1.0)
    strategy.barrier()
    if worker_of(strategy) == 0:
        for _ in range(slow_steps):
            time.sleep(0.01)
            # Before the step is counted, so that others see too small a number rather than too large a one.
            strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), weight)]))
            slowest.assign_add(1)
        # Its block ends here, and with it its hold on the others.
        return 0
    ahead = 0
    for number in range(4 * slow_steps):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), weight)]))
        done = int(slowest.numpy())
        if done < slow_steps:
            ahead = max(ahead, number + 1 - done)
    return ahead


def test_a_slow_worker_holds_the_others_back_until_it_leaves() -> None:
    _, *ahead = on_workers(paced, 2, 3, 3, 20, max_staleness=3)
    # One more may have been counted at the server and not yet in the variable.
    assert all(0 < steps <= 4 for steps in ahead), ahead


# Requests of several parts ------------------------------------------------------------------------------------------


def reads_and_writes(strategy: Any, count: int) -> tuple[list[Any], Any]:
    """Return what a request that reads a variable before and after it is written gives, and the variable."""
    with strategy.scope():
        v = mpidist.Variable(np.zeros(count), name="v")
    component = component_of(v)

    def added(number: float) -> Any:
        return component.part("add", "adding to", np.full(count, number), args=("assign_add",))

    changes = [added(3.0), component.part("assign", "assigning", np.full(count, 3.0))]
    parts = [component.reading]
    for change in changes:
        parts += [change, component.reading, added(1.0)]
    answers = component.connection.ask(Request(parts))
    return [None if answer is None else component.shaped(answer) for answer in answers], v.numpy()


@pytest.mark.parametrize("count", [3, 1 << 16])
def test_the_parts_of_a_request_are_done_one_after_the_other(count: int) -> None:
    ((answers, value),) = on_workers(reads_and_writes, 1, 1, count)
    assert [None if answer is None else answer[-1] for answer in answers] == [0.0, None, 3.0, None, None, 3.0, None]
    assert value[0] == 4.0


def steps_with_settings(strategy: Any, kind: Any) -> list[float]:
    """Return by how much each step moves a variable, where the momentum is set anew before each."""
    with strategy.scope():
        v, optimizer = mpidist.Variable(0.0, name="v"), SGD(1.0, momentum=0.5)
    moved = []
    for i in range(20):
        before = float(v.numpy())
        # The first object is gone when the second one is made, perhaps in its place.
        optimizer.momentum = kind(0.3)
        optimizer.momentum = kind(i / 40)
        strategy.run(lambda: optimizer.apply_gradients([(1.0, v)]))
        moved.append(float(v.numpy()) - before)
    return moved


@pytest.mark.parametrize("kind", [float, np.float32, np.array], ids=["float", "float32", "array"])
def test_a_setting_of_any_type_reaches_the_servers(kind: Any) -> None:
    (moved,) = on_workers(steps_with_settings, 1, 1, kind)
    expected, velocity = [], 0.0
    for i in range(20):
        # Without momentum the velocity is not kept.
        step = i / 40 * velocity - 1.0
        velocity = step if i else 0.0
        expected.append(step)
    np.testing.assert_allclose(moved, expected, atol=1e-5)
