"""Reading fast over the real Communicator: threads and windows give all ranks the same order, and each its own rows."""

from collections import Counter

import numpy as np
import pytest

from mpidist.collectives import Communicator
from mpidist.input import row_indices
from mpidist.input.dataset import Dataset
from mpidist.input.distribute import distribute_dataset
from mpidist.input.input_options import InputWorkers
from tests.input.worker_threads import steps_of

pytestmark = [pytest.mark.nodes, pytest.mark.counts]

ROWS = 103


@pytest.fixture
def communicator():
    with Communicator() as opened:
        yield opened


def workers_of(communicator):
    size = communicator.size
    return InputWorkers(size, communicator.rank, (1,) * size, communicator if size > 1 else None, True)


def shuffled(rows, way):
    return rows.shuffle(24, block_size=4) if way == "windows" else rows.shuffle()


@pytest.mark.parametrize("way", ["array", "no array", "windows"])
def test_every_order_is_a_partition_in_every_pass(communicator, way, monkeypatch):
    if way == "no array":
        monkeypatch.setattr(row_indices, "LARGEST_ARRAY", 10)
    called = []

    def function(row):
        called.append(int(row[0]))
        return row

    table = np.stack([np.arange(ROWS), np.arange(ROWS)], axis=1)
    rows = shuffled(Dataset.from_tensor_slices(table), way).map(function, num_parallel_calls=2)
    distributed = distribute_dataset(rows.batch(10).prefetch(2), workers_of(communicator), None)
    passes = []
    for _ in range(2):
        del called[:]
        steps = steps_of(distributed)
        seen = [int(row[0]) for step in steps for part in step for row in part]
        has_empty = any(len(part) == 0 for step in steps for part in step)
        everything = [row for rank in communicator.all_gather_object(seen) for row in rank]
        assert sorted(everything) == list(range(ROWS))
        # Each row is read once, by its own rank; and, once, a row that tells what a batch without rows looks like.
        others = Counter(called) - Counter(seen)
        assert Counter(seen) - Counter(called) == Counter()
        assert others.total() == (1 if has_empty and not passes else 0)
        passes.append(everything)
    assert passes[0] != passes[1]


def test_interleaved_streams_in_threads_come_alike_on_all_ranks(communicator):
    def made(number):
        start = 100 * int(number)
        return Dataset.from_generator(lambda: iter(range(start, start + 9)))

    dataset = Dataset.range(5).shuffle().interleave(made, cycle_length=3, num_parallel_calls=3).batch(4)
    distributed = distribute_dataset(dataset, workers_of(communicator), None)
    seen = [row for step in steps_of(distributed) for part in step for row in part]
    everything = [row for rank in communicator.all_gather_object(seen) for row in rank]
    assert sorted(everything) == [100 * number + i for number in range(5) for i in range(9)]
