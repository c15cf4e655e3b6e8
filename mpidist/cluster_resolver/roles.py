"""The tasks of ranks: ``jobs=`` and ``MPIDIST_JOBS``, dealt out in rank order."""

from __future__ import annotations

from collections.abc import Mapping

from mpidist.core import settings

TASK_TYPES = ("chief", "worker", "evaluator", "ps")


def deal_tasks(jobs: Mapping[str, int] | None, size: int, source: str = "jobs") -> list[tuple[str, int]]:
    """Return the task of every rank, in rank order.

    Args:
        jobs: ``{job: number of tasks}``; None reads ``MPIDIST_JOBS``, without which every rank is a worker.
        size: The number of ranks.
        source: The name of the origin of ``jobs``, for errors.

    Raises:
        TypeError: Not a dict from strings to whole numbers.
        ValueError: No job, a count below 1, a task type that does not exist, or counts that do not add up to ``size``.

    >>> deal_tasks({"ps": 1, "worker": 2}, 3)
    [('ps', 0), ('worker', 0), ('worker', 1)]
    """
    if jobs is None:
        jobs, source = settings.JOBS.read(), settings.JOBS.name
    if jobs is None:
        return [("worker", rank) for rank in range(size)]
    if not isinstance(jobs, Mapping):
        raise TypeError(f"jobs is {jobs!r}; expected a dict such as {{'ps': 1, 'worker': 3}}")
    for job, count in jobs.items():
        _check(source, job, count)
    if not jobs:
        raise ValueError(
            f"{source} is {jobs!r}, without a job; expected one task for each of the {size} ranks, such as "
            f"{{'worker': {size}}}, or nothing: then all are workers"
        )
    total = sum(jobs.values())
    if total != size:
        raise ValueError(
            f"{source} has {' + '.join(f'{count} {job}' for job, count in jobs.items())} = {total} tasks, and there "
            f"are {size} ranks. Expected: one task for each rank; type: mpirun -n {total} ..., or change {source}"
        )
    return [(job, index) for job, count in jobs.items() for index in range(count)]


def _check(source: str, job: object, count: object) -> None:
    if not isinstance(job, str) or isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{source} has {job!r}: {count!r}; expected the name of a job and a whole number")
    if job not in TASK_TYPES:
        raise ValueError(f"{source} has the task type {job!r}; expected one of {', '.join(TASK_TYPES)}")
    if count < 1:
        raise ValueError(f"{source} has {count} tasks of {job!r}; expected at least 1")
