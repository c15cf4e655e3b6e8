"""distribute_datasets_from_function and experimental_distribute_values_from_function."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.core.errors import PeerError
from mpidist.input.dataset import Dataset
from mpidist.input.distribute import distribute_from_function, distribute_values
from mpidist.input.elements import ArraySpec
from mpidist.input.input_options import InputContext, InputOptions, InputReplicationMode, InputWorkers
from mpidist.values import PerReplica
from tests.input.policy_helpers import stream
from tests.input.worker_threads import run_workers, steps_of

pytestmark = pytest.mark.one_rank

ONE = InputWorkers(1, 0, (1,), None, False)
TWO = InputWorkers(1, 0, (2,), None, True)
PER_REPLICA = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)


def from_function(dataset_fn, counts):
    return run_workers(lambda workers: steps_of(distribute_from_function(dataset_fn, workers, None)), counts)


def test_replicas_take_the_next_batches_in_turn():
    assert from_function(lambda _: Dataset.range(9).batch(2), (2,)) == [[([0, 1], [2, 3]), ([4, 5], [6, 7]), ([8], [])]]
    assert from_function(lambda _: Dataset.range(9).batch(2, drop_remainder=True), (2,)) == [
        [([0, 1], [2, 3]), ([4, 5], [6, 7])]
    ]
    # Five full batches for two replicas: static shapes drop the step that would need an empty one.
    static = distribute_from_function(lambda _: Dataset.range(10).batch(2, drop_remainder=True), TWO, None)
    assert len(static) == 2
    assert len(steps_of(static)) == 2
    assert [spec.shape for spec in static.element_spec.specs] == [(2,), (2,)]


@settings(max_examples=40)
@given(
    amounts=st.lists(st.integers(0, 12), min_size=2, max_size=3),
    size=st.integers(1, 4),
    replicas=st.integers(1, 3),
    drop=st.booleans(),
    kinds=st.lists(st.sampled_from([Dataset.range, stream]), min_size=3, max_size=3),
)
def test_all_workers_make_as_many_steps_as_the_longest(amounts, size, replicas, drop, kinds):
    def dataset_fn(context):
        worker = context.input_pipeline_id
        return kinds[worker](amounts[worker]).batch(size, drop_remainder=drop)

    def work(workers):
        distributed = distribute_from_function(dataset_fn, workers, None)
        return [steps_of(distributed) for _ in range(2)]

    found = run_workers(work, (replicas,) * len(amounts))
    batches = [amount // size if drop else -(-amount // size) for amount in amounts]
    steps = max(-(-count // replicas) for count in batches)
    for worker, passes in enumerate(found):
        assert passes[0] == passes[1]
        assert len(passes[0]) == steps
        rows = [row for step in passes[0] for part in step for row in part]
        assert rows == list(range(min(amounts[worker], batches[worker] * size)))


def test_a_worker_without_any_data_learns_what_batches_look_like():
    def dataset_fn(context):
        samples = [(np.zeros(3, np.float16), 1)] * (2 * context.input_pipeline_id)
        return Dataset.from_source(samples).batch(2)

    def work(workers):
        return [
            [(leaf.values[0].shape, leaf.values[0].dtype.name) for leaf in step]
            for step in distribute_from_function(dataset_fn, workers, None)
        ]

    assert run_workers(work, (1, 1)) == [
        [[((0, 3), "float16"), ((0,), "int64")]],
        [[((2, 3), "float16"), ((2,), "int64")]],
    ]


def test_unbatched_values_cannot_be_padded():
    found = from_function(lambda context: Dataset.range(2 + context.input_pipeline_id), (1, 1))
    assert isinstance(found[0], ValueError)
    assert "batch(global_batch_size)" in str(found[0])


def test_an_unseeded_shuffle_before_shard_is_the_same_on_all_workers():
    def dataset_fn(context):
        pipelines = (context.num_input_pipelines, context.input_pipeline_id)
        return Dataset.range(40).shuffle().shard(*pipelines).batch(5)

    found = from_function(dataset_fn, (1, 1, 1))
    assert sorted(row for worker in found for step in worker for part in step for row in part) == list(range(40))


def test_input_contexts():
    seen = run_workers(lambda workers: _contexts(workers), (2, 1))
    assert seen == [[InputContext(2, 0, 3)], [InputContext(2, 1, 3)]]
    assert _contexts(ONE) == [InputContext(1, 0, 1)]
    assert _contexts(TWO, PER_REPLICA, True) == [InputContext(2, 0, 2), InputContext(2, 1, 2)]


def _contexts(workers, *options):
    seen = []

    def dataset_fn(context):
        seen.append(context)
        return Dataset.range(4).batch(2)

    distribute_from_function(dataset_fn, workers, None, *options)
    return seen


def test_per_replica_pipelines():
    def uneven(context):
        return Dataset.range(2 + context.input_pipeline_id).batch(1)

    distributed = distribute_from_function(uneven, TWO, None, PER_REPLICA, per_replica_allowed=True)
    assert steps_of(distributed) == [([0], [0]), ([1], [1]), ([], [2])]
    assert len(distributed) == 3
    assert [spec.shape for spec in distributed.element_spec.specs] == [(None,)] * 2

    def static(context):
        return Dataset.range(2 + context.input_pipeline_id).batch(1, drop_remainder=True)

    distributed = distribute_from_function(static, TWO, None, PER_REPLICA, per_replica_allowed=True)
    assert steps_of(distributed) == [([0], [0]), ([1], [1])]
    assert len(distributed) == 2
    with pytest.raises(NotImplementedError, match="PER_WORKER"):
        distribute_from_function(static, TWO, None, PER_REPLICA)


def test_specs():
    distributed = distribute_from_function(lambda _: Dataset.range(9).batch(2), ONE, None)
    assert distributed.element_spec == ArraySpec((None,), np.dtype(np.int64))
    assert [batch.tolist() for batch in distributed] == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]


@pytest.mark.parametrize("returned", [None, [1, 2], np.zeros(3)])
def test_dataset_fn_must_return_a_dataset(returned):
    with pytest.raises(TypeError, match=r"dataset_fn returned .*Dataset.from_tensor_slices"):
        distribute_from_function(lambda _: returned, ONE, None)


def test_an_error_in_dataset_fn_reaches_all_workers():
    def dataset_fn(context):
        if context.input_pipeline_id == 1:
            raise OSError("no such file")
        return Dataset.range(2).batch(1)

    assert [type(error) for error in from_function(dataset_fn, (1, 1))] == [PeerError, OSError]


def test_values_from_function():
    four = InputWorkers(2, 1, (2, 2), object(), True)
    values = distribute_values(lambda c: c.replica_id_in_sync_group / c.num_replicas_in_sync, four)
    assert isinstance(values, PerReplica)
    assert (values.values, values.replica_ids) == ((0.5, 0.75), (2, 3))
    picked = distribute_values(lambda c: [3.0, 2.0, 1.0][c.replica_id_in_sync_group], TWO)
    assert picked.values == (3.0, 2.0)
    nest = distribute_values(lambda c: {"id": c.replica_id_in_sync_group}, TWO)
    assert nest["id"].values == (0, 1)
    assert distribute_values(lambda c: 5, ONE).values == (5,)
    with pytest.raises(TypeError, match="ValueContext"):
        distribute_values(3, ONE)
