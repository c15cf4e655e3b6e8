"""Steps that a user has written for testing: their logs, and batches that leave a rank without rows."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.keras.test_fit import adopted
from tests.support.ranks.layouts import layouts

pytestmark = [
    pytest.mark.counts,
    pytest.mark.filterwarnings("default"),
    pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True),
]


def own_model(keras: ModuleType) -> Any:
    """Return a model whose test_step tells the mean of a batch's targets, which is no metric."""

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = keras.layers.Dense(1)

        def call(self, inputs: Any) -> Any:
            return self.inner(inputs)

        def test_step(self, *arguments: Any) -> Any:
            mean = keras.ops.mean(arguments[-1][1])
            return {"target": mean} if len(arguments) == 1 else ({"target": mean}, arguments[0])

    model = Own()
    model.compile("sgd", "mse")
    return model


def test_logs_are_means_by_rows(strategy: Any, keras: ModuleType) -> None:
    model = adopted(strategy, own_model(keras))
    replicas = strategy.num_replicas_in_sync
    model.evaluate(np.ones((replicas, 3)), np.ones((replicas, 1)), batch_size=replicas, verbose=0)
    # One rank has a row more, in a batch after those for which the step was compiled.
    rows = 2 * replicas + 1
    x, y = np.ones((3 * rows, 3)), np.arange(3.0 * rows)[:, None]
    for _ in range(2):
        found = model.evaluate(x, y, batch_size=rows, verbose=0, return_dict=True)
        assert found["target"] == pytest.approx(y[-rows:].mean(), rel=1e-6)
        # And the other way round, with shapes that are known.
        model.evaluate(np.ones((replicas, 3)), np.ones((replicas, 1)), batch_size=replicas, verbose=0)


@pytest.mark.min_ranks(2)
@pytest.mark.own_strategy
def test_a_rank_without_rows_is_an_error(strategy: Any, keras: ModuleType) -> None:
    model = adopted(strategy, own_model(keras))
    rows = strategy.num_replicas_in_sync + 1
    with pytest.raises(Exception, match=r"a test_step\(\) of one's own has to have some"):
        model.evaluate(np.ones((rows, 3)), np.ones((rows, 1)), batch_size=rows - 1, verbose=0)
