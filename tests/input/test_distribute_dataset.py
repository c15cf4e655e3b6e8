"""experimental_distribute_dataset: worked examples, and every layout against the text of rule A."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import mpidist
from mpidist.core.errors import MismatchError, OutOfRangeError
from mpidist.input.dataset import Dataset
from mpidist.input.distribute import distribute_dataset
from mpidist.input.elements import ArraySpec, PerReplicaSpec
from mpidist.input.input_options import AutoShardPolicy, InputOptions, InputReplicationMode, InputWorkers
from mpidist.values import PerReplica
from tests.input.test_dealing import reference
from tests.input.worker_threads import lists, run_workers, steps_of

pytestmark = pytest.mark.one_rank

ONE = InputWorkers(1, 0, (1,), None, False)


def distribute(dataset, counts):
    """Return the steps of every worker, for a dataset or a function of no arguments that makes it."""
    make = dataset if callable(dataset) else lambda: dataset
    return run_workers(lambda workers: steps_of(distribute_dataset(make(), workers, None)), counts)


def stream(count, dtype=np.int64):
    return Dataset.from_generator(lambda: iter(np.arange(count, dtype=dtype)))


def test_block_assignment():
    dataset = Dataset.range(8).batch(4).with_options(assignment="block")
    assert distribute(dataset, (2, 2)) == [[([0], [1]), ([4], [5])], [([2], [3]), ([6], [7])]]
    unequal = Dataset.range(6).batch(6)
    assert distribute(unequal, (2, 1)) == [[([0, 1], [2, 3])], [([4, 5],)]]
    errors = distribute(unequal.with_options(assignment="tf"), (2, 1))
    assert [type(error) for error in errors] == [ValueError, ValueError]


@settings(max_examples=60)
@given(
    rows=st.integers(0, 40),
    size=st.integers(1, 9),
    counts=st.one_of(
        st.tuples(st.integers(1, 4), st.integers(1, 3)).map(lambda x: (x[1],) * x[0]),
        st.lists(st.integers(1, 3), min_size=2, max_size=3).map(tuple),
    ),
    drop=st.booleans(),
    is_stream=st.booleans(),
    assignment=st.sampled_from([None, "block"]),
)
def test_every_layout_agrees_with_the_reference(rows, size, counts, drop, is_stream, assignment):
    source = stream if is_stream else Dataset.range
    dataset = source(rows).batch(size, drop_remainder=drop).with_options(assignment=assignment)
    found = distribute(dataset, counts)
    batches = [list(range(rows))[i : i + size] for i in range(0, rows, size)]
    batches = [batch for batch in batches if len(batch) == size or not drop]
    rule = assignment or ("tf" if len(set(counts)) == 1 else "block")
    expected = [[] for _ in counts]
    for batch in batches:
        for worker, parts in enumerate(reference(batch, counts, rule)):
            expected[worker].append(tuple(parts))
    assert found == expected
    union = sorted(row for worker in found for step in worker for part in step for row in part)
    assert union == list(itertools.chain(*batches))


@pytest.mark.parametrize("source", [Dataset.range, stream], ids=["rows", "stream"])
@pytest.mark.parametrize("counts", [(3,), (1, 1), (2, 1), (2, 2)])
def test_unseeded_shuffles_are_the_same_on_all_workers(source, counts):
    # The function is called on each worker, so each draws seeds of its own.
    def passes(workers):
        dataset = source(50).shuffle(50).map(lambda x: x + 100).shuffle(50).repeat(2).batch(7)
        distributed = distribute_dataset(dataset, workers, None)
        return [steps_of(distributed) for _ in range(2)]

    found = run_workers(passes, counts)
    orders = []
    for number in range(2):
        rows = [row for worker in found for step in worker[number] for part in step for row in part]
        assert sorted(rows) == sorted(list(range(100, 150)) * 2)
        orders.append(rows)
    assert orders[0] != orders[1]


@pytest.mark.parametrize("counts", [(1,), (3,), (1, 1, 1), (2, 1)])
def test_a_seed_gives_the_same_global_batches_in_every_layout(counts):
    dataset = Dataset.range(24).shuffle(seed=9).batch(6)
    expected = [[sorted(batch.tolist()) for batch in dataset] for _ in range(2)]

    def work(workers):
        distributed = distribute_dataset(dataset, workers, None)
        return [steps_of(distributed) for _ in range(2)]

    found = run_workers(work, counts)
    for number in range(2):
        steps = zip(*(worker[number] for worker in found), strict=True)
        assert [sorted(row for parts in step for part in parts for row in part) for step in steps] == expected[number]


def test_an_iteration_on_one_worker_alone_does_not_disturb_the_order():
    def work(workers):
        dataset = Dataset.range(30).shuffle(seed=4).batch(6)
        if workers.worker_id == 0:
            list(dataset)
        distributed = distribute_dataset(dataset, workers, None)
        if workers.worker_id == 1:
            distributed.element_spec
        return steps_of(distributed)

    found = run_workers(work, (1, 1))
    assert sorted(row for worker in found for step in worker for part in step for row in part) == list(range(30))


def test_empty_parts_keep_structure_dtype_and_other_sizes():
    nest = {"x": np.zeros((4, 3), np.float16), "y": (np.arange(4, dtype=np.uint8),)}
    arrays = Dataset.from_tensor_slices(nest)
    samples = Dataset.from_source(list(arrays))
    streamed = Dataset.from_generator(lambda: iter(arrays))
    for dataset in (arrays, samples, streamed):
        (step,) = distribute_dataset(dataset.batch(4), InputWorkers(1, 0, (5,), None, True), None)
        empty_x, empty_y = step["x"].values[4], step["y"][0].values[4]
        assert (empty_x.shape, empty_x.dtype) == ((0, 3), np.float16)
        assert (empty_y.shape, empty_y.dtype) == ((0,), np.uint8)
        assert step["x"].replica_ids == (0, 1, 2, 3, 4)


def test_one_replica_gets_the_batches_as_they_are():
    batches = list(distribute_dataset(Dataset.range(5).batch(2), ONE, None))
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4]]
    assert [int(x) for x in distribute_dataset(Dataset.range(3), ONE, None)] == [0, 1, 2]
    (step,) = distribute_dataset(Dataset.range(2).batch(2), InputWorkers(1, 0, (1,), None, True), None)
    assert lists(step) == ([0, 1],)


def test_ready_made_batches_of_a_source_are_split():
    dataset = Dataset.from_generator(lambda: iter([np.arange(4), [4, 5, 6]]))
    assert distribute(dataset, (2,)) == [[([0, 1], [2, 3]), ([4, 5], [6])]]


def test_unequal_generators_end_together():
    def work(workers):
        count = 9 if workers.worker_id == 0 else 4
        dataset = Dataset.from_generator(lambda: iter(np.arange(count, dtype=np.float32)), None).batch(4)
        return [(lists(step), step.values[0].dtype.name) for step in distribute_dataset(dataset, workers, None)]

    found = run_workers(work, (1, 1))
    assert [[rows for (rows,), _ in worker] for worker in found] == [
        [[0, 1], [4, 5], [8]],
        [[2, 3], [], []],
    ]
    assert {dtype for worker in found for _, dtype in worker} == {"float32"}


def test_a_worker_whose_generator_is_empty_learns_what_batches_look_like():
    def work(workers):
        count = 4 * workers.worker_id
        elements = [{"x": np.zeros(3, np.float16)}] * count
        dataset = Dataset.from_generator(lambda: iter(elements)).batch(4)
        return [step["x"].values[0] for step in distribute_dataset(dataset, workers, None)]

    (empty,), (full,) = run_workers(work, (1, 1))
    assert (empty.shape, empty.dtype, full.shape) == ((0, 3), np.float16, (2, 3))


def test_different_numbers_of_passes_are_refused_on_all_workers():
    def work(workers):
        distributed = distribute_dataset(Dataset.range(4).batch(2), workers, None)
        distributed._distribution.passes = workers.worker_id
        return iter(distributed)

    assert [type(error) for error in run_workers(work, (1, 1))] == [MismatchError] * 2


def test_iterator_methods_and_the_end():
    distributed = distribute_dataset(Dataset.range(4).batch(2), InputWorkers(1, 0, (2,), None, True), None)
    iterator = iter(distributed)
    assert iter(iterator) is iterator
    assert lists(iterator.get_next()) == ([0], [1])
    optional = iterator.get_next_as_optional()
    assert optional.has_value()
    assert lists(optional.get_value()) == ([2], [3])
    for _ in range(2):
        assert not iterator.get_next_as_optional().has_value()
        with pytest.raises(OutOfRangeError, match="no more elements in this pass"):
            iterator.get_next()
        with pytest.raises(StopIteration):
            next(iterator)
    with pytest.raises(ValueError, match="has_value"):
        iterator.get_next_as_optional().get_value()
    assert steps_of(distributed) == [([0], [1]), ([2], [3])]


def test_lengths_and_specs():
    two = InputWorkers(1, 0, (2,), None, True)
    x = np.zeros((10, 3), np.float32)
    dataset = Dataset.from_tensor_slices({"x": x})

    def shapes(dataset, workers):
        spec = distribute_dataset(dataset, workers, None).element_spec["x"]
        assert isinstance(spec, PerReplicaSpec)
        return [part.shape for part in spec.specs]

    assert shapes(dataset.batch(4), two) == [(None, 3)] * 2
    assert shapes(dataset.batch(4, drop_remainder=True), two) == [(2, 3)] * 2
    three = InputWorkers(1, 0, (3,), None, True)
    assert shapes(dataset.batch(4, drop_remainder=True), three) == [(2, 3), (2, 3), (0, 3)]
    bare = distribute_dataset(dataset.batch(4), ONE, None)
    assert bare.element_spec == {"x": ArraySpec((None, 3), np.dtype("float32"))}
    assert iter(bare).element_spec == bare.element_spec
    assert (len(bare), bare.cardinality()) == (3, 3)
    assert distribute_dataset(dataset.repeat().batch(4), two, None).cardinality() == -1
    with pytest.raises(TypeError, match="not known"):
        len(distribute_dataset(stream(3).batch(2), two, None))
    with pytest.raises(ValueError, match="no element"):
        distribute_dataset(stream(0).batch(2), two, None).element_spec


def test_endless_datasets_need_no_vote():
    def work(workers):
        dataset = stream(6).repeat().batch(4)
        iterator = iter(distribute_dataset(dataset, workers, None))
        return [lists(next(iterator)) for _ in range(3)]

    assert run_workers(work, (1, 1)) == [[([0, 1],), ([4, 5],), ([2, 3],)], [([2, 3],), ([0, 1],), ([4, 5],)]]


@pytest.mark.parametrize(
    ("dataset", "error", "text"),
    [
        (Dataset.range(4), ValueError, r"batch\(global_batch_size\)"),
        (stream(4), ValueError, r"batch\(global_batch_size\)"),
        (Dataset.range(4).batch(2).map(np.sum), ValueError, r"batch\(global_batch_size\)"),
        (Dataset.range(4).batch(2).map(lambda x: (x, x[:1])), ValueError, "numbers of rows"),
        ([1, 2], TypeError, "Dataset.from_tensor_slices"),
        (
            Dataset.range(4).batch(2).with_options(auto_shard_policy=AutoShardPolicy.FILE),
            ValueError,
            "AutoShardPolicy.DATA",
        ),
    ],
)
def test_refused_datasets(dataset, error, text):
    with pytest.raises(error, match=text):
        list(distribute_dataset(dataset, InputWorkers(1, 0, (2,), None, True), None))


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: mpidist.MirroredStrategy(["cpu:0", "cpu:1"], communicator=MPI.COMM_SELF),
        lambda: mpidist.OneDeviceStrategy("cpu:0"),
    ],
)
def test_an_iterator_is_not_moved_on_inside_a_replica_function(strategy):
    opened = strategy()
    distributed = opened.experimental_distribute_dataset(Dataset.range(4).batch(4))
    iterator = iter(distributed)
    for move in (iterator.__next__, iterator.get_next, iterator.get_next_as_optional, distributed.__iter__):
        with pytest.raises(ValueError, match="inside a replica function"):
            opened.run(move)
    with opened.scope():
        rows = opened.experimental_local_results(next(iterator))
    assert np.concatenate(rows).tolist() == [0, 1, 2, 3]
    opened.close()


def test_refused_options_and_a_distributed_dataset():
    two = InputWorkers(1, 0, (2,), None, True)
    dataset = Dataset.range(4).batch(2)
    per_replica = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)
    with pytest.raises(NotImplementedError, match="distribute_datasets_from_function"):
        distribute_dataset(dataset, two, None, per_replica)
    with pytest.raises(TypeError, match="InputOptions"):
        distribute_dataset(dataset, two, None, {"experimental_fetch_to_device": True})
    for options, expected in (
        (InputOptions(False, experimental_place_dataset_on_device=True), "needs a pipeline for each replica"),
        (InputOptions(None, InputReplicationMode.PER_REPLICA, True), "experimental_fetch_to_device=False"),
    ):
        with pytest.raises(ValueError, match=expected):
            distribute_dataset(dataset, two, None, options)
    distributed = distribute_dataset(dataset, two, None, InputOptions())
    with pytest.raises(TypeError, match="distributed already"):
        distribute_dataset(distributed, two, None)
    assert all(isinstance(step, PerReplica) for step in distributed)
