"""The iterators of the v1 strategies, experimental_run, and datasets of NumPy arrays."""

import numpy as np
import pytest

import mpidist
from mpidist import Dataset, InputContext, InputReplicationMode, OutOfRangeError, PeerError, v1
from tests.acceptance.checks import local_ids


def one_device():
    return v1.OneDeviceStrategy("cpu:0")


def mirrored():
    from mpi4py import MPI

    return v1.MirroredStrategy(["cpu:0", "cpu:1"], communicator=MPI.COMM_SELF)


def several_ranks():
    return v1.experimental.MultiWorkerMirroredStrategy(devices=["cpu:0"])


def mixed():
    return v1.experimental.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])


@pytest.fixture(params=[one_device, mirrored, several_ranks, mixed], ids=lambda make: make.__name__)
def strategy(request):
    made = request.param()
    yield made
    made.close()


def rows(strategy, batch):
    return [np.asarray(part).tolist() for part in strategy.experimental_local_results(batch)]


def part_of(strategy, batch):
    """Return what this rank's replicas get of a batch that has two rows for each replica."""
    n, ids = strategy.num_replicas_in_sync, local_ids(strategy)
    workers, worker = n // len(ids), ids[0] // len(ids)
    return [batch[2 * part : 2 * part + 2] for part in range(worker, n, workers)]


def test_dataset_iterator(strategy):
    n = strategy.num_replicas_in_sync
    iterator = strategy.make_dataset_iterator(Dataset.range(4 * n).batch(2 * n))
    assert isinstance(iterator, v1.InputIterator)
    batches = [list(range(2 * n)), list(range(2 * n, 4 * n))]
    for begin in (iterator.initialize, lambda: iterator.initializer):
        assert begin() == []
        assert rows(strategy, iterator.get_next()) == part_of(strategy, batches[0])
        assert rows(strategy, iterator.next()) == part_of(strategy, batches[1])
        for _ in range(2):
            with pytest.raises(OutOfRangeError):
                iterator.get_next()
            assert not iterator.get_next_as_optional().has_value()
    iterator.initialize()
    iterator.get_next()
    iterator.initialize()  # in the middle of a pass
    assert [rows(strategy, batch) for batch in iterator] == [part_of(strategy, batch) for batch in batches]
    assert (
        iterator.element_spec
        == strategy.experimental_distribute_dataset(Dataset.range(4 * n).batch(2 * n)).element_spec
    )


def test_the_first_pass_begins_by_itself(strategy):
    n = strategy.num_replicas_in_sync
    iterator = strategy.make_dataset_iterator(Dataset.range(2 * n).batch(2 * n))
    assert rows(strategy, iterator.get_next()) == part_of(strategy, list(range(2 * n)))
    iterator.close()


def test_a_batch_that_replicas_cannot_share_equally_is_refused(strategy):
    n = strategy.num_replicas_in_sync
    dataset = Dataset.range(8).batch(n + 1)
    if n == 1:
        assert rows(strategy, strategy.make_dataset_iterator(dataset).get_next()) == [[0, 1]]
    else:
        with pytest.raises(ValueError, match=rf"{n + 1} rows.*multiple of {n}.*make_input_fn_iterator"):
            strategy.make_dataset_iterator(dataset)


def batches_of(sizes):
    return Dataset.from_generator(lambda: (np.arange(size) for size in sizes))


UNEVEN = {
    "map": lambda n: Dataset.range(6 * n).batch(n + 1).map(lambda x: x),
    "map, one batch": lambda n: Dataset.range(n + 1).batch(2 * n + 2).map(lambda x: x).skip(0),
    "generator": lambda n: batches_of([n + 1]),
    "generator, first batches even": lambda n: batches_of([n, n + 1, n]),
    "generator, larger last batch": lambda n: batches_of([n, n + 1]),
    "generator of one row": lambda n: batches_of([1]),
    "batches of two sizes": lambda n: Dataset.range(n).batch(n).concatenate(Dataset.range(n + 1).batch(n + 1)),
}


@pytest.mark.parametrize("make", UNEVEN.values(), ids=UNEVEN)
def test_a_batch_that_cannot_be_shared_equally_is_an_error_whatever_follows_batch(strategy, make):
    n = strategy.num_replicas_in_sync
    iterator = strategy.make_dataset_iterator(make(n))
    if n == 1:
        assert list(iterator)
        return
    with pytest.raises((ValueError, PeerError), match=r"rows, which \d+ replicas in sync cannot share equally"):
        list(iterator)


EVEN = {
    "map": lambda n: Dataset.range(4 * n + 1).batch(2 * n).map(lambda x: x),
    "map to twice the rows": lambda n: Dataset.range(n).batch(1).map(lambda x: np.repeat(x, n)),
    "one small batch": lambda n: Dataset.range(1).batch(n).map(lambda x: x),
    "generator": lambda n: batches_of([2 * n, 4 * n, 2 * n, 1]),
}


