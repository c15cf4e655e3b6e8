"""Making and closing a coordinator's strategy: wrong clusters, one after the other, use after the end."""

from __future__ import annotations

from typing import Any

import pytest

import mpidist
from mpidist.cluster_resolver import MPIClusterResolver
from mpidist.coordinator import ClusterCoordinator
from mpidist.parameter_server import link
from tests.parameter_server.coordinated import error_of
from tests.support.ranks.pool import run

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]


def _error_of_cluster(jobs: dict[str, int]) -> str:
    resolver = MPIClusterResolver(jobs=jobs)
    make = mpidist.ParameterServerStrategy if resolver.task_type == "chief" else mpidist.Server
    error = error_of(make, resolver)
    return f"{type(error).__name__}: {error}"


def _wrong_clusters() -> list[str]:
    found = [_error_of_cluster({"chief": 1, "worker": 3}), _error_of_cluster({"chief": 1, "ps": 3})]
    with pytest.MonkeyPatch.context() as patch:
        if MPIClusterResolver().rank == 2:
            patch.setattr(link, "agreed_devices", lambda *_: (("cpu:0", "cpu:1"), (2,), False))
        return [*found, _error_of_cluster({"chief": 1, "ps": 1, "worker": 2})]


def test_wrong_clusters_are_an_error_on_all_ranks() -> None:
    results = run(_wrong_clusters, 4)
    assert results == [results[0]] * 4
    without_ps, without_worker, unequal = results[0]
    assert "ValueError: the cluster is chief:1,worker:3; expected at least one ps and one worker" in without_ps
    assert "MPIDIST_JOBS=chief:1,ps:1,worker:2 mpirun -n 4 python" in without_ps
    assert "ValueError: the cluster is chief:1,ps:3; expected at least one ps and one worker" in without_worker
    assert "ValueError: the workers have different numbers of devices, {'worker 0': 2, 'worker 1': 1}" in unequal


def test_only_the_chief_makes_the_strategy() -> None:
    resolver = MPIClusterResolver(jobs={"worker": 1})
    with pytest.raises(ValueError, match=r"this rank is worker:0; ParameterServerStrategy is for the chief"):
        mpidist.ParameterServerStrategy(resolver)
    with pytest.raises(ValueError, match="variable_partitioner is 3; expected a function, or None"):
        mpidist.ParameterServerStrategy(resolver, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cluster_resolver is 3; expected None or an object such as"):
        mpidist.ParameterServerStrategy(3)  # type: ignore[arg-type]


def _close_and_go_on() -> Any:
    resolver = MPIClusterResolver(jobs={"chief": 1, "ps": 1, "worker": 1})
    found = []
    for value in (1.0, 2.0):
        if resolver.task_type != "chief":
            mpidist.Server(resolver).join()
            continue
        strategy = mpidist.ParameterServerStrategy(resolver)
        coordinator = ClusterCoordinator(strategy)
        with strategy.scope():
            v = mpidist.Variable(value)
        assert coordinator.fetch(coordinator.schedule(lambda v=v: v.numpy())) == value
        kept = coordinator.schedule(lambda: "kept")
        strategy.close()
        strategy.close()
        calls = (coordinator.join, coordinator.done, lambda c=coordinator: c.schedule(print), v.numpy)
        errors = [error_of(call) for call in calls]
        found.append(([f"{type(error).__name__}: {error}" for error in errors], kept.status.name))
    return found


def test_closing_and_another_strategy_afterwards() -> None:
    chief_found, *_ = run(_close_and_go_on, 3)
    assert chief_found[0] == chief_found[1]
    errors, status = chief_found[0]
    assert status in ("READY", "ABORTED")
    for error in errors[:3]:
        assert error.startswith("RuntimeError: the ParameterServerStrategy of this coordinator has been closed")
    assert "close" in errors[3]


def test_a_strategy_without_a_coordinator_lets_the_workers_go() -> None:
    assert run(_no_coordinator, 3) == [3.0, None, None]


def _no_coordinator() -> Any:
    resolver = MPIClusterResolver(jobs={"chief": 1, "ps": 1, "worker": 1})
    if resolver.task_type != "chief":
        mpidist.Server(resolver).join()
        return None
    with mpidist.ParameterServerStrategy(resolver) as strategy, strategy.scope():
        value = mpidist.Variable(3.0).numpy()
    error = error_of(ClusterCoordinator, strategy)
    assert isinstance(error, RuntimeError)
    assert "has been closed" in str(error)
    return value
