"""Sums that replicas start and wait for later, in place."""

from __future__ import annotations

import numpy as np
import pytest

import mpidist

pytestmark = [pytest.mark.counts, pytest.mark.nodes]


@pytest.mark.parametrize("size", [3, 100_000])
def test_a_started_sum_is_where_the_values_were(strategy: mpidist.Strategy, size: int) -> None:
    count = strategy.num_replicas_in_sync

    def step() -> None:
        context = mpidist.get_replica_context()
        assert context is not None
        arrays = [np.full(size, context.replica_id_in_sync_group + float(i)) for i in range(3)]
        works = [context.all_reduce_async("SUM", array, out=array) for array in arrays]
        for i, (array, work) in enumerate(zip(arrays, works, strict=True)):
            assert np.shares_memory(work.wait(), array)
            np.testing.assert_array_equal(array, np.full(size, count * (count - 1) / 2 + i * count))

    strategy.run(step)


def test_another_replica_is_refused(strategy: mpidist.Strategy) -> None:
    if type(strategy).__name__ == "DefaultStrategy":
        pytest.skip("its replica context is current everywhere")
    context = strategy.run(mpidist.get_replica_context)
    (own, *_) = strategy.experimental_local_results(context)
    array = np.ones(3)
    with pytest.raises(RuntimeError, match="requires the replica context"):
        own.all_reduce_async("SUM", array, out=array)
