"""Functions that fail under a coordinator: which error is raised where, what is cancelled, and what goes on."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import CancelledError
from typing import Any

import pytest

import mpidist
from mpidist.coordinator import RemoteValueStatus
from tests.parameter_server.coordinated import Gate, OnChief, error_of, wait_until
from tests.parameter_server.test_schedule import fail, return_args

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

WORKERS = 2
chief = OnChief(__name__, "chief", {"chief": 1, "ps": 1, "worker": WORKERS})


@chief
def test_join_raises_the_first_error_once_and_scheduling_goes_on(strategy: Any, coordinator: Any) -> None:
    gate = Gate(strategy)

    def slow() -> str:
        gate.pass_through()
        return "kept"

    in_flight = coordinator.schedule(slow)
    gate.await_waiting(1)
    failed = coordinator.schedule(fail, args=("first",))
    wait_until(lambda: failed.status is RemoteValueStatus.ABORTED, "the failure")
    assert not coordinator.done()
    gate.open()
    error = error_of(coordinator.join)
    assert isinstance(error, ValueError)
    assert str(error) == "first"
    cause = str(error.__cause__)
    assert "fail on worker" in cause
    assert "in fail" in cause
    assert error_of(failed.fetch) is error
    # What was under way is kept.
    assert in_flight.fetch() == "kept"
    coordinator.join()
    assert coordinator.done()
    assert coordinator.fetch(coordinator.schedule(lambda: 5)) == 5


@chief
def test_what_is_queued_when_a_function_fails_is_cancelled(strategy: Any, coordinator: Any) -> None:
    gate = Gate(strategy)
    with strategy.scope():
        count = mpidist.Variable(0, name="count")

    def pass_and_fail() -> None:
        gate.pass_through()
        fail()

    for _ in range(WORKERS):
        coordinator.schedule(pass_and_fail)
    queued = [coordinator.schedule(lambda: count.assign_add(1) and None) for _ in range(20)]
    gate.await_waiting(WORKERS)
    gate.open()
    # Of two that fail one is raised, by whoever asks first, and the other one is not raised later.
    assert isinstance(error_of(coordinator.join), ValueError)
    coordinator.join()
    assert {value.status for value in queued} == {RemoteValueStatus.ABORTED}
    errors = [error_of(value.fetch) for value in queued]
    assert {type(error) for error in errors} == {CancelledError}
    assert "Schedule it again" in str(errors[0])
    assert count.numpy() == 0


@chief
def test_done_and_schedule_raise_as_join_does(strategy: Any, coordinator: Any) -> None:
    queue = coordinator._queue
    for ask in (coordinator.done, lambda: coordinator.schedule(return_args)):
        coordinator.schedule(fail, args=("to be told",))
        wait_until(lambda: queue.error is not None and not queue.running, "the end of what was under way")
        assert str(error_of(ask)) == "to be told"
        coordinator.join()


class Odd(Exception):
    """Cannot be put together from its arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"odd {one} {two}")


@chief
def test_errors_of_every_kind_travel(strategy: Any, coordinator: Any) -> None:
    class Local(Exception):
        pass

    class Heavy(Exception):
        def __init__(self) -> None:
            super().__init__("heavy")
            self.lock = threading.Lock()

    class Final(BaseException):
        pass

    def raising(kind: str) -> None:
        if kind == "exit":
            sys.exit(3)
        raise {
            "local": lambda: Local("local"),
            "odd": lambda: Odd(1, 2),
            "heavy": Heavy,
            "final": lambda: Final("final"),
            "stop": lambda: StopIteration("stop"),
        }[kind]()

    for kind, expected, text in (
        ("local", Local, "local"),
        ("stop", StopIteration, "stop"),
        ("odd", RuntimeError, "Odd: odd 1 2"),
        ("heavy", RuntimeError, "Heavy: heavy"),
        ("exit", RuntimeError, "SystemExit: 3"),
        ("final", RuntimeError, "Final: final"),
    ):
        value = coordinator.schedule(raising, args=(kind,))
        error = error_of(coordinator.join)
        assert type(error) is expected, (kind, error)
        assert str(error) == text
        assert "in raising" in str(error.__cause__)
        assert error_of(value.fetch) is error
