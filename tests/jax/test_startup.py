"""mpidist.jax.initialize: jax.distributed on the ranks of MPI."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import jobs

pytest.importorskip("jax", reason="JAX is missing: pip install '.[jax]'")

pytestmark = [pytest.mark.jax, pytest.mark.one_rank, pytest.mark.jobs, pytest.mark.timeout(300)]


def starts(late_rank: int | None = None) -> Any:
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    import mpidist
    import mpidist.jax

    if mpidist.rank() == late_rank:
        jax.numpy.ones(1)
    try:
        mpidist.jax.initialize(timeout_seconds=60)
    except RuntimeError as error:
        return str(error)
    mpidist.jax.initialize()
    gathered = multihost_utils.process_allgather(np.array([10 * mpidist.rank()]))
    summed = jax.jit(lambda x: mpidist.jax.all_reduce("SUM", x))(np.float32(mpidist.rank() + 1))
    return jax.process_index(), jax.process_count(), gathered.ravel().tolist(), float(summed)


def test_ranks_of_mpirun() -> None:
    told = jobs.run_alone(starts, 2, timeout=120)
    assert told == [(rank, 2, [0, 10], 3.0) for rank in range(2)]


def test_one_rank() -> None:
    assert jobs.run_alone(starts, 1, timeout=120) == [(0, 1, [0], 1.0)]


def test_a_rank_where_jax_has_started_is_named_everywhere() -> None:
    told = jobs.run_alone(starts, 2, 1, timeout=120)
    assert told == [told[0]] * 2
    assert told[0].startswith("mpidist.jax.initialize(): on rank 1 JAX had computed something")


def test_without_mpidist_before() -> None:
    def starts_twice() -> str:
        import socket

        import jax

        import mpidist.jax

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)
        try:
            mpidist.jax.initialize()
        except RuntimeError as error:
            return str(error)
        return ""

    assert "without mpidist; leave one of the two calls out" in jobs.run_alone(starts_twice, 1, timeout=120)[0]
