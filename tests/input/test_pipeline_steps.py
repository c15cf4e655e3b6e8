"""What every step of a pipeline can do: go on after other inputs, and tell how many rows come."""

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.compat.v1_strategies import EvenBatches
from mpidist.input import SHARD_HINT, Dataset
from mpidist.input.combining import Concatenated
from mpidist.input.nodes import Form, GraphNode
from mpidist.input.sources import FileNames
from mpidist.input.steps import Cached, Mapped, Prefetched, Shuffled, Sliced
from tests.input.policy_helpers import (
    read,
    stream,
)

pytestmark = pytest.mark.one_rank


def kinds_of(node):
    """Return the classes of all the steps of a dataset, with the forms of their elements."""
    return {(type(node), node.form)}.union(*map(kinds_of, node.inputs))


def test_every_step_goes_on_alike_after_the_same_inputs(tmp_path):
    rows = Dataset.range(12).map(lambda x: x * 2).shuffle(seed=1).skip(1).prefetch(1).repeat(2)
    rows = rows.batch(3).take(5).shard(2, 0)
    items = stream(9).map(lambda x: x).filter(lambda x: x > 1).take_while(lambda x: x < 8)
    items = items.shuffle(4, seed=1).batch(2).prefetch(2).skip(1).enumerate()
    files = Dataset(FileNames(["0:3", "3:3"])).interleave(lambda path: Dataset.from_files([path], read)).batch(2)
    pairs = Dataset.zip(items, Dataset.from_files(["0:3", "3:3"], read))
    joined = Dataset.sample_from_datasets([Dataset.range(3).concatenate(Dataset.range(4)).cache(), Dataset.range(5)])
    kept = stream(9).concatenate(Dataset.range(4)).cache().padded_batch(2).unbatch().batch(2).cache(tmp_path / "kept")
    kept = Dataset(EvenBatches((kept._node,), 1))
    windows = Dataset.range(6).window(2).flat_map(lambda window: window)
    hint = Dataset.range(6).shard(SHARD_HINT, SHARD_HINT)

    def again(node):
        return node.with_inputs([again(before) for before in node.inputs])

    seen = set()
    for dataset in (rows, items, files, pairs, joined, kept, windows):
        twin = Dataset(again(dataset._node))
        assert repr(twin) == repr(dataset)
        assert twin.cardinality() == dataset.cardinality()
        assert twin._node.batch_size() == dataset._node.batch_size()
        assert twin._node.read_ahead == dataset._node.read_ahead
        for one, other in zip(dataset, twin, strict=True):
            assert str(one) == str(other)
        seen |= kinds_of(dataset._node)
    assert repr(Dataset(again(hint._node))) == repr(hint)
    seen |= kinds_of(hint._node)

    def subclasses(kind):
        return {kind}.union(*map(subclasses, kind.__subclasses__()))

    modules = [f"mpidist.input.{name}" for name in ("steps", "combining", "batching", "caching")]
    modules.append("mpidist.compat.v1_strategies")
    steps = {kind for kind in subclasses(GraphNode) if kind.__module__ in modules and not inspect.isabstract(kind)}
    assert {kind for kind, _ in seen} >= steps
    for kind in (Mapped, Shuffled, Sliced, Prefetched, Cached, Concatenated):
        forms = {form for one, form in seen if one is kind}
        assert Form.ROWS in forms
        assert forms != {Form.ROWS}


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
