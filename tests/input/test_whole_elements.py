"""What run() is given of a dataset that nobody divided is warned of: all ranks would train on all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.input import whole_elements

pytestmark = pytest.mark.counts


@pytest.fixture(autouse=True)
def not_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_elements, "watch", whole_elements.FirstElementWatch())


@pytest.fixture(scope="module")
def all_ranks() -> Iterator[Any]:
    with mpidist.MultiWorkerMirroredStrategy(devices=["cpu:0"]) as strategy:
        yield strategy


def _dataset() -> mpidist.Dataset:
    rows = np.zeros((12, 3))
    return mpidist.Dataset.from_tensor_slices({"x": rows, "y": rows}).batch(6)


def _step(*_: Any, **__: Any) -> None:
    """Stand for a step of training."""


def _plain(strategy: Any) -> None:
    for _ in range(2):
        for batch in _dataset().prefetch(1):
            strategy.run(_step, args=(batch["x"], batch["y"]))


def _in_scope(strategy: Any) -> None:
    with strategy.scope():
        for batch in _dataset():
            strategy.run(_step, (), {"batch": batch})


def _restored(strategy: Any) -> None:
    iterator, other = iter(_dataset()), iter(_dataset())
    next(other)
    iterator.restore(other.state())
    strategy.run(_step, args=(next(iterator),))


def _sharded(strategy: Any) -> None:
    for batch in _dataset().shard(2, 0).prefetch(1):
        strategy.run(_step, args=(batch,))


def _cut_by_hand(strategy: Any) -> None:
    for batch in _dataset():
        strategy.run(_step, args=(batch["x"][:2],))


def _distributed(strategy: Any) -> None:
    for batch in strategy.experimental_distribute_dataset(_dataset()):
        strategy.run(_step, args=(batch,))


def _from_function(strategy: Any) -> None:
    for batch in strategy.distribute_datasets_from_function(lambda _: _dataset()):
        strategy.run(_step, args=(batch,))


def _only_read(strategy: Any) -> None:
    total = sum(float(batch["x"].sum()) for batch in _dataset())
    strategy.run(_step, args=(total,))


def _by_each_rank_alone(_: Any) -> None:
    with mpidist.OneDeviceStrategy("cpu:0") as alone:
        _plain(alone)


@pytest.mark.parametrize("loop", [_plain, _in_scope, _restored])
def test_elements_that_nobody_divided(
    all_ranks: Any, loop: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "mpidist"):
        loop(all_ranks)
    told = [record.getMessage() for record in caplog.records]
    workers = all_ranks.extended.input_workers()
    assert len(told) == (workers.num_workers > 1 and workers.worker_id == 0)
    for text in told:
        assert f"which each of the {workers.num_workers} ranks reads by itself" in text
        assert "experimental_distribute_dataset(dataset)" in text
        assert "distribute_datasets_from_function(lambda context: dataset)" in text


@pytest.mark.parametrize(
    "loop", [_sharded, _cut_by_hand, _distributed, _from_function, _only_read, _by_each_rank_alone]
)
def test_what_is_divided_or_not_given_to_all_ranks(
    all_ranks: Any, loop: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "mpidist"):
        loop(all_ranks)
    assert not caplog.records
