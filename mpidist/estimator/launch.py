"""launch: ranks run the program or serve those that do, by their roles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from mpidist.cluster_resolver import ClusterResolver
from mpidist.cluster_resolver.job_resolver import resolver_of_job
from mpidist.estimator.specs import check_function, check_train_jobs
from mpidist.parameter_server.server import Server

T = TypeVar("T")


def launch(
    main_fn: Callable[[], T],
    roles: Sequence[str] = ("chief", "worker"),
    cluster_resolver: ClusterResolver | None = None,
) -> T | None:
    """Call ``main_fn`` on the ranks of some ``roles``, which the others serve meanwhile.

    Call it on every rank of the job. ``ps`` ranks serve, and workers where ``roles`` is ``("chief",)``, as with a
    coordinator. An evaluator does neither: with one use ``train_and_evaluate``.

    Args:
        main_fn: The program; it makes the strategy.
        roles: The jobs that call it.
        cluster_resolver: Who is who; by default as ``MPIDIST_JOBS`` says.

    Returns:
        The result of ``main_fn``; None on ranks that serve.

    Raises:
        TypeError: ``main_fn`` is no function, or ``cluster_resolver`` no resolver.
        ValueError: Other roles than chief and worker, or this rank is an evaluator.

    Source: ``run_distribute_coordinator`` of TensorFlow's ``distribute_coordinator``.

    >>> launch(lambda: 42)
    42
    """
    check_function("main_fn", main_fn, "def main(): ...")
    check_train_jobs("roles", roles)
    if cluster_resolver is not None and not isinstance(cluster_resolver, ClusterResolver):
        raise TypeError(f"cluster_resolver is {cluster_resolver!r}; expected None or a resolver: MPIClusterResolver()")
    resolver = cluster_resolver or resolver_of_job()
    if resolver.task_type == "evaluator":
        raise ValueError("this rank is an evaluator, for which launch() has nothing; use mpidist.train_and_evaluate()")
    if resolver.task_type in (None, *roles):
        return main_fn()
    Server(resolver).join()
    return None
