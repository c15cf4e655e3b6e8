"""Checkpoints that earlier versions of mpidist wrote are restored, on any number of ranks.

Commit c3f966c wrote those of format version 2. The last commit with format version 3 wrote the others.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mpidist
from mpidist import Checkpoint
from tests.support.ranks.layouts import layouts

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("saved_by", ["plain", "sharded"])
@pytest.mark.parametrize("version", ["c3f966c_version_2", "version_3"])
@pytest.mark.parametrize("strategy", layouts("mirrored-2local", "multi_worker-1local"), indirect=True)
@pytest.mark.filterwarnings("ignore:.*by the position of their variables")
def test_earlier_versions_are_restored(strategy: mpidist.Strategy, version: str, saved_by: str) -> None:
    expected = np.arange(1000.0).reshape(40, 25) if saved_by == "sharded" else np.arange(6.0).reshape(2, 3)
    with strategy.scope():
        w = mpidist.Variable(np.zeros_like(expected))
        total = mpidist.Variable(
            np.float32(0),
            synchronization=mpidist.VariableSynchronization.ON_READ,
            aggregation=mpidist.VariableAggregation.SUM,
        )
    optimizer, batches = mpidist.optimizers.Adam(0.5), iter(mpidist.Dataset.range(9).batch(2))
    optimizer.build([w])
    model = SimpleNamespace(w=w, total=total)
    model.again = SimpleNamespace(model=model)
    checkpoint = Checkpoint(
        model=model, optimizer=optimizer, batches=batches, z=np.zeros(1, complex), half=np.float16([0]), step=0,
        nest={},
    )  # fmt: skip
    checkpoint.restore(DATA / version / saved_by).assert_consumed()
    np.testing.assert_array_equal(w.numpy(), expected)
    assert total.numpy() == pytest.approx(6.0)
    np.testing.assert_allclose(
        optimizer.get_slot(w, "m").numpy(), np.full(w.shape, 0.2 if saved_by == "sharded" else 0.1)
    )
    assert (optimizer.learning_rate, int(optimizer.iterations.numpy()), checkpoint.step) == (0.125, 1, 7)
    assert next(batches).tolist() == [2, 3]
    assert (checkpoint.z[0], float(checkpoint.half[0])) == (1 + 2j, 0.5)
    assert checkpoint.nest["a"] == [1, None, "x"]
    assert (checkpoint.nest[7], checkpoint.nest["arrays"][0].tolist()) == ((0.5,), [0, 1, 2])
