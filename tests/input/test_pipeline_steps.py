"""The number of rows that a pipeline knows before it is read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.input import Dataset

pytestmark = pytest.mark.one_rank


@given(
    rows=st.integers(0, 20),
    size=st.integers(1, 6),
    drop=st.booleans(),
    changes=st.lists(
        st.sampled_from(
            [
                lambda d: d.repeat(2),
                lambda d: d.repeat(0),
                lambda d: d.take(2),
                lambda d: d.skip(1),
                lambda d: d.shard(2, 1),
                lambda d: d.shuffle(seed=1),
                lambda d: d.prefetch(2),
                lambda d: d.filter(lambda x: True),
                lambda d: d.map(lambda x: x),
            ]
        ),
        max_size=3,
    ),
)
def test_a_number_of_rows_that_is_known_is_right(rows, size, drop, changes):
    dataset = Dataset.range(rows).batch(size, drop_remainder=drop)
    for change in changes:
        dataset = change(dataset)
    known = dataset._node.row_count()
    total = sum(map(len, dataset))
    assert known in (-2, total)
    if not changes:
        assert known == total
    assert Dataset.range(rows + 1).batch(size).repeat()._node.row_count() == -1
