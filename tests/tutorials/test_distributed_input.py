"""The tutorial "Distributed input", block by block: https://www.tensorflow.org/tutorials/distribute/input.

Retold with its names and in its order; NumPy stands for TensorFlow's operations. Its batch sizes are for two replicas,
and grow here with the number of replicas, so that it can be followed on any number of ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import ArraySpec, AutoShardPolicy
from mpidist.input import Options, PerReplicaSpec
from tests.acceptance.checks import local_ids, num_workers
from tests.support.ranks.layouts import layouts

pytestmark = [
    pytest.mark.counts,
    pytest.mark.parametrize("strategy", layouts("mirrored-2local", "mirrored-4local", "multi_worker*"), indirect=True),
]


def batch_for(strategy: Any) -> int:
    """Return the tutorial's global batch size, 16 for its two replicas."""
    return 8 * int(strategy.num_replicas_in_sync)


def lists(strategy: Any, value: Any) -> list[Any]:
    """Return what each replica of this rank has."""
    return [np.asarray(part).tolist() for part in strategy.experimental_local_results(value)]


def worker_of(strategy: Any) -> int:
    return local_ids(strategy)[0] // len(local_ids(strategy))


def of_this_worker(strategy: Any, parts: list[Any]) -> list[Any]:
    """Return those of one step that TensorFlow deals to this worker: part j goes to worker j mod W."""
    return parts[worker_of(strategy) :: num_workers(strategy)]


def rebatched(strategy: Any, batch: list[int]) -> list[Any]:
    """Return a global batch in parts of ceil(size / replicas), for the replicas of this worker."""
    n = strategy.num_replicas_in_sync
    size = -(-len(batch) // n)
    return of_this_worker(strategy, [batch[i * size : (i + 1) * size] for i in range(n)])


# Distributed datasets -----------------------------------------------------------------------------------------------


def train_step(inputs: Any) -> Any:
    features, labels = inputs
    return labels - 0.3 * features


def test_without_distribution(strategy: Any) -> None:
    global_batch_size = 16
    dataset = mpidist.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(global_batch_size)
    losses = [train_step(inputs) for inputs in dataset]
    assert [loss.shape for loss in losses] == [(16, 1)] * 6 + [(4, 1)]
    assert all(np.array_equal(loss, np.full_like(loss, 0.7)) for loss in losses)


def test_experimental_distribute_dataset(strategy: Any) -> None:
    global_batch_size = batch_for(strategy)
    mirrored_strategy = strategy
    dataset = mpidist.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(global_batch_size)
    dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)
    assert not isinstance(dist_dataset, mpidist.Dataset)
    features, labels = next(iter(dist_dataset))
    # A replica that is alone has what it would have without distribution.
    assert isinstance(features, mpidist.DistributedValues) == (strategy.num_replicas_in_sync > 1)
    for part in (features, labels):
        assert lists(strategy, part) == [[[1.0]] * 8] * len(local_ids(strategy))


@pytest.mark.parametrize(("rows", "batch_size"), [(6, 4), (4, 4), (8, 4)])
def test_batching(strategy: Any, rows: int, batch_size: int) -> None:
    dataset = mpidist.Dataset.range(rows).batch(batch_size, drop_remainder=False)
    without = [batch.tolist() for batch in dataset]
    steps = [lists(strategy, batch) for batch in strategy.experimental_distribute_dataset(dataset)]
    assert steps == [rebatched(strategy, batch) for batch in without]
    if (rows, strategy.num_replicas_in_sync, num_workers(strategy)) == (6, 2, 1):
        # The tutorial's own figures.
        assert steps == [[[0, 1], [2, 3]], [[4], [5]]]


def test_sharding_options(strategy: Any) -> None:
    dataset = mpidist.Dataset.from_tensors(([1.0], [1.0])).repeat(64).batch(16)
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA
    dataset = dataset.with_options(options)
    count = 0
    for features, _ in strategy.experimental_distribute_dataset(dataset):
        lengths = strategy.run(lambda x: np.array(len(x)), args=(features,))
        count += int(strategy.reduce("SUM", lengths, axis=None))
    # No row comes twice, however many workers there are.
    assert count == 64


@pytest.mark.parametrize("policy", ["FILE", "DATA", "OFF"])
def test_sharding_policies(strategy: Any, policy: str) -> None:
    """A file of six rows for each worker, 0 to 5, 6 to 11 and so on, in batches of two rows for each replica."""
    workers, local = num_workers(strategy), len(local_ids(strategy))
    names = [str(6 * worker) for worker in range(workers)]
    dataset = mpidist.Dataset.from_files(names, lambda name: iter(range(int(name), int(name) + 6)))
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[policy]
    dataset = dataset.batch(2 * strategy.num_replicas_in_sync).with_options(options)
    steps = [lists(strategy, batch) for batch in strategy.experimental_distribute_dataset(dataset)]

    everything = list(range(6 * workers))
    size = 2 * strategy.num_replicas_in_sync
    if policy == "DATA":
        batches = [everything[i : i + size] for i in range(0, len(everything), size)]
        assert steps == [rebatched(strategy, batch) for batch in batches]
        return
    # Each worker goes on through its own rows, two to a replica. (The page ends its example of FILE with batches of one
    # row, which is how TensorFlow dealt them once; since 2.4 it deals two.)
    mine = everything if policy == "OFF" else everything[6 * worker_of(strategy) :][:6]
    two = [mine[i : i + 2] for i in range(0, len(mine), 2)]
    two += [[]] * (-len(two) % local)
    assert steps == [two[i : i + local] for i in range(0, len(two), local)]


