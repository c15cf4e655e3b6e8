"""A rank that is late in every step is named while the job runs, from any rank."""

from __future__ import annotations

import time

import numpy as np
import pytest

import mpidist

# Long beside the noise of a busy machine.
LATE_SECONDS, MOST_SECONDS = 0.1, 60.0


@pytest.mark.min_ranks(2)
def test_a_late_rank_is_named_on_every_rank() -> None:
    strategy = mpidist.MultiWorkerMirroredStrategy()
    last = strategy.num_replicas_in_sync - 1

    def step() -> np.ndarray:
        context = mpidist.get_replica_context()
        until = time.perf_counter() + LATE_SECONDS * (context.replica_id_in_sync_group == last)
        while time.perf_counter() < until:
            pass
        return context.all_reduce("sum", np.ones(4))

    verdict, began, is_over = None, time.monotonic(), False
    while not is_over:
        for _ in range(10):
            strategy.run(step)
        verdict = strategy.extended.stragglers()
        knows_all = float(verdict is not None), float(time.monotonic() - began > MOST_SECONDS)
        known, late = strategy.run(lambda: mpidist.get_replica_context().all_reduce("sum", np.array(knows_all)))  # noqa: B023
        is_over = known == strategy.num_replicas_in_sync or late > 0
    assert verdict is not None
    assert verdict.ranks == (last,)
    assert verdict.phase == "compute"
    assert f"rank {last} (" in str(verdict)
    strategy.close()
