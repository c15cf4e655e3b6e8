"""Replicas of one process that give the same memory for results, or step one PyTorch module: errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from tests.support.ranks.layouts import layouts

SEVERAL = pytest.mark.parametrize("strategy", layouts("mirrored-2local", "multi_worker-2local"), indirect=True)


def context() -> Any:
    return mpidist.get_replica_context()


@SEVERAL
def test_results_in_the_same_memory(strategy: mpidist.Strategy) -> None:
    n = strategy.num_replicas_in_sync
    shared = np.zeros(4)
    for out in (lambda: shared, lambda: shared[1:] if context().replica_id_in_sync_group % 2 else shared[:3]):
        with pytest.raises(ValueError, match=r"replicas 0 and 1 .* gave the same memory as out.* mpirun -n 2 python"):
            strategy.run(lambda out=out: context().all_reduce("SUM", np.ones(out().shape), out=out()))
    even_and_odd = strategy.run(lambda: context().all_reduce("SUM", np.ones(2), out=np.zeros(2)))
    for part in strategy.experimental_local_results(even_and_odd):
        np.testing.assert_array_equal(part, np.full(2, float(n)))


@SEVERAL
def test_results_in_columns_of_one_array(strategy: mpidist.Strategy) -> None:
    columns = np.zeros((3, strategy.num_replicas_in_sync))

    def step() -> None:
        own = columns[:, context().replica_id_in_sync_group]
        context().all_reduce("SUM", np.ones(3), out=own)

    strategy.run(step)
    assert np.count_nonzero(columns) == 3 * len(strategy.extended.local_replica_ids)


@SEVERAL
def test_equal_inputs_are_summed(strategy: mpidist.Strategy) -> None:
    constant = np.full(3, 17.12)
    result = strategy.run(lambda: context().all_reduce("MEAN", constant))
    np.testing.assert_allclose(strategy.experimental_local_results(result)[0], constant)


@pytest.mark.torch
@SEVERAL
def test_stepping_one_module_by_replicas(strategy: mpidist.Strategy) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")
    import mpidist.torch

    module = torch.nn.Linear(2, 1)
    own = [torch.nn.Linear(2, 1) for _ in strategy.extended.local_replica_ids]

    def step(module: Any) -> None:
        optimizer = mpidist.torch.independent(torch.optim.SGD(module.parameters(), 0.1))
        module(torch.ones(4, 2)).mean().backward()
        for parameter in module.parameters():
            context().all_reduce("MEAN", parameter.grad, out=parameter.grad.clone())
        optimizer.step()

    for _ in range(2):
        strategy.run(lambda: step(own[context().local_replica_id]))
    with pytest.raises(
        RuntimeError, match=r"replicas 0 and 1 of this process step one module of PyTorch by torch\.opt"
    ):
        strategy.run(step, args=(module,))
