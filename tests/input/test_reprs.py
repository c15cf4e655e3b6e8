"""What datasets and iterators print: their pipeline and how far they are, without reading anything."""

from __future__ import annotations

import pytest

from mpidist.input import Dataset, InputOptions, InputReplicationMode
from mpidist.input.distribute import distribute_dataset, distribute_from_function
from mpidist.input.input_options import InputWorkers
from mpidist.v1 import InputIterator

pytestmark = pytest.mark.one_rank

WORKERS = InputWorkers(1, 0, (2,), None, True)


def reads_nothing():
    raise AssertionError("an element was read")
    yield


def test_datasets():
    steps = Dataset.from_generator(reads_nothing).map(lambda x: x).concatenate(Dataset.range(3)).cache().padded_batch(2)
    text = "concatenate(from_generator(reads_nothing).map, range(0, 3)).cache().padded_batch(2, padded_shapes=None, "
    assert repr(steps) == f"<Dataset {text}padding_values=None)>"
    sampled = Dataset.sample_from_datasets([Dataset.range(1), Dataset.range(2)], [1, 3], 5, True)
    assert repr(sampled) == (
        "<Dataset sample_from_datasets[weights=[0.25, 0.75], seed=5, stop_on_empty_dataset=True, "
        "rerandomize_each_iteration=False](range(0, 1), range(0, 2))>"
    )
    assert repr(Dataset.from_tensors([1, 2]).window(2).unbatch()) == (
        "<Dataset from_tensors((2,) int64).window(2, shift=2, stride=1).unbatch()>"
    )


def test_iterators():
    iterator = iter(Dataset.range(4).batch(2))
    assert repr(iterator) == "<DatasetIterator of range(0, 4).batch(2), pass 1, 0 steps taken>"
    next(iterator)
    assert repr(iterator) == "<DatasetIterator of range(0, 4).batch(2), pass 1, 1 step taken>"
    other = iter(Dataset.range(4).batch(2))
    other.restore(iterator.state())
    next(other)
    assert repr(other) == "<DatasetIterator of range(0, 4).batch(2), pass 1, 2 steps taken>"
    other = iter(Dataset.range(9).batch(3))
    larger = iter(Dataset.range(9).batch(2))
    larger.restore(other.state() | {"steps": 1})
    assert repr(larger) == "<DatasetIterator of range(0, 9).batch(2), pass 1, 3 rows and 0 steps taken>"


def test_distributed_datasets():
    dataset = distribute_dataset(Dataset.range(5).batch(4), WORKERS, None)
    assert repr(dataset) == "<DistributedDataset range(0, 5).batch(4), 2 steps for 2 replicas>"
    endless = distribute_dataset(Dataset.range(5).batch(4).repeat(), InputWorkers(1, 0, (1,), None, True), None)
    assert repr(endless) == "<DistributedDataset range(0, 5).batch(4).repeat(), steps without end for 1 replica>"
    stream = distribute_dataset(Dataset.from_generator(reads_nothing).batch(4), WORKERS, None)
    assert repr(stream).endswith("batch(4), an unknown number of steps for 2 replicas>")
    list(dataset)
    iterator = iter(dataset)
    next(iterator)
    expected = "<DistributedIterator of range(0, 5).batch(4), pass 2, 1 step taken>"
    assert repr(iterator) == expected
    assert (
        repr(InputIterator(dataset))
        == "<InputIterator of <DistributedDataset range(0, 5).batch(4), 2 steps for 2 replicas>>"
    )
    options = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)
    own = distribute_from_function(
        lambda context: Dataset.range(context.input_pipeline_id, 5).batch(1), WORKERS, None, options, True
    )
    assert repr(own) == "<DistributedDataset range(0, 5).batch(1) and 1 more, 5 steps for 2 replicas>"
