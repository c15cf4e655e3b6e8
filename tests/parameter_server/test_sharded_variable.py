"""ShardedVariable against NumPy on the one array that it stands for: reading, indexing, assigning, scattering."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from mpidist import IndexedSlices, Variable
from mpidist.parameter_server import ShardedVariable
from tests.parameter_server.shards import Touched, sharded

pytestmark = pytest.mark.one_rank

_SIZES = st.lists(st.integers(0, 4), min_size=1, max_size=4)
_SCATTERS = ["add", "sub", "mul", "div", "min", "max", "update"]


def numbers(*shape: int) -> Any:
    return np.arange(np.prod(shape), dtype=np.float64).reshape(shape) + 1


def equal(actual: Any, expected: Any) -> None:
    assert (np.shape(actual), np.asarray(actual).dtype) == (np.shape(expected), np.asarray(expected).dtype)
    np.testing.assert_array_equal(actual, expected)


# Attributes, the whole ----------------------------------------------------------------------------------------


def test_what_it_is() -> None:
    v = sharded(np.zeros((7, 2), np.float32), 3)
    assert (v.shape, v.dtype, v.ndim, v.size, len(v), v.name) == ((7, 2), np.float32, 2, 14, 7, "table")
    assert [shard.shape for shard in v.variables] == [(3, 2), (2, 2), (2, 2)]
    assert v.trainable
    assert not sharded(np.zeros(3), 2, trainable=False).trainable
    assert repr(v) == "<ShardedVariable 'table' shape=(7, 2) dtype=float32 in 3 shards>"
    assert ShardedVariable([Variable([1.0])]).name == "ShardedVariable"
    v.variables.clear()
    assert len(v.variables) == 3


def test_it_reads_as_one_array() -> None:
    whole = numbers(5, 2)
    v = sharded(whole, 2)
    for read in (np.asarray(v), v.numpy(), v.value(), v.read_value(), np.array(v), v + 0, v[...]):
        equal(read, whole)
    equal(v @ np.ones(2), whole.sum(axis=1))
    equal(2 * v - v, whole)
    equal(np.sum(v, axis=0), whole.sum(axis=0))
    equal(np.concatenate([v, v]), np.concatenate([whole, whole]))
    equal(list(v)[3], whole[3])
    assert v in {v}
    with pytest.raises(TypeError, match=r"use assign\(\)"):
        np.add(v, 1, out=v)


@pytest.mark.parametrize("shards", [1, 2, [5, 0]])
def test_what_was_read_is_a_copy_or_not_writable(shards: Any) -> None:
    v = sharded(numbers(5), shards)
    for own in (v.numpy(), v.value(), v.sparse_read([0]) if shards != [5, 0] else v.value()):
        own[...] = 99
    for read in (np.asarray(v), v[1:4], v[...]):
        with pytest.raises(ValueError, match="read-only"):
            read[...] = 99
    equal(v.numpy(), numbers(5))
    before = v.value()
    v.assign(numbers(5) * 2)
    equal(before, numbers(5))


def test_shards_that_do_not_belong_together() -> None:
    for wrong in ([], (), Variable([1.0]), None, [Variable([1.0]), np.ones(1)]):
        with pytest.raises(TypeError, match=r"expected a list of one or more mpidist\.Variable"):
            ShardedVariable(wrong)  # type: ignore[arg-type]
    for wrong, match in [
        ([Variable([1.0]), Variable([1])], r"dtype int64 and rows of shape \(\)"),
        ([Variable([1.0]), Variable([[1.0]])], r"rows of shape \(1,\)"),
        ([Variable(1.0)], "a number, without rows"),
    ]:
        with pytest.raises(ValueError, match=match):
            ShardedVariable(wrong)


def test_a_copy_is_independent() -> None:
    v = sharded(numbers(5), 2)
    twin = copy.deepcopy({"a": v, "b": v})
    assert twin["a"] is twin["b"]
    assert twin["a"].variables[0].whole is twin["a"]
    twin["a"].assign_add(np.ones(5))
    equal(v.numpy(), numbers(5))
    equal(twin["b"].numpy(), numbers(5) + 1)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(v)


# Indexing -----------------------------------------------------------------------------------------------------


@st.composite
def arrays_and_keys(draw: Any) -> tuple[Any, list[int], Any]:
    sizes = draw(_SIZES)
    shape = (sum(sizes), *draw(st.lists(st.integers(0, 3), max_size=2)))
    whole = numbers(*shape)
    axis_kinds = [st.just(Ellipsis), st.just(None), st.just(slice(None)), npst.basic_indices(shape, allow_newaxis=True)]
    kinds = [npst.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True)]
    if shape[0]:
        positions = st.integers(-shape[0], shape[0] - 1)
        kinds += [
            st.lists(positions, max_size=6),
            npst.arrays(np.int8, npst.array_shapes(max_dims=2, max_side=3), elements=positions),
        ]
        if len(shape) > 1 and shape[1]:
            columns = st.integers(-shape[1], shape[1] - 1)
            rows = st.lists(positions, min_size=2, max_size=2)
            pair = st.tuples(rows, st.lists(columns, min_size=2, max_size=2))
            kinds += [pair, st.tuples(rows, columns), st.tuples(st.slices(shape[0]), columns)]
            kinds += [st.tuples(rows, st.none(), columns), st.tuples(st.none(), rows), st.tuples(positions, columns)]
    masks = [npst.arrays(bool, shape[:count]) for count in range(len(shape) + 1)]
    kinds += [*masks, st.tuples(masks[1], st.just(Ellipsis)), st.tuples(st.none(), masks[1]), *axis_kinds]
    return whole, sizes, draw(st.one_of(kinds))


@hypothesis.settings(max_examples=400)
@hypothesis.given(arrays_and_keys())
def test_any_index(case: tuple[Any, list[int], Any]) -> None:
    whole, sizes, key = case
    v = sharded(whole, sizes)
    reason = ""
    try:
        expected = whole[key]
    except IndexError as error:
        reason = str(error)
    if reason:
        with pytest.raises(IndexError, match=re.escape(reason)):
            v[key]
    else:
        equal(v[key], expected)


@pytest.mark.parametrize(
    "key",
    [9, -10, [0, 9], slice(None, None, 0), (0, 0, 0), (..., ...), "a", 1.5, [True, False], np.ones((9, 3), bool), {}],
    ids=repr,
)
def test_an_index_that_does_not_fit(key: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    v = sharded(numbers(9, 2), 4)
    touched = Touched(monkeypatch, v)
    with pytest.raises((IndexError, TypeError, ValueError)):
        v[key]
    assert touched.reads == {}


def test_variables_as_indices() -> None:
    v = sharded(numbers(9, 2), 4)
    equal(v[Variable([8, 0])], numbers(9, 2)[[8, 0]])
    equal(v[Variable(4), 1], numbers(9, 2)[4, 1])
    equal(v[np.int64(4)], numbers(9, 2)[4])
    equal(v[np.array(4), np.True_], numbers(9, 2)[np.array(4), np.True_])


@pytest.mark.parametrize(
    ("key", "reads"),
    [
        (0, {0: [0]}),
        (-1, {2: [3]}),
        (4, {1: [0]}),  # the first row of a shard is its own, not the last one's
        ((slice(3, 8), 0), {0: [3], 1: "all"}),
        (slice(0, 12, 5), {0: [0], 1: [1], 2: [2]}),
        (slice(None, 6, -1), {1: [3], 2: "all"}),
        (slice(5, 5), {}),
        ([11, 4, 11], {1: [0], 2: [3]}),
        (np.arange(12) == 6, {1: [2]}),
        ((None, 9), {2: [1]}),
        ((..., 9, slice(None)), {2: [1]}),
    ],
    ids=repr,
)
def test_only_what_is_needed_is_read(key: Any, reads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = numbers(12, 2)
    v = sharded(whole, 3)
    touched = Touched(monkeypatch, v)
    read = v[key]
    assert touched.reads == reads
    monkeypatch.undo()
    equal(read, whole[key])


# Rows ---------------------------------------------------------------------------------------------------------


@hypothesis.given(count=st.integers(1, 12), shards=st.integers(1, 5), data=st.data())
def test_sparse_read(count: int, shards: int, data: st.DataObject) -> None:
    whole = numbers(count, 2)
    indices = data.draw(
        npst.arrays(
            data.draw(st.sampled_from([np.int64, np.int8, np.uint16])),
            npst.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=6),
            elements=st.integers(0, count - 1),
        )
    )
    v = sharded(whole, shards)
    equal(v.sparse_read(indices), np.take(whole, indices, axis=0))
    equal(v.gather_nd(indices[..., None]), whole[indices])
    equal(v.gather_nd(np.stack([indices, indices * 0 + 1], axis=-1)), whole[indices, 1])


def test_sparse_read_fetches_each_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    v = sharded(numbers(9), 3)
    touched = Touched(monkeypatch, v)
    equal(v.sparse_read([8, 1, 8, 8, -8, 0]), numbers(9)[[8, 1, 8, 8, 1, 0]])
    assert touched.reads == {0: [0, 1], 2: [2]}
    touched.reads.clear()
    equal(v.sparse_read([]), np.zeros(0))
    equal(v.sparse_read(np.zeros((2, 0), int)), np.zeros((2, 0)))
    assert touched.reads == {}
    for outside in ([9], [-10]):
        with pytest.raises(IndexError, match="out of bounds"):
            v.sparse_read(outside)
    with pytest.raises(TypeError, match="expected integers"):
        v.sparse_read([0.5])
    assert touched.reads == {}


@pytest.mark.parametrize("name", _SCATTERS)
@hypothesis.given(count=st.integers(1, 9), shards=st.integers(1, 4), data=st.data())
def test_scatter_is_that_of_one_variable(name: str, count: int, shards: int, data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, count - 1), max_size=8))
    dtype = data.draw(st.sampled_from([np.float64, np.int64]))
    whole = (numbers(count, 2) * 6).astype(dtype)
    rows = np.random.default_rng(data.draw(st.integers(0, 99))).integers(1, 7, (len(indices), 2)).astype(dtype)
    v, plain = sharded(whole, shards), Variable(whole)
    for variable in (v, plain):
        assert getattr(variable, f"scatter_{name}")(IndexedSlices(rows, indices)) is variable
    equal(v.numpy(), plain.numpy())
    expected = whole.copy()
    by_numpy = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum}
    if name in by_numpy:
        by_numpy[name].at(expected, indices, rows)
        equal(v.numpy(), expected)


def test_scatter_touches_only_shards_with_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    v = sharded(numbers(9), 3)
    touched = Touched(monkeypatch, v)
    v.scatter_update(IndexedSlices([1.0, 2.0, 3.0, 4.0], [8, 0, 8, 2], dense_shape=(9,)))
    assert touched.writes == {0: [0, 2], 2: [2, 2]}
    monkeypatch.undo()
    equal(v.numpy(), [2.0, 2.0, 4.0, 4.0, 5.0, 6.0, 7.0, 8.0, 3.0])
    with pytest.raises(ValueError, match="expected 0 to 8"):
        v.scatter_add(IndexedSlices([1.0, 1.0], [0, 9]))
    with pytest.raises(ValueError, match=r"rows of shape \(2,\)"):
        v.scatter_add(IndexedSlices([[1.0, 1.0]], [0]))
    with pytest.raises(TypeError, match=r"into variable 'table'; expected mpidist\.IndexedSlices"):
        v.scatter_add(np.ones(9))
    equal(v.numpy(), [2.0, 2.0, 4.0, 4.0, 5.0, 6.0, 7.0, 8.0, 3.0])


@pytest.mark.parametrize("sizes", [[2, 3], [4, 2], [0, 1]])
def test_rows_need_the_div_layout(sizes: list[int]) -> None:
    v = sharded(numbers(sum(sizes)), sizes)
    for name in _SCATTERS:
        with pytest.raises(NotImplementedError, match=f"scatter_{name} on variable 'table'.*larger shards first"):
            getattr(v, f"scatter_{name}")(IndexedSlices([1.0], [0]))
    with pytest.raises(NotImplementedError, match="sparse_read on variable 'table'"):
        v.sparse_read([0])
    equal(v[[0, -1]], numbers(sum(sizes))[[0, -1]])  # indexing takes any shards


# Assigning ----------------------------------------------------------------------------------------------------


@hypothesis.given(sizes=_SIZES, data=st.data())
def test_assigning(sizes: list[int], data: st.DataObject) -> None:
    whole = numbers(sum(sizes), 2)
    v = sharded(whole * 0, sizes)
    assert v.assign(whole) is v
    assert v.assign_add(whole * 2).assign_sub(whole) is v
    equal(v.numpy(), whole * 2)
    assert [shard.shape for shard in v.variables] == [(size, 2) for size in sizes]
    v.assign(v * 2)
    v.assign(sharded(whole, [sum(sizes)]))
    equal(v.numpy(), whole)
    v.assign_add(whole.astype(int).tolist() if len(whole) else whole)
    equal(v.numpy(), 2 * whole)


def test_what_cannot_be_assigned_changes_no_shard() -> None:
    v = sharded(np.zeros(5, np.float32), 2)
    for value, error, match in [
        (np.ones(4, np.float32), ValueError, r"shape \(4,\) was assigned to variable 'table' of shape \(5,\)"),
        (1.0, ValueError, r"shape \(\)"),
        (np.ones(5), TypeError, "dtype float64"),
    ]:
        with pytest.raises(error, match=match):
            v.assign_add(value)
    equal(v.numpy(), np.zeros(5, np.float32))
