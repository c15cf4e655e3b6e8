"""The v1 strategy in a process by itself: no cluster, variables on the host."""

from __future__ import annotations

import numpy as np
import pytest

import mpidist
from mpidist.cluster_resolver import MPIClusterResolver

pytestmark = pytest.mark.one_rank


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_program_can_be_tried_out(replicas: int) -> None:
    devices = [f"cpu:{i}" for i in range(replicas)]
    with mpidist.v1.experimental.ParameterServerStrategy(devices=devices) as strategy:
        assert strategy.num_replicas_in_sync == replicas
        assert strategy.extended.parameter_devices == ("cpu:0",)
        assert strategy.cluster_resolver is not None
        assert strategy.extended.should_checkpoint
        with strategy.scope():
            v = mpidist.Variable(np.zeros(3), name="v")
            optimizer = mpidist.optimizers.SGD(0.5, momentum=0.5)
        contexts = []

        def dataset_fn(context: mpidist.InputContext) -> mpidist.Dataset:
            contexts.append(context)
            return mpidist.Dataset.range(4).batch(1)

        strategy.distribute_datasets_from_function(dataset_fn)
        assert contexts == [mpidist.InputContext(1, 0, replicas)]
        for _ in range(2):
            strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), v)]))
        np.testing.assert_array_equal(v.numpy(), np.full(3, -0.5 * replicas * 2.5))
        assert int(optimizer.iterations.numpy()) == 2
        strategy.barrier()


def test_roles_that_were_asked_for_are_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="at least one ps"):
        mpidist.v1.experimental.ParameterServerStrategy(MPIClusterResolver(jobs={"worker": 1}))
    monkeypatch.setenv("MPIDIST_JOBS", "worker:1")
    with pytest.raises(ValueError, match="at least one ps"):
        mpidist.v1.experimental.ParameterServerStrategy()
