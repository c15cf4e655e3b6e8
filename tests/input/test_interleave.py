"""Dataset.interleave: the order of tf.data's deterministic interleave, and the seeds of what it opens."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.input.dataset import Dataset
from mpidist.input.distribute import distribute_dataset
from mpidist.input.elements import ArraySpec
from tests.input.policy_helpers import stream
from tests.input.worker_threads import run_workers, steps_of

pytestmark = pytest.mark.one_rank


def numbers(dataset):
    return [int(x) for x in dataset]


def test_the_example_of_tensorflow():
    dataset = Dataset.range(1, 6).interleave(
        lambda x: Dataset.from_tensor_slices([int(x)]).repeat(6), cycle_length=2, block_length=4
    )
    expected = "1 1 1 1 2 2 2 2 1 1 2 2 3 3 3 3 4 4 4 4 3 3 4 4 5 5 5 5 5 5"
    assert numbers(dataset) == list(map(int, expected.split()))


def reference(sources, cycle_length, block_length):
    """Seats around a table: who sits there says the next words, up to so many; who has none left goes away."""
    waiting, seats, said = [list(source) for source in sources], [None] * cycle_length, []
    turns = itertools.cycle(range(cycle_length))
    while waiting or seats != [None] * cycle_length:
        seat = next(turns)
        if seats[seat] is None and waiting:
            seats[seat] = waiting.pop(0)
        for _ in range(block_length):
            if seats[seat]:
                said.append(seats[seat].pop(0))
            else:
                seats[seat] = None
                break
    return said


@given(
    lengths=st.lists(st.integers(0, 6), max_size=7),
    cycle_length=st.integers(1, 5),
    block_length=st.integers(1, 4),
    is_stream=st.booleans(),
)
def test_order(lengths, cycle_length, block_length, is_stream):
    sources = [range(10 * i, 10 * i + length) for i, length in enumerate(lengths)]
    order = stream(len(lengths)) if is_stream else Dataset.range(len(lengths))
    dataset = order.interleave(
        lambda i: Dataset.from_tensor_slices(np.array(sources[i], np.int64)), cycle_length, block_length
    )
    expected = reference(sources, cycle_length, block_length)
    for _ in range(2):
        assert numbers(dataset) == expected
    assert sorted(expected) == sorted(itertools.chain(*sources))


def test_datasets_are_opened_when_their_turn_comes():
    opened = []

    def open_one(x):
        opened.append(int(x))
        return Dataset.range(2)

    iterator = iter(Dataset.range(5).interleave(open_one, cycle_length=2))
    assert opened == []
    next(iterator)
    assert opened == [0]
    next(iterator)
    assert opened == [0, 1]
    assert len(list(iterator)) == 8
    assert opened == list(range(5))


def test_unknown_lengths_and_specs():
    dataset = Dataset.range(2, 5).interleave(lambda x: Dataset.range(int(x)).map(lambda y: np.float32(y)))
    assert dataset.cardinality() == -2
    assert dataset.element_spec == ArraySpec((), np.dtype(np.float32))
    assert dataset.batch(4, drop_remainder=True).element_spec == ArraySpec((4,), np.dtype(np.float32))
    assert Dataset.range(0).interleave(Dataset.range).cardinality() == 0
    empty_first = Dataset.range(3).interleave(lambda x: stream(int(x)))
    assert empty_first.element_spec.shape == ()
    pairs = Dataset.zip(Dataset.range(2), Dataset.range(5, 7)).interleave(lambda a, b: Dataset.range(a, b))
    assert sorted(numbers(pairs)) == sorted([*range(5), *range(1, 6)])


def test_endless_parts_and_endless_inputs():
    endless_parts = Dataset.range(2).interleave(lambda x: Dataset.range(x, x + 1).repeat(), cycle_length=2)
    assert numbers(endless_parts.take(5)) == [0, 1, 0, 1, 0]
    endless_input = Dataset.range(2).repeat().interleave(lambda x: Dataset.range(x, x + 1), cycle_length=1)
    assert numbers(endless_input.take(5)) == [0, 1, 0, 1, 0]


def make(shuffle):
    return Dataset.range(4).interleave(lambda x: shuffle(Dataset.range(10 * x, 10 * x + 10)), cycle_length=2)


@pytest.mark.parametrize("counts", [(2,), (1, 1), (2, 1)])
@pytest.mark.parametrize(
    "shuffle",
    [
        lambda dataset: dataset.shuffle(),
        lambda dataset: dataset.shuffle(4).batch(2).shuffle().interleave(Dataset.from_tensor_slices, 3),
        lambda dataset: dataset.interleave(lambda y: Dataset.range(y, y + 1).repeat(1).shuffle()),
    ],
    ids=["rows", "rows and batches", "nested"],
)
def test_unseeded_shuffles_inside_are_the_same_on_all_workers(shuffle, counts):
    def passes(workers):
        distributed = distribute_dataset(make(shuffle).batch(3), workers, None)
        return [steps_of(distributed) for _ in range(2)]

    found = run_workers(passes, counts)
    everything = sorted(itertools.chain(*(range(10 * x, 10 * x + 10) for x in range(4))))
    for number in range(2):
        rows = [row for worker in found for step in worker[number] for part in step for row in part]
        assert sorted(rows) == everything


def test_shuffles_inside_have_an_order_for_each_dataset_and_pass():
    dataset = make(lambda part: part.shuffle())
    first, second = numbers(dataset), numbers(dataset)
    assert first != second
    parts = [tuple(x % 10 for x in first if x // 10 == number) for number in range(4)]
    assert len(set(parts)) == 4
    steady = make(lambda part: part.shuffle(reshuffle_each_iteration=False))
    assert numbers(steady) == numbers(steady)
    seeded = make(lambda part: part.shuffle(seed=1))
    assert numbers(seeded) == numbers(make(lambda part: part.shuffle(seed=1)))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((5,), TypeError, "map_func is 5"),
        ((Dataset.range, 0), ValueError, "cycle_length is 0"),
        ((Dataset.range, 1, 0), ValueError, "block_length 0"),
    ],
)
def test_bad_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        Dataset.range(3).interleave(*arguments)


def test_the_function_must_return_a_dataset():
    with pytest.raises(TypeError, match=r"returned \[1\] of type list; expected a Dataset"):
        list(Dataset.range(3).interleave(lambda x: [1]))
