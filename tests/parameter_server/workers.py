"""Jobs of parameter servers and workers for tests: the servers join, and each worker calls a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

import mpidist
from mpidist.cluster_resolver import MPIClusterResolver
from tests.support.ranks.pool import run
from tests.support.speed import deadlines

Strategy = mpidist.v1.experimental.ParameterServerStrategy


def on_workers(
    work: Callable[..., Any],
    ps: int,
    workers: int,
    *args: Any,
    local: int = 1,
    max_staleness: int | None = None,
    timeout: float = 240.0,
) -> list[Any]:
    """Call ``work(strategy, *args)`` on every worker of a new job, and return the results by worker.

    Args:
        work: A function of a module.
        ps: How many servers.
        workers: How many workers.
        args: Anything that pickles.
        local: Replicas of each worker.
        max_staleness: Of the strategy.
        timeout: Seconds until the job is killed.
    """
    options = {"devices": [f"cpu:{i}" for i in range(local)], "max_staleness": max_staleness}
    # Whoever waits in vain says for what, before the job is killed.
    limits = deadlines(60, 30)
    return run(_rank, ps + workers, work, ps, args, options, timeout=timeout, env=limits)[ps:]


def resolver_of(ps: int) -> MPIClusterResolver:
    """Return the resolver of a job whose first ``ps`` ranks are servers, and the others workers."""
    return MPIClusterResolver(jobs={"ps": ps, "worker": MPI.COMM_WORLD.size - ps})


def _rank(work: Callable[..., Any], ps: int, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    resolver = resolver_of(ps)
    if resolver.task_type == "ps":
        mpidist.Server(resolver).join()
        return None
    with Strategy(resolver, **options) as strategy:
        return work(strategy, *args)


def worker_of(strategy: Any) -> int:
    """Return the index of the worker that calls."""
    return int(strategy.cluster_resolver.task_id)


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Return kind and text of the exception that ``call`` raises; AssertionError if it raises none."""
    try:
        result = call()
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError(f"nothing was raised, {result!r} was returned")