def test_distribute_datasets_from_function(strategy: Any) -> None:
    global_batch_size = batch_for(strategy)
    mirrored_strategy = strategy

    def dataset_fn(input_context: mpidist.InputContext) -> mpidist.Dataset:
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        dataset = mpidist.Dataset.from_tensors(([1.0], [1.0])).repeat(64).batch(16)
        dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
        dataset = dataset.batch(batch_size)
        return dataset.prefetch(2)

    dist_dataset = mirrored_strategy.distribute_datasets_from_function(dataset_fn)
    # The page batches twice: each worker's share of the four batches is one batch of batches, for its first replica.
    ((features, _),) = dist_dataset
    share = len(range(worker_of(strategy), 4, num_workers(strategy)))
    shapes = [part.shape for part in strategy.experimental_local_results(features)]
    assert shapes == [(share, 16, 1)] + [(0, 16, 1)] * (len(local_ids(strategy)) - 1)


# Distributed iterators ----------------------------------------------------------------------------------------------


def test_a_loop_over_the_dataset(strategy: Any) -> None:
    global_batch_size = batch_for(strategy)
    mirrored_strategy = strategy
    dataset = mpidist.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(global_batch_size)
    dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)
    rows = 0
    for x in dist_dataset:
        loss = mirrored_strategy.run(train_step, args=(x,))
        for part in strategy.experimental_local_results(loss):
            assert np.array_equal(part, np.full((len(part), 1), 0.7))
        rows += int(strategy.reduce("SUM", strategy.run(lambda x: np.array(len(x[0])), args=(x,)), axis=None))
    assert rows == 100


def test_an_explicit_iterator(strategy: Any) -> None:
    mirrored_strategy = strategy
    dataset = mpidist.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(2 * strategy.num_replicas_in_sync)
    dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)
    num_epochs = 10
    steps_per_epoch = 5
    for _ in range(num_epochs):
        dist_iterator = iter(dist_dataset)
        for step in range(steps_per_epoch):
            given = dist_iterator.get_next() if step % 2 else next(dist_iterator)
            loss = mirrored_strategy.run(train_step, args=(given,))
            assert lists(strategy, loss) == [[[0.7], [0.7]]] * len(local_ids(strategy))


def test_the_end_is_an_error_of_get_next(strategy: Any) -> None:
    dist_iterator = iter(strategy.experimental_distribute_dataset(mpidist.Dataset.range(4).batch(4)))
    dist_iterator.get_next()
    with pytest.raises(mpidist.OutOfRangeError):
        dist_iterator.get_next()


def test_get_next_as_optional(strategy: Any) -> None:
    global_batch_size = 4
    steps_per_loop = 5
    dataset = mpidist.Dataset.range(9).batch(global_batch_size)
    distributed_iterator = iter(strategy.experimental_distribute_dataset(dataset))

    def train_fn(distributed_iterator: Any) -> list[Any]:
        seen = []
        for _ in range(steps_per_loop):
            optional_data = distributed_iterator.get_next_as_optional()
            if not optional_data.has_value():
                break
            per_replica_results = strategy.run(lambda x: x, args=(optional_data.get_value(),))
            seen.append(lists(strategy, per_replica_results))
        return seen

    seen = train_fn(distributed_iterator)
    assert seen == [rebatched(strategy, batch) for batch in ([0, 1, 2, 3], [4, 5, 6, 7], [8])]


def test_element_spec(strategy: Any) -> None:
    global_batch_size = batch_for(strategy)
    epochs = 2
    steps_per_epoch = 5
    mirrored_strategy = strategy
    count = 5 * global_batch_size
    dataset = mpidist.Dataset.from_tensors(([1.0], [1.0])).repeat(count).batch(global_batch_size)
    dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)

    of_one = ArraySpec((None, 1), np.dtype("float64"))
    spec = PerReplicaSpec((of_one,) * len(local_ids(strategy))) if strategy.num_replicas_in_sync > 1 else of_one
    assert dist_dataset.element_spec == (spec, spec)

    def train_step(per_replica_inputs: Any) -> Any:
        def step_fn(inputs: Any) -> Any:
            return 2 * inputs

        return mirrored_strategy.run(step_fn, args=(per_replica_inputs,))

    for _ in range(epochs):
        iterator = iter(dist_dataset)
        assert iterator.element_spec == dist_dataset.element_spec
        for _ in range(steps_per_epoch):
            output = train_step(next(iterator))
            # Twice a pair has four members.
            assert [lists(strategy, part) for part in output] == [[[[1.0]] * 8] * len(local_ids(strategy))] * 4


