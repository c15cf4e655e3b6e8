"""Blocks of row numbers against plain lists."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.input import row_indices

quick = settings(max_examples=150)
pytestmark = pytest.mark.one_rank

blocks = st.lists(
    st.one_of(
        st.builds(range, st.integers(0, 5), st.integers(0, 30), st.integers(1, 3)),
        st.lists(st.integers(0, 50), max_size=8).map(lambda rows: np.array(rows, dtype=np.int64)),
    ),
    max_size=6,
)


def flat(found):
    return list(row_indices.rows(found))


@quick
@given(blocks, st.integers(0, 40))
def test_take_and_skip(found, count):
    everything = flat(found)
    assert flat(row_indices.cut(found, 0, count, 1)) == everything[:count]
    assert flat(row_indices.cut(found, count, None, 1)) == everything[count:]


@quick
@given(blocks, st.integers(1, 5), st.data())
def test_shard(found, num_shards, data):
    index = data.draw(st.integers(0, num_shards - 1))
    assert flat(row_indices.cut(found, index, None, num_shards)) == flat(found)[index::num_shards]


@quick
@given(blocks, st.integers(1, 12), st.booleans())
def test_batch(found, size, drop_remainder):
    everything = flat(found)
    expected = [everything[i : i + size] for i in range(0, len(everything), size)]
    if drop_remainder:
        expected = [batch for batch in expected if len(batch) == size]
    assert [flat([batch]) for batch in row_indices.batch(found, size, drop_remainder)] == expected


def test_contiguous_rows_stay_a_range():
    assert list(row_indices.batch([range(10)], 4, False)) == [range(4), range(4, 8), range(8, 10)]
    assert list(row_indices.cut([range(8)], 1, None, 2)) == [range(1, 8, 2)]
