"""Shuffling: a permutation in each pass, the same for the same seed, whether rows or a stream."""

import itertools

import pytest

from mpidist.input.dataset import Dataset
from tests.input.policy_helpers import stream

pytestmark = pytest.mark.one_rank


def rows(count):
    return Dataset.range(count)


def numbers(dataset, limit=None):
    return [int(x) for x in itertools.islice(dataset, limit)]


@pytest.mark.parametrize(("source", "buffer"), [(rows, None), (rows, 3), (stream, 3), (stream, 1000)])
def test_a_pass_is_a_permutation_and_a_seed_fixes_it(source, buffer):
    one, other = source(100).shuffle(buffer, seed=5), source(100).shuffle(buffer, seed=5)
    first, second = numbers(one), numbers(one)
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != list(range(100))
    assert first != second
    assert (numbers(other), numbers(other)) == (first, second)
    assert numbers(source(100).shuffle(buffer, seed=6)) != first


@pytest.mark.parametrize("source", [rows, stream])
def test_reshuffle_each_iteration_false_keeps_the_order(source):
    dataset = source(50).shuffle(50, seed=1, reshuffle_each_iteration=False)
    assert numbers(dataset) == numbers(dataset)
    assert numbers(dataset.repeat(2)) == numbers(dataset) * 2


@pytest.mark.parametrize("source", [rows, stream])
def test_each_repetition_has_an_order_of_its_own(source):
    found = numbers(source(50).shuffle(50, seed=1).repeat(3))
    epochs = [found[i : i + 50] for i in (0, 50, 100)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_stream_is_drawn_from_the_buffer_only():
    found = numbers(stream(100).shuffle(4, seed=2))
    assert all(value <= place + 3 for place, value in enumerate(found))
    assert numbers(stream(10).shuffle(1, seed=2)) == list(range(10))


def test_an_endless_dataset_is_drawn_from_a_buffer():
    found = numbers(rows(10).repeat().shuffle(5, seed=2), 3000)
    assert all(290 <= found.count(value) <= 310 for value in range(10))


def test_batches_are_shuffled_as_wholes():
    batches = [batch.tolist() for batch in rows(40).batch(4).shuffle(seed=0)]
    assert sorted(batches) == [list(range(i, i + 4)) for i in range(0, 40, 4)]
    assert batches != sorted(batches)


def test_blocks_are_read_in_windows_and_each_pass_has_its_own():
    dataset = rows(100).shuffle(20, seed=3, block_size=5)
    first, second = numbers(dataset), numbers(dataset)
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    for start in range(0, 100, 20):
        window = first[start : start + 20]
        assert len({x // 5 for x in window}) == 4
        assert window != sorted(window)
    assert [x // 5 for x in first[::20]] != sorted(x // 5 for x in first[::20])
    assert numbers(rows(100).shuffle(20, seed=3, block_size=5)) == first


def test_blocks_of_rows_that_were_chosen_before():
    dataset = rows(50).skip(10).shard(2, 1).repeat(2).shuffle(8, seed=3, block_size=4)
    assert sorted(numbers(dataset)) == sorted([*range(11, 50, 2)] * 2)


@pytest.mark.parametrize(
    ("dataset", "arguments", "text"),
    [
        (rows(10), {"block_size": 2}, r"shuffle\(buffer_size=128, block_size=2\)"),
        (rows(10), {"block_size": 0, "buffer_size": 4}, "1 or more"),
        (rows(10).batch(2), {"block_size": 2, "buffer_size": 4}, "before batch"),
        (rows(10).repeat(), {"block_size": 2, "buffer_size": 4}, "before batch.. and repeat"),
        (stream(10), {"block_size": 2, "buffer_size": 4}, "read by number"),
    ],
)
def test_blocks_where_there_are_none(dataset, arguments, text):
    with pytest.raises(ValueError, match=text):
        dataset.shuffle(**arguments)