# Preprocessing, order, and other inputs -----------------------------------------------------------------------------


def test_preprocessing_in_a_custom_loop(strategy: Any) -> None:
    vocab = ["a", "b", "c", "d", "f"]

    with strategy.scope():
        # In the place of a StringLookup layer, which numbers its vocabulary from 1: 0 is for what it does not know.
        numbers = {word: number for number, word in enumerate(vocab, start=1)}

    def layer(words: Any) -> Any:
        return np.array([numbers.get(word, 0) for word in words.tolist()])

    def dataset_fn(input_context: mpidist.InputContext) -> mpidist.Dataset:
        dataset = mpidist.Dataset.from_tensor_slices(["a", "c", "e"]).repeat()
        global_batch_size = 2 * input_context.num_replicas_in_sync
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        dataset = dataset.batch(batch_size)
        dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)

        def preprocess_with_kpl(words: Any) -> Any:
            return layer(words)

        return dataset.map(preprocess_with_kpl)

    distributed_dataset = strategy.distribute_datasets_from_function(dataset_fn)
    distributed_dataset_iterator = iter(distributed_dataset)
    workers, local = num_workers(strategy), len(local_ids(strategy))
    for step in range(3):
        batches = [worker_of(strategy) + workers * (step * local + replica) for replica in range(local)]
        expected = [[[1, 3, 0][row % 3] for row in (2 * batch, 2 * batch + 1)] for batch in batches]
        assert lists(strategy, next(distributed_dataset_iterator)) == expected


def test_files_that_are_shuffled_and_parsed(strategy: Any, tmp_path: Any) -> None:
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(f"{2 * number} {2 * number + 1}")
    pattern, num_epochs = str(tmp_path / "*.txt"), 2

    def dataset_fn(input_context: mpidist.InputContext) -> mpidist.Dataset:
        d = mpidist.Dataset.list_files(pattern, shuffle=False)
        d = d.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
        d = d.repeat(num_epochs)
        d = d.shuffle(100)
        d = d.interleave(lambda path: mpidist.Dataset.from_files([path], read_words), cycle_length=2, block_length=1)
        d = d.map(int, num_parallel_calls=2)
        return d.batch(2)

    seen = [lists(strategy, batch) for batch in strategy.distribute_datasets_from_function(dataset_fn)]
    mine = sorted(row for step in seen for part in step for row in part)
    files = range(worker_of(strategy), 6, num_workers(strategy))
    assert mine == sorted([2 * file + row for file in files for row in (0, 1)] * num_epochs)


def read_words(path: str) -> Any:
    with open(path) as file:
        yield from file.read().split()


def test_outputs_in_order(strategy: Any) -> None:
    mirrored_strategy = strategy
    dataset_size = 24
    batch_size = 6
    dataset = mpidist.Dataset.range(dataset_size).enumerate().batch(batch_size)
    dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)

    def predict(index: Any, inputs: Any) -> Any:
        outputs = 2 * inputs
        return index, outputs

    result = {}
    for index, inputs in dist_dataset:
        output_index, outputs = mirrored_strategy.run(predict, args=(index, inputs))
        indices = list(mirrored_strategy.experimental_local_results(output_index))
        rindices: list[Any] = []
        for a in indices:
            rindices.extend(a)
        outputs = list(mirrored_strategy.experimental_local_results(outputs))
        routputs: list[Any] = []
        for a in outputs:
            routputs.extend(a)
        for i, value in zip(rindices, routputs, strict=True):
            result[i] = value

    assert result == {i: 2 * i for i in result}
    # A plain value counts once per rank.
    seen = np.bincount(sorted(result), minlength=dataset_size)
    total = seen if num_workers(strategy) == 1 else strategy.reduce("SUM", seen, axis=None)
    assert total.tolist() == [1] * dataset_size


def test_values_from_a_function(strategy: Any) -> None:
    mirrored_strategy = strategy

    def value_fn(ctx: Any) -> Any:
        return np.array(ctx.replica_id_in_sync_group)

    distributed_values = mirrored_strategy.experimental_distribute_values_from_function(value_fn)
    for _ in range(4):
        result = mirrored_strategy.run(lambda x: x, args=(distributed_values,))
        assert lists(strategy, result) == list(local_ids(strategy))


def test_a_generator(strategy: Any) -> None:
    """The page does not batch: each vector of four is cut along its only axis."""
    mirrored_strategy = strategy

    def input_gen() -> Any:
        while True:
            yield np.random.rand(4)

    dataset = mpidist.Dataset.from_generator(input_gen, output_types=(np.float32), output_shapes=[4])
    dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)
    iterator = iter(dist_dataset)
    for _ in range(4):
        result = mirrored_strategy.run(lambda x: x, args=(next(iterator),))
        found = strategy.experimental_local_results(result)
        assert [len(part) for part in found] == [len(part) for part in rebatched(strategy, list(range(4)))]
        assert {part.dtype for part in found} == {np.dtype("float32")}
    iterator.close()
