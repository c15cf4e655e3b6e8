"""The iterator of a plain dataset, and reduce of plain and distributed ones."""

import numpy as np
import pytest

import mpidist
from mpidist.core.errors import OutOfRangeError
from mpidist.input.dataset import Dataset
from mpidist.input.distribute import distribute_dataset
from mpidist.input.input_options import InputWorkers
from mpidist.input.iteration import DatasetIterator, Optional
from tests.input.worker_threads import lists, run_workers

pytestmark = pytest.mark.one_rank

TWO = InputWorkers(1, 0, (2,), None, True)


def test_what_the_default_strategy_hands_out_iterates_like_a_distributed_dataset():
    dataset = Dataset.range(5).batch(2)
    distributed = mpidist.get_strategy().experimental_distribute_dataset(dataset)
    iterator = iter(distributed)
    assert isinstance(iterator, DatasetIterator)
    assert iter(iterator) is iterator
    assert iterator.element_spec == dataset.element_spec
    assert iterator.get_next().tolist() == [0, 1]
    optional = iterator.get_next_as_optional()
    assert isinstance(optional, Optional)
    assert optional.get_value().tolist() == [2, 3]
    assert next(iterator).tolist() == [4]
    for _ in range(2):
        with pytest.raises(OutOfRangeError, match="no more elements"):
            iterator.get_next()
        assert not iterator.get_next_as_optional().has_value()
        with pytest.raises(StopIteration):
            next(iterator)
    assert len(list(distributed)) == 3


@pytest.mark.parametrize("distributed", [False, True])
def test_close_ends_a_pass_and_only_that(distributed):
    dataset = Dataset.range(6).batch(2)
    dataset = distribute_dataset(dataset, TWO, None) if distributed else dataset
    iterator = iter(dataset)
    next(iterator)
    iterator.close()
    iterator.close()
    assert list(iterator) == []
    with pytest.raises(OutOfRangeError):
        iterator.get_next()
    assert len(list(dataset)) == 3


def test_an_iterator_has_failed_for_good_after_an_error():
    def fail_at_1(x):
        if x == 1:
            raise RuntimeError("no")
        return x

    iterator = iter(Dataset.range(3).map(fail_at_1))
    assert next(iterator) == 0
    with pytest.raises(RuntimeError, match="no"):
        iterator.get_next()
    with pytest.raises(RuntimeError, match=r"failed before, with RuntimeError: no. Begin another pass"):
        iterator.get_next()
    assert iterator.state()["steps"] == 1
    iterator.restore({**iterator.state(), "steps": 2})
    assert iterator.get_next() == 2


def test_reduce_of_a_plain_dataset():
    pairs = Dataset.zip(Dataset.range(4), Dataset.range(10, 14))
    assert pairs.reduce((), lambda state, element: (*state, tuple(map(int, element)))) == (
        (0, 10),
        (1, 11),
        (2, 12),
        (3, 13),
    )
    assert Dataset.range(0).reduce("nothing", lambda state, x: x) == "nothing"


@pytest.mark.parametrize("counts", [(2,), (1, 1), (2, 1)])
def test_reduce_of_a_distributed_dataset_sees_the_steps_of_this_worker(counts):
    def work(workers):
        distributed = distribute_dataset(Dataset.range(7).batch(3).prefetch(1), workers, None)
        seen = [distributed.reduce([], lambda state, step: [*state, lists(step)]) for _ in range(2)]
        return seen, [lists(step) for step in distributed]

    for (first, second), steps in run_workers(work, counts):
        assert first == second == steps
        assert len(steps) == 3


def test_reduce_with_an_unknown_number_of_steps_ends_for_all_workers_together():
    def work(workers):
        count = 9 if workers.worker_id == 0 else 4
        dataset = Dataset.from_generator(lambda: iter(np.arange(count))).batch(4)
        return distribute_dataset(dataset, workers, None).reduce(0, lambda steps, _: steps + 1)

    assert run_workers(work, (1, 1)) == [3, 3]


@pytest.mark.parametrize("distributed", [False, True])
def test_what_reduce_refuses(distributed):
    def dataset(plain):
        return distribute_dataset(plain, TWO, None) if distributed else plain

    with pytest.raises(TypeError, match="reduce_func is 3"):
        dataset(Dataset.range(4).batch(2)).reduce(0, 3)
    with pytest.raises(ValueError, match=r"take\(count\)"):
        dataset(Dataset.range(4).batch(2).repeat()).reduce(0, max)


def test_reduce_runs_the_strategy_and_is_refused_inside_a_replica_function():
    strategy = mpidist.MirroredStrategy(["cpu:0", "cpu:1"])
    distributed = strategy.experimental_distribute_dataset(Dataset.range(7).batch(4))

    def step(total, batch):
        return total + strategy.reduce("SUM", strategy.run(lambda x: x * x, args=(batch,)), axis=0)

    assert distributed.reduce(0, step) == sum(x * x for x in range(7))
    with pytest.raises(ValueError, match="inside a replica function"):
        strategy.run(lambda: distributed.reduce(0, step))
    strategy.close()
