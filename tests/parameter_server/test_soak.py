"""Many scheduled functions, of which some fail: each is accounted for once, and memory does not grow."""

from __future__ import annotations

import os
import random
from concurrent.futures import CancelledError
from typing import Any

import pytest

import mpidist
from mpidist.coordinator import RemoteValueStatus, experimental_get_current_worker_index
from tests.parameter_server.coordinated import OnChief, error_of

pytestmark = [pytest.mark.jobs, pytest.mark.long, pytest.mark.one_rank]

WORKERS = 2
chief = OnChief(__name__, "chief", {"chief": 1, "ps": 1, "worker": WORKERS})


def resident() -> int:
    """Return the bytes of memory that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def residents(coordinator: Any) -> dict[str, int]:
    """Return the memory of the coordinator, and of the workers; a result of each has to be met with."""
    found = {"chief": resident()}
    while len(found) < 1 + WORKERS:
        both = [coordinator.schedule(lambda: (experimental_get_current_worker_index(), resident())) for _ in range(4)]
        found.update({f"worker {index}": size for index, size in coordinator.fetch(both)})
    return found


def soak(strategy: Any, coordinator: Any, functions: int) -> dict[str, list[int]]:
    """Schedule functions, of which some fail, and account for each; return the memory at the half and at the end."""
    rng = random.Random(5)
    with strategy.scope():
        done = mpidist.Variable(0, name="done")
        failures = mpidist.Variable(0, name="failures")

    def work(number: int, fails: bool) -> int:
        (failures if fails else done).assign_add(1)
        if fails:
            raise ValueError(number)
        return number

    raised: list[int] = []
    counts = {"returned": 0, "failed": 0, "cancelled": 0}
    memory: dict[str, list[int]] = {}
    number = 0
    for half in (1, 2):
        while number < functions * half // 2:
            values: list[tuple[int, Any]] = []
            try:
                for _ in range(rng.randrange(1, 200)):
                    values.append((number, coordinator.schedule(work, args=(number, rng.random() < 0.01))))
                    number += 1
                coordinator.join()
            except ValueError as error:
                raised += error.args
            for expected, value in values:
                counts[_account(value, expected)] += 1
        for name, size in residents(coordinator).items():
            memory.setdefault(name, []).append(size)
    assert sum(counts.values()) == number
    assert counts["returned"] == done.numpy()
    assert counts["failed"] == failures.numpy() > 0
    assert len(set(raised)) == len(raised) <= counts["failed"]
    return memory


def _account(value: Any, expected: int) -> str:
    if value.status is RemoteValueStatus.READY:
        assert value.fetch() == expected
        return "returned"
    error = error_of(value.fetch)
    if isinstance(error, CancelledError):
        return "cancelled"
    assert isinstance(error, ValueError)
    assert error.args == (expected,)
    return "failed"


@chief
def test_many_functions_of_which_some_fail_are_each_accounted_for_once(strategy: Any, coordinator: Any) -> None:
    memory = soak(strategy, coordinator, 5000)
    for name, (half, end) in memory.items():
        assert end - half < 8 << 20, (name, half, end)
