"""A closed strategy refuses further calls, on one rank as on several."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import mpidist

CALLS: dict[str, Callable[[mpidist.Strategy], object]] = {
    "run": lambda strategy: strategy.run(lambda: 1),
    "reduce": lambda strategy: strategy.reduce("SUM", 1.0, axis=None),
    "gather": lambda strategy: strategy.gather(np.ones(1), axis=0),
    "scope": lambda strategy: strategy.scope(),
    "distribute": lambda strategy: strategy.experimental_distribute_dataset(mpidist.Dataset.range(4).batch(2)),
}
KINDS: dict[str, Callable[[], mpidist.Strategy]] = {
    "one device": lambda: mpidist.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda: mpidist.MirroredStrategy(["cpu:0", "cpu:1"], communicator=None),
    "all ranks": mpidist.MultiWorkerMirroredStrategy,
}


@pytest.mark.counts
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_closed_strategy_refuses(
    kind: Callable[[], mpidist.Strategy], call: Callable[[mpidist.Strategy], object]
) -> None:
    strategy = kind()
    with strategy.scope():
        variable = mpidist.Variable(3.0)
    strategy.close()
    strategy.close()
    with pytest.raises(RuntimeError, match=r"this \w+Strategy can no longer be used: it has been closed"):
        call(strategy)
    assert float(variable) == 3.0


@pytest.mark.counts
@pytest.mark.min_ranks(2)
def test_data_of_a_closed_strategy_is_refused() -> None:
    strategy = mpidist.MultiWorkerMirroredStrategy()
    data = strategy.experimental_distribute_dataset(mpidist.Dataset.range(8).batch(4))
    strategy.close()
    with pytest.raises(RuntimeError, match="it has been closed"):
        iter(data)


@pytest.mark.one_rank
def test_the_default_strategy_stays_open() -> None:
    with mpidist.get_strategy() as strategy:
        pass
    assert strategy.run(lambda: 1) == 1
