"""Arrays of the same shape with other rows on other ranks are warned of: parts of them are no partition of anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist

pytestmark = [pytest.mark.counts, pytest.mark.min_ranks(2)]


@pytest.mark.parametrize("own", [False, True])
def test_rows_that_differ_between_ranks(own: bool, caplog: pytest.LogCaptureFixture) -> None:
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        rank = strategy.cluster_resolver.rank
        rng = np.random.default_rng(rank if own else 0)
        data: Any = {"x": rng.permutation(20), "y": np.zeros((20, 3))}
        dataset = mpidist.Dataset.from_tensor_slices(data).batch(4 * strategy.num_replicas_in_sync)
        with caplog.at_level("WARNING", "mpidist"):
            strategy.experimental_distribute_dataset(dataset)
    said = [record.getMessage() for record in caplog.records if "other rows" in record.getMessage()]
    assert len(said) == (own and rank == 0)
