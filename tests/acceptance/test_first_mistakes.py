"""What a first program gets wrong: messages that say what was expected."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.coordinator import RemoteValue
from mpidist.input.rules import idle_replicas, parts

pytestmark = pytest.mark.one_rank


@pytest.fixture(scope="module")
def three() -> Any:
    with mpidist.MirroredStrategy([f"cpu:{i}" for i in range(3)], communicator=None) as strategy:
        yield strategy


MISTAKES: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "quotient": (
        lambda s: mpidist.Dataset.range(5).batch(10 / 2),
        TypeError,
        r"batch_size is 5.0 of type float; expected a whole number, such as batch\(32\), or a quotient by //",
    ),
    "no function": (lambda s: s.run("step"), TypeError, "fn is 'step'; expected a function, as in strategy.run"),
    "no operation": (
        lambda s: s.reduce(None, 1.0, axis=None),
        TypeError,
        r"reduce_op is None of type NoneType; expected a ReduceOp or its name, one of SUM, MEAN, .*reduce\('SUM', x",
    ),
    "order": (
        lambda s: s.run(lambda: mpidist.get_replica_context().all_reduce(np.ones(2), "SUM")),
        TypeError,
        r"of type ndarray; expected .* one of SUM, MEAN, .*before the value: .*context.all_reduce\('SUM', x\)",
    ),
    "aggregation": (
        lambda s: mpidist.Variable(0.0, aggregation="avg"),
        ValueError,
        r"'avg' is not a valid VariableAggregation; .*\(NONE, SUM, MEAN, ONLY_FIRST_REPLICA\)",
    ),
    "next of a dataset": (
        lambda s: next(s.experimental_distribute_dataset(mpidist.Dataset.range(6).batch(3))),
        TypeError,
        r"distributed dataset. Call iter\(\) first",
    ),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_told_what_was_expected(three: Any, kind: str) -> None:
    call, error, text = MISTAKES[kind]
    with pytest.raises(error, match=text):
        call(three)


def test_a_remote_value_is_no_number_before_it_is_fetched() -> None:
    future: Future[float] = Future()
    future.set_result(2.0)
    value = RemoteValue(future, wait_for=Future.result)
    for use in (lambda v: v + 1, lambda v: 1 - v, lambda v: v / 2, lambda v: v < 3, float, lambda v: sum([v, v])):
        with pytest.raises(TypeError, match=r"RemoteValue READY> was used as a number; .*expected value.fetch\(\)"):
            use(value)
    assert value.fetch() + 1 == 3.0


@pytest.mark.parametrize(("size", "idle", "better"), [(4, 1, 5), (1, 2, 3), (2, 1, 3), (3, 0, 0), (5, 0, 0), (7, 0, 0)])
def test_replicas_that_get_no_rows(
    three: Any, caplog: pytest.LogCaptureFixture, size: int, idle: int, better: int
) -> None:
    with caplog.at_level(logging.WARNING, "mpidist"):
        batches = three.experimental_distribute_dataset(mpidist.Dataset.range(12).batch(size))
        for _ in batches:
            pass
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (idle > 0)
    if idle:
        assert f"a global batch of {size} rows is dealt to 3 replicas by " in told[0]
        assert f"{idle} of them get none in any full batch" in told[0]
        assert told[0].endswith(f"such as batch({better})")


_ROWS = np.zeros((12, 10))
_slices = mpidist.Dataset.from_tensor_slices

UNBATCHED: dict[str, tuple[bool, mpidist.Dataset]] = {
    "rows": (True, _slices(_ROWS)),
    "rows in steps": (True, _slices({"x": _ROWS, "y": _ROWS}).shuffle(seed=1).map(lambda x: x).repeat(2).prefetch(1)),
    "rows side by side": (True, mpidist.Dataset.zip(_slices(_ROWS), _slices(_ROWS).filter(lambda _: True))),
    "rows of each rank": (True, _slices(_ROWS).with_options(auto_shard_policy=mpidist.AutoShardPolicy.OFF)),
    "batches": (False, _slices(_ROWS).batch(6).map(lambda x: x)),
    "batches of batches": (False, _slices(_ROWS).batch(3).batch(3)),
    "numbers, of which a function makes batches": (False, mpidist.Dataset.range(2).map(lambda i: _ROWS[:6])),
    "names, of which a function makes batches": (False, _slices(np.array(["a", "b"])).map(lambda name: _ROWS[:6])),
    "a sequence of batches": (False, mpidist.Dataset.from_source([_ROWS[:6], _ROWS[6:]])),
    "a generator of batches": (False, mpidist.Dataset.from_generator(lambda: iter([_ROWS[:6], _ROWS[6:]]))),
    "datasets of batches": (False, _slices(_ROWS).interleave(lambda row: mpidist.Dataset.range(6).batch(6))),
}


@pytest.mark.parametrize("kind", UNBATCHED)
def test_rows_that_are_taken_for_batches(three: Any, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    warned, dataset = UNBATCHED[kind]
    with caplog.at_level(logging.WARNING, "mpidist"):
        for _ in three.experimental_distribute_dataset(dataset):
            pass
        with mpidist.OneDeviceStrategy("cpu:0") as alone:
            alone.experimental_distribute_dataset(dataset)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == warned
    if warned:
        assert "each row of its arrays is taken for a global batch and dealt to 3 replicas" in told[0]
        assert "dataset.batch(global_batch_size)" in told[0]


def test_how_many_replicas_get_no_rows() -> None:
    for size in range(1, 60):
        for replicas in range(1, 20):
            assert idle_replicas(size, replicas) == sum(a == b for a, b in parts(size, replicas))
