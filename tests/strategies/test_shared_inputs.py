"""Replicas of one process that give the same memory for results, or the gradients of one PyTorch module: errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.strategies import value_checks as shared_inputs
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
def test_gradients_of_one_module(strategy: mpidist.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_inputs, "_shared_calls", [0])
    torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")
    module = torch.nn.Linear(2, 1)
    constant = torch.full((3,), 17.0)

    def step(reduce: Any) -> Any:
        module(torch.ones(4, 2)).mean().backward()
        return reduce([parameter.grad for parameter in module.parameters()])

    wrong = "the same tensor, the .grad of a parameter: they use one module"
    for reduce in (
        lambda gradients: context().all_reduce("MEAN", gradients),
        lambda gradients: context().all_reduce("MEAN", gradients, out=gradients),
        lambda gradients: context().all_reduce_async("MEAN", gradients).wait(),
        lambda gradients: context().all_reduce("MEAN", gradients[0].view(-1)),
    ):
        with pytest.raises(ValueError, match=f"{wrong}|the same memory as out"):
            strategy.run(step, args=(reduce,))
    with pytest.raises(ValueError, match=wrong):
        strategy.reduce("SUM", strategy.run(step, args=(lambda gradients: gradients,)), axis=None)
    for _ in range(2):
        result = strategy.run(lambda: context().all_reduce("MEAN", constant))
        assert strategy.experimental_local_results(result)[0].tolist() == [17.0] * 3
    # Constants are soon looked at now and then only; a module that is shared later is noticed all the same.
    for _ in range(80):
        strategy.run(lambda: context().all_reduce("MEAN", constant))

    def many_steps() -> None:
        for _ in range(40):
            strategy.run(step, args=(lambda gradients: context().all_reduce("MEAN", gradients),))

    with pytest.raises(ValueError, match=wrong):
        many_steps()
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    monkeypatch.setattr(shared_inputs, "_shared_calls", [0])
    result = strategy.run(lambda: context().all_reduce("MEAN", constant))
    assert strategy.experimental_local_results(result)[0].tolist() == [17.0] * 3
    own = strategy.run(
        lambda: context().all_reduce("SUM", torch.autograd.grad(module(torch.ones(1, 2)).sum(), module.bias)[0])
    )
    assert strategy.experimental_local_results(own)[0].item() == strategy.num_replicas_in_sync
