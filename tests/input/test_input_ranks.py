"""Input over the real Communicator, on however many ranks there are."""

import numpy as np
import pytest

from mpidist.collectives import Communicator
from mpidist.core.errors import MismatchError, PeerError
from mpidist.input.dataset import Dataset
from mpidist.input.distribute import distribute_dataset, distribute_from_function
from mpidist.input.input_options import AutoShardPolicy, InputWorkers
from tests.input.policy_helpers import read, stream
from tests.input.worker_threads import lists, steps_of

pytestmark = [pytest.mark.nodes, pytest.mark.counts]


@pytest.fixture
def communicator():
    with Communicator() as opened:
        yield opened


def workers_of(communicator, replicas=1):
    size = communicator.size
    return InputWorkers(size, communicator.rank, (replicas,) * size, communicator if size > 1 else None, True)


def test_a_rank_without_elements_learns_what_they_look_like(communicator):
    def dataset_fn(context):
        last = context.input_pipeline_id == context.num_input_pipelines - 1
        elements = [np.zeros(3, np.float16)] * (2 if last else 0)
        return Dataset.from_generator(lambda: iter(elements)).batch(2)

    (step,) = distribute_from_function(dataset_fn, workers_of(communicator), None)
    last = communicator.rank == communicator.size - 1
    assert (step.values[0].shape, step.values[0].dtype) == ((2 if last else 0, 3), np.float16)


@pytest.mark.min_ranks(2)
def test_different_datasets_are_refused_on_all_ranks(communicator):
    dataset = Dataset.range(4 + communicator.rank).batch(2)
    with pytest.raises(MismatchError, match=r"range\(0, 4\)") as caught:
        distribute_dataset(dataset, workers_of(communicator), None)
    assert "range(0, 5)" in str(caught.value)
    assert sorted(caught.value.plans) == list(range(communicator.size))


@pytest.mark.parametrize(("calls", "ahead"), [(None, False), (None, True), (2, False)], ids=["", "prefetch", "threads"])
def test_a_reading_error_on_one_rank_reaches_all(communicator, calls, ahead):
    last = communicator.size - 1

    def read(x):
        if communicator.rank == last and x >= 4:
            raise OSError("the disk is gone")
        return x

    dataset = stream(8).map(read, num_parallel_calls=calls).batch(2)
    dataset = dataset.prefetch(2) if ahead else dataset
    distributed = distribute_from_function(lambda _: dataset, workers_of(communicator), None)
    with pytest.raises(OSError if communicator.rank == last else PeerError):
        steps_of(distributed)


@pytest.mark.min_ranks(2)
def test_a_generator_that_is_used_up_on_one_rank_reaches_all(communicator):
    kept = iter(range(3))
    dataset = Dataset.from_generator(lambda: kept if communicator.rank == 0 else iter(range(3))).batch(2)
    distributed = distribute_from_function(lambda _: dataset, workers_of(communicator), None)
    assert len(steps_of(distributed)) == 2
    with pytest.raises(ValueError if communicator.rank == 0 else PeerError, match="with nothing left"):
        steps_of(distributed)


@pytest.mark.parametrize("source", [Dataset.range, stream], ids=["rows", "stream"])
def test_prefetch_changes_nothing_while_the_ranks_exchange_in_every_step(communicator, source):
    dataset = source(53).shuffle(53, seed=1).batch(5)
    workers = workers_of(communicator, 2)
    expected = steps_of(distribute_dataset(dataset, workers, None))
    found = []
    for step in distribute_dataset(dataset.prefetch(3), workers, None):
        parts = [np.asarray(part).tolist() for part in step.values]
        rows = communicator.all_reduce("SUM", np.array([sum(map(len, parts))]))
        assert rows in (5, 3)
        found.append(tuple(parts))
    assert found == expected


def test_reduce_with_a_collective_in_the_function(communicator):
    distributed = distribute_dataset(stream(23).batch(5).prefetch(1), workers_of(communicator), None)

    def add(total, step):
        return total + int(communicator.all_reduce("SUM", np.array([step.values[0].sum()]))[0])

    assert distributed.reduce(0, add) == sum(range(23))


@pytest.mark.parametrize("policy", [AutoShardPolicy.DATA, AutoShardPolicy.FILE, AutoShardPolicy.OFF], ids=str)
def test_going_on_from_a_state_on_these_ranks_and_alone(communicator, policy):
    names = [f"{10 * i}:{10 - i}" for i in range(communicator.size + 1)]
    dataset = Dataset.from_files(names, read).shuffle(6).batch(6).with_options(auto_shard_policy=policy)
    iterator = iter(distribute_dataset(dataset, workers_of(communicator), None))
    next(iterator)
    state = iterator.state()
    assert communicator.all_gather_object(state) == [state] * communicator.size
    rest = [lists(step) for step in iterator]

    again = iter(distribute_dataset(dataset, workers_of(communicator), None))
    again.restore(state)
    assert [lists(step) for step in again] == rest

    alone = iter(dataset)
    alone.restore(state)
    steps = zip(*communicator.all_gather_object(rest), strict=True)
    together = [sorted(row for (part,) in parts for row in part) for parts in steps]
    assert [sorted(batch.tolist()) for batch in alone] == together


@pytest.mark.min_ranks(2)
def test_other_files_are_errors_on_all_ranks(communicator):
    workers, size = workers_of(communicator), communicator.size
    others = ["0:1"] * (size + communicator.rank)
    with pytest.raises(MismatchError):
        distribute_dataset(Dataset.from_files(others, read).batch(2), workers, None)
    # A rank that sees fewer files than there are ranks tells the others, which see enough.
    fewer = ["0:1"] * (1 if communicator.rank == 0 else size)
    with pytest.raises(ValueError if communicator.rank == 0 else PeerError):
        distribute_dataset(Dataset.from_files(fewer, read).batch(2), workers, None)
