"""What each worker has for itself under a coordinator: datasets, iterators, resources, its index."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.coordinator import PerWorkerDataset, PerWorkerValues, experimental_get_current_worker_index
from tests.parameter_server.coordinated import Gate, OnChief, error_of

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

WORKERS = 2
chief = OnChief(__name__, "chief", {"chief": 1, "ps": 1, "worker": WORKERS})


def on_each_worker(strategy: Any, coordinator: Any, fn: Any, *args: Any) -> list[Any]:
    """Return what ``fn(*args)`` returns on worker 0, 1, ...: each waits until all have come."""
    gate = Gate(strategy)

    def at_the_gate(*args: Any) -> tuple[int, Any]:
        result = fn(*args)
        gate.pass_through()
        return experimental_get_current_worker_index(), result

    values = [coordinator.schedule(at_the_gate, args=args) for _ in range(WORKERS)]
    gate.await_waiting(WORKERS)
    gate.open()
    found = dict(coordinator.fetch(values))
    return [found[index] for index in range(WORKERS)]


def take_all(iterator: Any) -> list[Any]:
    return [np.asarray(batch).tolist() for batch in iterator]


@chief
def test_the_index_of_the_worker(strategy: Any, coordinator: Any) -> None:
    assert on_each_worker(strategy, coordinator, experimental_get_current_worker_index) == [0, 1]
    error = error_of(experimental_get_current_worker_index)
    assert isinstance(error, RuntimeError)
    assert "outside a scheduled function" in str(error)


@chief
def test_every_worker_sees_all_of_a_dataset(strategy: Any, coordinator: Any) -> None:
    def dataset_fn() -> Any:
        return mpidist.Dataset.range(5).batch(2)

    all_of_it = [[0, 1], [2, 3], [4]]
    for given in (dataset_fn, dataset_fn()):
        dataset = coordinator.create_per_worker_dataset(given)
        assert isinstance(dataset, PerWorkerDataset)
        iterator = iter(dataset)
        assert isinstance(iterator, PerWorkerValues)
        assert on_each_worker(strategy, coordinator, take_all, iterator) == [all_of_it] * WORKERS
        # That iterator is at its end; another one begins anew.
        assert on_each_worker(strategy, coordinator, take_all, iterator) == [[]] * WORKERS
        assert on_each_worker(strategy, coordinator, take_all, iter(dataset)) == [all_of_it] * WORKERS


@chief
def test_an_iterator_goes_on_from_function_to_function(strategy: Any, coordinator: Any) -> None:
    iterator = iter(coordinator.create_per_worker_dataset(mpidist.Dataset.range(100)))

    def take(iterator: Any) -> tuple[int, int]:
        return experimental_get_current_worker_index(), int(next(iterator))

    found = coordinator.fetch([coordinator.schedule(take, args=(iterator,)) for _ in range(20)])
    for worker in range(WORKERS):
        taken = [element for index, element in found if index == worker]
        assert taken == list(range(len(taken)))


@chief
def test_the_end_of_a_dataset_is_an_error(strategy: Any, coordinator: Any) -> None:
    iterator = iter(coordinator.create_per_worker_dataset(mpidist.Dataset.range(0)))
    coordinator.schedule(next, args=(iterator,))
    assert isinstance(error_of(coordinator.join), StopIteration)


@chief
def test_a_worker_takes_its_part_by_its_index(strategy: Any, coordinator: Any) -> None:
    def dataset_fn() -> Any:
        return mpidist.Dataset.range(6).shard(WORKERS, experimental_get_current_worker_index())

    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    assert on_each_worker(strategy, coordinator, take_all, iterator) == [[0, 2, 4], [1, 3, 5]]


@chief
def test_datasets_that_the_strategy_distributes(strategy: Any, coordinator: Any) -> None:
    contexts = mpidist.Dataset.range(4).batch(2)

    def dataset_fn(context: Any) -> Any:
        seen = (context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync)
        assert seen == (1, 0, 1)
        return mpidist.Dataset.range(4).batch(context.get_per_replica_batch_size(2))

    def train(iterator: Any) -> list[Any]:
        return [strategy.run(lambda x: x + 1, args=(batch,)).tolist() for batch in iterator]

    for given in (
        strategy.distribute_datasets_from_function(dataset_fn),
        strategy.experimental_distribute_dataset(contexts),
        lambda: strategy.distribute_datasets_from_function(dataset_fn),
    ):
        iterator = iter(coordinator.create_per_worker_dataset(given))
        assert on_each_worker(strategy, coordinator, train, iterator) == [[[1, 2], [3, 4]]] * WORKERS


@chief
def test_distributed_datasets_are_not_iterated_over_on_the_coordinator(strategy: Any, coordinator: Any) -> None:
    for dataset in (
        strategy.distribute_datasets_from_function(lambda _: mpidist.Dataset.range(4)),
        strategy.experimental_distribute_dataset(mpidist.Dataset.range(4)),
    ):
        error = error_of(iter, dataset)
        assert isinstance(error, ValueError)
        assert "create_per_worker_dataset(dataset)" in str(error)
    iterator = iter(coordinator.create_per_worker_dataset(mpidist.Dataset.range(4)))
    error = error_of(next, iterator)
    assert isinstance(error, NotImplementedError)
    assert "call next() inside fn" in str(error)


@chief
def test_what_a_dataset_function_must_not_do(strategy: Any, coordinator: Any) -> None:
    def makes_a_variable() -> Any:
        mpidist.Variable(0.0, name="hidden")
        return mpidist.Dataset.range(3)

    for given, kind, text in (
        (makes_a_variable, ValueError, "variable 'hidden' was created in the function of a per-worker dataset"),
        (lambda: 7, TypeError, "the function of a per-worker dataset returned 7; expected a Dataset"),
        (7, TypeError, "create_per_worker_dataset() was given 7; expected"),
    ):
        error = error_of(lambda given=given: _take_one(coordinator, given))  # type: ignore[misc]
        assert type(error) is kind
        assert text in str(error)


def _take_one(coordinator: Any, given: Any) -> Any:
    coordinator.schedule(next, args=(iter(coordinator.create_per_worker_dataset(given)),))
    coordinator.join()


# Resources ----------------------------------------------------------------------------------------------------


class Table:
    """A resource; counts on each worker how many of it there are."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.seen: list[int] = []
        alive_tables.add(self)