@pytest.mark.parametrize("make", EVEN.values(), ids=EVEN)
def test_only_the_last_batch_may_be_shared_unequally(strategy, make):
    n = strategy.num_replicas_in_sync
    found = [row for batch in strategy.make_dataset_iterator(make(n)) for part in rows(strategy, batch) for row in part]
    expected = [part_of_any(strategy, np.asarray(batch).tolist()) for batch in make(n)]
    assert found == [row for part in expected for row in part]


def part_of_any(strategy, batch):
    n, ids = strategy.num_replicas_in_sync, local_ids(strategy)
    workers, worker, size = n // len(ids), ids[0] // len(ids), -(-len(batch) // n)
    return [row for part in range(worker, n, workers) for row in batch[size * part : size * (part + 1)]]


def test_input_fn_iterator_of_a_dataset(strategy):
    contexts = []

    def input_fn(context):
        contexts.append(context)
        size = context.get_per_replica_batch_size(2 * context.num_replicas_in_sync)
        return Dataset.range(100).batch(size).shard(context.num_input_pipelines, context.input_pipeline_id)

    iterator = strategy.make_input_fn_iterator(input_fn)
    n, ids = strategy.num_replicas_in_sync, local_ids(strategy)
    workers, worker = n // len(ids), ids[0] // len(ids)
    assert contexts == [InputContext(workers, worker, n)]
    for _ in range(2):
        iterator.initialize()
        expected = [[2 * (worker + workers * i), 2 * (worker + workers * i) + 1] for i in range(len(ids))]
        assert rows(strategy, iterator.get_next()) == expected
    iterator.close()


def test_input_fn_iterator_of_a_function(strategy):
    calls = []

    def value():
        calls.append(len(calls))
        return {"x": np.full(2, len(calls))}

    iterator = strategy.make_input_fn_iterator(lambda context: value, v1.InputReplicationMode.PER_WORKER)
    iterator.initialize()
    local = len(local_ids(strategy))
    for step in range(3):
        parts = strategy.experimental_local_results(iterator.get_next())
        assert [part["x"].tolist() for part in parts] == [[step * local + i + 1] * 2 for i in range(local)]
    assert calls == list(range(3 * local))
    iterator.close()


@pytest.mark.parametrize("returned", [None, 5, [1, 2]])
def test_an_input_fn_that_returns_something_else_is_refused(strategy, returned):
    with pytest.raises(ValueError, match="expected a Dataset, or a function"):
        strategy.make_input_fn_iterator(lambda context: returned)


def test_other_arguments_are_refused(strategy):
    with pytest.raises(ValueError, match="PER_WORKER only"):
        strategy.make_input_fn_iterator(lambda context: Dataset.range(2).batch(1), InputReplicationMode.PER_REPLICA)
    with pytest.raises(TypeError, match="InputContext"):
        strategy.make_input_fn_iterator(Dataset.range(2))
    with pytest.raises(TypeError, match=r"Dataset.from_tensor_slices"):
        strategy.make_dataset_iterator([1, 2])


def test_experimental_run(strategy):
    n = strategy.num_replicas_in_sync
    iterator = strategy.make_dataset_iterator(Dataset.range(4 * n).batch(2 * n))
    iterator.initialize()

    def step(batch):
        assert mpidist.get_strategy() is strategy
        return batch * 10

    for batch in (list(range(2 * n)), list(range(2 * n, 4 * n))):
        found = rows(strategy, strategy.experimental_run(step, iterator))
        assert found == [[10 * x for x in part] for part in part_of(strategy, batch)]
    with pytest.raises(OutOfRangeError):
        strategy.experimental_run(step, iterator)
    ids = strategy.experimental_run(lambda: mpidist.get_replica_context().replica_id_in_sync_group)
    assert strategy.experimental_local_results(ids) == tuple(local_ids(strategy))


def test_numpy_datasets(strategy):
    x = {"x": np.arange(6).reshape(3, 2), "y": (np.arange(3),)}
    elements = list(strategy.experimental_make_numpy_dataset(x, session=object()))
    assert [(element["x"].tolist(), int(element["y"][0])) for element in elements] == [
        ([0, 1], 0),
        ([2, 3], 1),
        ([4, 5], 2),
    ]
    stacked = list(strategy.experimental_make_numpy_dataset([np.zeros(2), np.ones(2)]))
    assert [element.tolist() for element in stacked] == [[0, 0], [1, 1]]
    with pytest.raises(ValueError, match="first axes differ"):
        strategy.experimental_make_numpy_dataset((np.zeros(2), np.zeros(3)))


def test_replica_functions_take_no_iterators(strategy):
    for call in (
        lambda: strategy.make_dataset_iterator(Dataset.range(2).batch(2)),
        lambda: strategy.make_input_fn_iterator(lambda context: Dataset.range(2).batch(2)),
    ):
        with pytest.raises(RuntimeError, match="before run"):
            strategy.run(call)
