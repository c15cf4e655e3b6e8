"""Orders of row numbers: permutations of any length, without an array, in windows, and alike for the same seed."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.input import row_indices
from mpidist.input.dataset import Dataset
from mpidist.input.row_indices import Joined, as_array, concatenate, order_in_windows, permuted, random_order

pytestmark = pytest.mark.one_rank


def rng(seed=0):
    return np.random.default_rng(seed)


def order(places, count, seed=0):
    return permuted(places, count, rng(seed).integers(0, 1 << 64, (8, 2), np.uint64))


@given(st.integers(1, 3000), st.integers(0, 2**32))
def test_every_number_occurs_once(count, seed):
    assert np.array_equal(np.sort(order(np.arange(count), count, seed)), np.arange(count))


@pytest.mark.parametrize("count", [2**40 + 1, 2**62 + 12345, 2**63 - 1])
def test_numbers_of_any_size(count):
    places = np.array([0, 1, count // 2, count - 1])
    numbers = order(places, count)
    assert len(set(numbers.tolist())) == 4
    assert numbers.min() >= 0
    assert numbers.max() < count
    assert not np.array_equal(numbers, order(places, count, 1))


def excess(counts):
    """Return how far counts are from being alike: chi-squared over its expectation, with 4 deviations taken off."""
    counts = np.ravel(counts)
    expected, freedom = counts.mean(), counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom) - 4


def test_an_order_without_an_array_looks_random():
    count = 10**7
    numbers = order(np.arange(1 << 17), count, 3)
    limits = {"bins": 16, "range": [(0, count), (0, count)]}
    assert excess(np.histogram(numbers, 256, (0, count))[0]) < 0
    assert excess(np.histogram2d(numbers[:-1], numbers[1:], **limits)[0]) < 0
    assert excess(np.histogram2d(numbers[:-7], numbers[7:], **limits)[0]) < 0
    assert all(excess(np.bincount(numbers % divisor)) < 0 for divisor in (2, 3, 64, 1000))
    assert abs(np.mean(numbers[1:] > numbers[:-1]) - 0.5) < 0.01


def test_many_rows_are_shuffled_in_little_memory():
    dataset = Dataset.range(10**9).shuffle(seed=1).batch(1000)
    assert len(dataset) == 10**6
    tracemalloc.start()
    iterator = iter(dataset)
    first = [next(iterator) for _ in range(200)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    rows = np.concatenate(first)
    assert len(set(rows.tolist())) == len(rows) == 200_000
    assert excess(np.histogram(rows, 64, (0, 10**9))[0]) < 0
    assert peak < 16 << 20


def test_short_and_long_orders_are_exact(monkeypatch):
    for largest in (1 << 22, 100):
        monkeypatch.setattr(row_indices, "LARGEST_ARRAY", largest)
        numbers = np.concatenate(list(random_order(70_000, rng())))
        assert not np.array_equal(numbers, np.arange(70_000))
        assert np.array_equal(np.sort(numbers), np.arange(70_000))
        again = np.concatenate(list(random_order(70_000, rng())))
        assert np.array_equal(numbers, again)
    assert len(np.concatenate([*random_order(0, rng()), np.arange(0)])) == 0


@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, 6), st.sampled_from([1 << 22, 3]))
def test_windows_are_a_partition_of_whole_blocks(count, block_rows, window_blocks, largest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_indices, "LARGEST_ARRAY", largest)
        pieces = list(order_in_windows(count, block_rows, window_blocks, rng(count)))
    assert sorted(x for piece in pieces for x in piece.tolist()) == list(range(count))
    blocks = [set((piece // block_rows).tolist()) for piece in pieces]
    assert all(1 <= len(several) <= window_blocks for several in blocks)
    assert sum(map(len, blocks)) == -(-count // block_rows)  # no block is in two windows


@given(
    st.lists(
        st.one_of(
            st.builds(range, st.integers(0, 5), st.integers(0, 30), st.integers(1, 3)),
            st.lists(st.integers(0, 50), max_size=8).map(lambda rows: np.array(rows, dtype=np.int64)),
        ),
        max_size=6,
    )
)
def test_joined_blocks(blocks):
    joined, expected = Joined(blocks), as_array(concatenate(blocks))
    places = np.arange(len(expected))[::-1]
    assert len(joined) == len(expected)
    assert np.array_equal(joined.at(places), expected[::-1])
