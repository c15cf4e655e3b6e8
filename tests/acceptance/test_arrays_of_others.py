"""Arrays of others go into collectives, variables and reduce, and come out as what they were."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest

import mpidist
from tests.acceptance.checks import SUM, check_components, make_variable, replica_id, same
from tests.support.ranks.layouts import layouts, per_replica

SOME = pytest.mark.parametrize(
    "strategy", layouts("default", "one_device", "mirrored-[13]local", "multi_worker-*"), indirect=True
)


def context() -> Any:
    return mpidist.get_replica_context()


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")


@SOME
def test_buffers(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    for make in (
        lambda: array.array("d", [1.0, 2.0]),
        lambda: memoryview(array.array("d", [1.0, 2.0])),
        lambda: memoryview(np.array([1.0, 2.0])),
    ):
        result = strategy.run(lambda m=make: context().all_reduce("SUM", m()))
        for part in strategy.experimental_local_results(result):
            # The default strategy returns its input.
            assert type(part) is np.ndarray or strategy is mpidist.get_strategy()
            np.testing.assert_array_equal(np.asarray(part), [n, 2.0 * n])
        total = strategy.reduce("SUM", per_replica(strategy, lambda i, m=make: m()), axis=None)
        assert type(total) is np.ndarray
        np.testing.assert_array_equal(total, [n, 2.0 * n])
    variable = make_variable(strategy, array.array("d", [1.0, 2.0]), aggregation=SUM)
    variable.assign(array.array("d", [3.0, 4.0]))
    check_components(strategy, variable, lambda _: np.array([3.0, 4.0]))


@SOME
def test_layouts_of_numpy_arrays(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    base = np.arange(12.0).reshape(3, 4)
    frozen = base.copy()
    frozen.flags.writeable = False
    for value in (frozen, np.asfortranarray(base), base[::2, ::-2], base.T, np.broadcast_to(np.ones(3), (2, 3))):
        for op, expected in (("SUM", n * value), ("MEAN", value)):
            same(strategy.reduce(op, per_replica(strategy, lambda i, v=value: v), axis=None), expected)
        variable = make_variable(strategy, value, aggregation=SUM)
        check_components(strategy, variable, lambda _, v=value: v)
        variable.assign(value + 0)
        same(strategy.gather(per_replica(strategy, lambda i, v=value: v), axis=1), np.concatenate([value] * n, 1))
    variable = make_variable(strategy, base)
    base[0, 0] = 100.0
    same(variable.numpy()[0, 0], 0.0)


@pytest.mark.torch
@SOME
def test_torch_tensors_come_out_as_tensors(strategy: Any, torch: Any) -> None:
    n = strategy.num_replicas_in_sync

    def replica() -> Any:
        i = replica_id()
        value = torch.arange(4, dtype=torch.float32).reshape(2, 2) + i
        nest = {"a": value, "b": [torch.tensor(2.0), np.ones(2)]}
        result = context().all_reduce("SUM", nest), context().all_gather(value, axis=0)
        assert value.tolist() == (torch.arange(4.0).reshape(2, 2) + i).tolist()
        return result

    ids = sum(range(n))
    for reduced, gathered in strategy.experimental_local_results(strategy.run(replica)):
        assert isinstance(reduced["a"], torch.Tensor)
        assert reduced["a"].dtype == torch.float32
        assert reduced["a"].tolist() == (n * torch.arange(4.0).reshape(2, 2) + ids).tolist()
        assert isinstance(reduced["b"][0], torch.Tensor)
        assert reduced["b"][0].shape == ()
        assert float(reduced["b"][0]) == 2.0 * n
        assert isinstance(reduced["b"][1], np.ndarray)
        assert isinstance(gathered, torch.Tensor)
        assert gathered.shape == (2 * n, 2)


@pytest.mark.torch
@SOME
def test_torch_in_reduce_gather_and_variables(strategy: Any, torch: Any) -> None:
    n = strategy.num_replicas_in_sync
    value = strategy.run(lambda: torch.full((3,), float(replica_id() + 1)))
    total = strategy.reduce("SUM", value, axis=None)
    assert isinstance(total, torch.Tensor)
    assert total.tolist() == [float(sum(range(1, n + 1)))] * 3
    assert float(strategy.reduce("MEAN", value, axis=0)) == sum(range(1, n + 1)) / n
    gathered = strategy.gather(value, axis=0)
    assert isinstance(gathered, torch.Tensor)
    assert gathered.tolist() == [float(i + 1) for i in range(n) for _ in range(3)]
    variable = make_variable(strategy, torch.zeros(3), aggregation=SUM)
    assert variable.dtype == np.float32
    strategy.run(lambda: variable.assign_add(torch.ones(3)))
    check_components(strategy, variable, lambda _: np.full(3, float(n)))
    variable.assign(torch.full((3,), 7.0))
    check_components(strategy, variable, lambda _: np.full(3, 7.0))


@pytest.mark.torch
@SOME
def test_torch_dtypes_and_memory_formats(strategy: Any, torch: Any) -> None:
    n = strategy.num_replicas_in_sync
    values = [
        torch.ones(3, dtype=torch.float64),
        torch.ones(3, dtype=torch.float16),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.int32),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.zeros(0, 2),
        torch.ones(2, dtype=torch.complex64),
    ]
    result = strategy.run(lambda: context().all_reduce("SUM", values))
    for part in strategy.experimental_local_results(result):
        for leaf, start in zip(part, values, strict=True):
            assert isinstance(leaf, torch.Tensor)
            assert leaf.dtype == start.dtype
            assert torch.equal(leaf, start * n)


@pytest.mark.torch
@SOME
def test_torch_out_is_written_in_place(strategy: Any, torch: Any) -> None:
    n = strategy.num_replicas_in_sync

    def replica() -> None:
        out = torch.empty(4)
        context().all_reduce("SUM", torch.ones(4), out=out)
        assert out.tolist() == [float(n)] * 4

    strategy.run(replica)


@pytest.mark.torch
@pytest.mark.parametrize("strategy", layouts("mirrored-3local", "multi_worker-2local"), indirect=True)
def test_torch_tensors_that_are_refused(strategy: Any, torch: Any) -> None:
    with pytest.raises(TypeError):
        strategy.run(lambda: context().all_reduce("SUM", torch.ones(2, dtype=torch.bool)))
    # A tensor in a graph goes in by value; the sum over replicas is no part of the graph.
    gradient = torch.ones(2, requires_grad=True)
    for part in strategy.experimental_local_results(strategy.run(lambda: context().all_reduce("SUM", gradient))):
        assert part.tolist() == [float(strategy.num_replicas_in_sync)] * 2
        assert not part.requires_grad
