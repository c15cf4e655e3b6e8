"""Scheduling: what functions, arguments and results may be, who waits for what, and which error is raised where."""

from __future__ import annotations

import threading
import types
from concurrent.futures import CancelledError
from typing import Any, NoReturn

import numpy as np
import pytest

import mpidist
from mpidist.coordinator import RemoteValueStatus
from mpidist.parameter_server import dispatcher, transport
from tests.parameter_server.coordinated import Call, Gate, OnChief, error_of
from tests.support.ranks.jobs import run_script

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

chief = OnChief(__name__, "chief", {"chief": 1, "ps": 1, "worker": 2})
WORKERS = 2


def return_args(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def fail(text: str = "no") -> NoReturn:
    raise ValueError(text)


# What travels -------------------------------------------------------------------------------------------------


@chief
def test_arguments_and_results_of_any_structure(strategy: Any, coordinator: Any) -> None:
    x = np.arange(6.0).reshape(2, 3)
    value = coordinator.schedule(return_args, args=[x, {"a": [None, "text"]}], kwargs={"k": (1, 2.5)})
    (array, nest), kwargs = coordinator.fetch(value)
    assert np.array_equal(array, x)
    assert nest == {"a": [None, "text"]}
    assert kwargs == {"k": (1, 2.5)}


@chief
def test_closures_lambdas_and_variables_travel(strategy: Any, coordinator: Any) -> None:
    with strategy.scope():
        v = mpidist.Variable([1.0, 2.0], name="v")
    factor = 3.0
    value = coordinator.schedule(lambda: v.assign(factor * v.numpy()).numpy())
    assert value.fetch().tolist() == [3.0, 6.0]
    assert v.numpy().tolist() == [3.0, 6.0]
    # A variable that comes back is the coordinator's own.
    assert coordinator.fetch(coordinator.schedule(lambda: {"v": v, "s": strategy})) == {"v": v, "s": strategy}


@chief
def test_fetch_puts_results_into_a_nest_and_leaves_the_rest(strategy: Any, coordinator: Any) -> None:
    one, two = (coordinator.schedule(lambda i: i, args=(i,)) for i in (1, 2))
    found = coordinator.fetch({"a": [one, "x"], "b": (two, 7)})
    assert found == {"a": [1, "x"], "b": (2, 7)}
    assert one.get() == 1
    assert one.status is RemoteValueStatus.READY


@chief
def test_very_large_arguments_and_results(strategy: Any, coordinator: Any) -> None:
    large = np.ones(25_000_000, np.float32)
    assert coordinator.fetch(coordinator.schedule(np.sum, args=(large,))) == large.size
    back = coordinator.fetch(coordinator.schedule(lambda: np.full(25_000_000, 2.0, np.float32)))
    assert back.nbytes == 100_000_000
    assert back[0] == back[-1] == 2.0


class Unwilling:
    def __reduce__(self) -> NoReturn:
        raise RuntimeError("will not travel")


class Unreadable:
    """Goes on its way, and cannot be put together where it arrives."""

    def __reduce__(self) -> Any:
        return fail, ("broken on arrival",)


@chief
def test_what_cannot_be_pickled_is_refused_by_schedule(strategy: Any, coordinator: Any) -> None:
    odd = Unwilling()
    for given in ({"args": (odd,)}, {"kwargs": {"x": [odd]}}):
        error = error_of(coordinator.schedule, return_args, **given)
        assert isinstance(error, TypeError)
        assert "function return_args with its arguments cannot be sent to another rank" in str(error)
        assert "will not travel" in str(error)
    lock = threading.Lock()
    assert isinstance(error_of(coordinator.schedule, lambda: lock), TypeError)
    # Nothing has been queued.
    assert coordinator.done()


@chief
def test_what_cannot_be_put_together_on_the_other_side_is_an_error_of_the_function(
    strategy: Any, coordinator: Any
) -> None:
    error = error_of(coordinator.fetch, coordinator.schedule(return_args, args=(Unreadable(),)))
    assert isinstance(error, ValueError)
    assert str(error) == "broken on arrival"
    assert error_of(coordinator.join) is error

    error = error_of(coordinator.fetch, coordinator.schedule(Unreadable))
    assert isinstance(error, TypeError)
    assert "the result of Unreadable cannot be unpickled by the coordinator: ValueError: broken" in str(error)
    assert error_of(coordinator.join) is error


@chief
def test_a_result_that_cannot_be_pickled(strategy: Any, coordinator: Any) -> None:
    value = coordinator.schedule(lambda: (i for i in range(3)))
    error = error_of(coordinator.join)
    assert isinstance(error, TypeError)
    assert "the result of" in str(error)
    assert "generator, cannot be sent to another rank" in str(error)
    assert error_of(value.fetch) is error


@chief
def test_remote_values_are_refused_wherever_they_are(strategy: Any, coordinator: Any) -> None:
    value = coordinator.schedule(return_args)
    calls: list[dict[str, Any]] = [
        {"args": (value,)},
        {"kwargs": {"x": value}},
        {"args": ([{"deep": (value,)}],)},
    ]
    for call in calls:
        error = error_of(coordinator.schedule, return_args, **call)
        assert isinstance(error, ValueError)
        assert "Pass its value: coordinator.fetch(value)" in str(error)
    assert isinstance(error_of(coordinator.schedule, lambda: value), ValueError)


@chief
def test_only_the_chief_schedules(strategy: Any, coordinator: Any) -> None:
    error = error_of(coordinator.schedule, lambda: coordinator.schedule(return_args))
    assert isinstance(error, ValueError)
    assert "only the program on the chief schedules" in str(error)

    def make() -> None:
        mpidist.coordinator.ClusterCoordinator(strategy)

    coordinator.schedule(make)
    assert "expected a mpidist.ParameterServerStrategy" in str(error_of(coordinator.join))


@chief
def test_wrong_arguments(strategy: Any, coordinator: Any) -> None:
    for call, text in (
        ((3,), "schedule() was given 3; expected a function"),
        ((return_args, "ab"), "args is 'ab'; expected a tuple or list"),
        ((return_args, 5), "args is 5; expected a tuple or list"),
        ((return_args, (), [1]), "kwargs is [1]; expected a dict"),
    ):
        error = error_of(coordinator.schedule, *call)
        assert isinstance(error, TypeError)
        assert text in str(error)


# Waiting ------------------------------------------------------------------------------------------------------


@chief
def test_schedule_returns_at_once_and_done_does_not_wait(strategy: Any, coordinator: Any) -> None:
    gate = Gate(strategy)
    value = coordinator.schedule(gate.pass_through)
    gate.await_waiting(1)
    assert not coordinator.done()
    assert value.status is RemoteValueStatus.NOT_READY
    assert repr(value) == "<RemoteValue NOT_READY>"
    gate.open()
    coordinator.join()
    assert coordinator.done()
    assert value.status is RemoteValueStatus.READY
    assert value.fetch() is None


@chief
def test_functions_start_in_the_order_in_which_they_were_scheduled(strategy: Any, coordinator: Any) -> None:
    gate = Gate(strategy)
    with strategy.scope():
        count = mpidist.Variable(0, name="count")
    # While one worker waits, the other one takes the rest.
    coordinator.schedule(gate.pass_through)
    gate.await_waiting(1)
    values = [coordinator.schedule(lambda: int(count.assign_add(1).numpy())) for _ in range(30)]
    assert coordinator.fetch(values) == list(range(1, 31))
    gate.open()


@chief
def test_a_full_queue_makes_schedule_wait(strategy: Any, coordinator: Any) -> None:
    gate, usual = Gate(strategy), dispatcher.QUEUE_LENGTH
    dispatcher.QUEUE_LENGTH = 3
    try:
        held = [coordinator.schedule(gate.pass_through) for _ in range(WORKERS)]
        gate.await_waiting(WORKERS)
        queued = [coordinator.schedule(return_args) for _ in range(3)]
        call = Call(lambda: coordinator.schedule(return_args))
        call.join(0.2)
        assert call.is_alive()
        gate.open()
        last = call.outcome()
        coordinator.join()
        assert {value.status for value in (*held, *queued, last)} == {RemoteValueStatus.READY}
    finally:
        dispatcher.QUEUE_LENGTH = usual


@chief
def test_an_error_while_schedule_waits_for_room_is_raised_there(strategy: Any, coordinator: Any) -> None:
    gate, usual = Gate(strategy), dispatcher.QUEUE_LENGTH

    def pass_and_fail() -> None:
        gate.pass_through()
        fail("behind the gate")

    dispatcher.QUEUE_LENGTH = 2
    try:
        for _ in range(WORKERS):
            coordinator.schedule(pass_and_fail)
        gate.await_waiting(WORKERS)
        queued = [coordinator.schedule(return_args) for _ in range(2)]
        call = Call(lambda: coordinator.schedule(return_args))
        call.join(0.1)
        assert call.is_alive()
        gate.open()
        assert "behind the gate" in str(call.outcome())
        assert [type(error_of(value.fetch)) for value in queued] == [CancelledError] * 2
        coordinator.join()
    finally:
        dispatcher.QUEUE_LENGTH = usual


@chief
def test_several_threads_schedule(strategy: Any, coordinator: Any) -> None:
    with strategy.scope():
        total = mpidist.Variable(0, name="total")
    resources = [coordinator.create_per_worker_resource(lambda i=i: 10 * i) for i in range(4)]

    def schedule_many(i: int) -> list[Any]:
        def add(resource: int, amount: int) -> int:
            total.assign_add(amount)
            return resource

        return [coordinator.schedule(add, args=(resources[i], n)) for n in range(50)]

    calls = [Call(lambda i=i: schedule_many(i)) for i in range(4)]  # type: ignore[misc]
    found = [coordinator.fetch(call.outcome()) for call in calls]
    assert found == [[10 * i] * 50 for i in range(4)]
    assert total.numpy() == 4 * sum(range(50))


# As a script --------------------------------------------------------------------------------------------------

SCRIPT = """
import mpidist
from mpidist.cluster_resolver import MPIClusterResolver

class OwnError(Exception):
    pass

def print_and_fail(text):
    print("said by a worker:", text, flush=True)
    raise OwnError(text)

resolver = MPIClusterResolver(jobs={"chief": 1, "ps": 1, "worker": 2})
if resolver.task_type != "chief":
    mpidist.Server(resolver).join()
else:
    strategy = mpidist.ParameterServerStrategy(resolver)
    coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        v1, v2 = mpidist.Variable(0.0), mpidist.Variable(1.0)

    def fn():
        v1.assign_add(0.1)
        v2.assign_sub(0.2)
        return v1.numpy() / v2.numpy()

    value = coordinator.schedule(fn)
    coordinator.join()
    print("example 25:", coordinator.fetch(value))
    coordinator.schedule(print_and_fail, args=("hello",))
    try:
        coordinator.join()
    except OwnError as error:
        print("caught:", error)
"""


def test_a_script_with_functions_and_errors_of_its_own() -> None:
    done = run_script(SCRIPT, 4)
    assert done.returncode == 0, done.stderr
    assert "said by a worker: hello" in done.stdout
    assert "example 25: 0.125" in done.stdout
    assert "caught: hello" in done.stdout


def limit_marshal() -> None:
    """Let marshal refuse 1 MiB in this process, as it refuses 2 GiB."""
    module: Any = transport
    real = module.marshal

    def limited(value: object, version: int) -> bytes:
        data: bytes = real.dumps(value, version)
        if len(data) > 1 << 20:
            raise ValueError("unmarshallable object")
        return data

    module.marshal = types.SimpleNamespace(dumps=limited, loads=real.loads)


@chief
def test_functions_and_results_of_any_size(strategy: Any, coordinator: Any) -> None:
    large = bytes(2 << 20)
    limit_marshal()
    coordinator.schedule(limit_marshal)
    coordinator.schedule(limit_marshal)
    values = coordinator.create_per_worker_resource(lambda: len(large))
    for _ in range(2):
        assert coordinator.schedule(return_args, args=(large,)).fetch()[0] == (large,)
        assert coordinator.schedule(lambda value: value, args=(values,)).fetch() == len(large)