alive_tables: weakref.WeakSet[Table] = weakref.WeakSet()


def count_alive() -> int:
    """Return how many there are on the worker; a function of this module, as a copied one would have a copied set."""
    gc.collect()
    return len(alive_tables)


@chief
def test_a_resource_is_built_once_on_each_worker(strategy: Any, coordinator: Any) -> None:
    base = 100
    table = coordinator.create_per_worker_resource(lambda: Table(base))

    def look_up(table: Any, x: int) -> tuple[int, list[int]]:
        table.seen.append(x)
        return table.base + x, table.seen

    on_each_worker(strategy, coordinator, look_up, table, 1)
    assert on_each_worker(strategy, coordinator, look_up, table, 2) == [(102, [1, 2])] * WORKERS


@chief
def test_per_worker_values_are_found_wherever_they_are(strategy: Any, coordinator: Any) -> None:
    index = coordinator.create_per_worker_resource(experimental_get_current_worker_index)
    # One that is built of another.
    squared = coordinator.create_per_worker_resource(lambda: (index, index))

    def use(nest: Any, *, named: Any) -> bool:
        mine = experimental_get_current_worker_index()
        return nest == {"deep": [mine]} and named == (mine, mine) and index == mine

    value = coordinator.schedule(use, args=({"deep": [index]},), kwargs={"named": squared})
    assert coordinator.fetch(value) is True


@chief
def test_an_error_where_a_resource_is_built_is_an_error_of_the_function(strategy: Any, coordinator: Any) -> None:
    broken = coordinator.create_per_worker_resource(lambda: 1 // 0)
    value = coordinator.schedule(lambda: broken)
    assert isinstance(error_of(value.fetch), ZeroDivisionError)
    assert isinstance(error_of(coordinator.join), ZeroDivisionError)
    error = error_of(coordinator.create_per_worker_resource, 3)
    assert isinstance(error, TypeError)
    assert "expected a function without arguments" in str(error)


@chief
def test_workers_keep_their_own_values_no_longer_than_the_coordinator(strategy: Any, coordinator: Any) -> None:
    before = on_each_worker(strategy, coordinator, count_alive)
    for _ in range(5):
        table = coordinator.create_per_worker_resource(lambda: Table(1))
        on_each_worker(strategy, coordinator, lambda table: table.base, table)
    assert on_each_worker(strategy, coordinator, count_alive) != before
    del table
    gc.collect()
    # What was dropped is told with the next function.
    on_each_worker(strategy, coordinator, lambda: None)
    assert on_each_worker(strategy, coordinator, count_alive) == before


@chief
def test_own_values_do_not_come_back(strategy: Any, coordinator: Any) -> None:
    table = coordinator.create_per_worker_resource(lambda: 5)
    assert repr(table).startswith("<PerWorkerValues ")
    # In the function it is the worker's value, so that is what comes back.
    assert coordinator.fetch(coordinator.schedule(lambda: table)) == 5
