"""The packing rule, and flat buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.collectives.channel.operation import signature_text
from mpidist.collectives.mpi.mpi_types import chunks
from mpidist.collectives.node import packing
from mpidist.collectives.node.memory import Pool
from mpidist.collectives.node.packing import MOST_PIECES, Pack, copies_of_overlapping, group_by_size, overlaps
from tests.support.ranks.cores import needs_core

pytestmark = pytest.mark.one_rank

F4, F8 = np.dtype("f4"), np.dtype("f8")


@pytest.mark.parametrize(
    ("bytes_per_pack", "packs"),
    [
        (0, [[0, 1, 2, 3]]),
        (15, [[0], [1], [2], [3]]),
        (16, [[0, 1], [2, 3]]),
        (20, [[0, 1], [2, 3]]),
    ],
)
def test_a_pack_closes_once_it_exceeds_the_size(bytes_per_pack: int, packs: list[list[int]]) -> None:
    assert group_by_size([16, 16, 16, 16], bytes_per_pack) == packs


def test_no_arrays_make_no_pack() -> None:
    assert group_by_size([], 0) == []
    assert group_by_size([], 10) == []


@given(st.lists(st.integers(0, 100)), st.integers(0, 300))
def test_packs_keep_the_order_and_are_larger_than_asked_for(sizes: list[int], bytes_per_pack: int) -> None:
    packs = group_by_size(sizes, bytes_per_pack)
    assert [i for pack in packs for i in pack] == list(range(len(sizes)))
    for pack in packs[:-1]:
        assert sum(sizes[i] for i in pack) > bytes_per_pack
        assert sum(sizes[i] for i in pack[:-1]) <= bytes_per_pack


def test_arrays_in_one_piece_travel_from_and_to_where_they_are() -> None:
    arrays = [np.ones((2, 3)), np.ones(40_000), np.ones((200, 200))]
    out = [np.empty_like(array) for array in arrays]
    assert np.shares_memory(Pack([0], [(2, 3)], F8, F8, F8).inputs(arrays, Pool())[0], arrays[0])
    pack = Pack([2, 1, 0], [a.shape for a in arrays], F8, F8, F8)
    pieces, targets = pack.inputs(arrays, Pool()), pack.targets(out, Pool())
    assert pack.counts == tuple(piece.size for piece in pieces) == tuple(target.size for target in targets)
    for index, position in ((2, 0), (1, 1)):
        assert np.shares_memory(pieces[position], arrays[index])
        assert np.shares_memory(targets[position], out[index])


def test_small_arrays_travel_in_one_buffer() -> None:
    arrays = [np.arange(3.0), np.arange(50_000.0), np.arange(4.0)]
    pack = Pack([2, 1, 0], [a.shape for a in arrays], F8, F8, F8)
    assert pack.counts == (7, 50_000)
    pieces = pack.inputs(arrays, Pool())
    assert pieces[0].tolist() == [0, 1, 2, 3, 0, 1, 2]
    results: list[np.ndarray] = [pieces[0]] * 3
    pack.deliver([2 * piece for piece in pieces], results, are_given=False)
    for array, result in zip(arrays, results, strict=True):
        np.testing.assert_array_equal(result, 2 * array)


def test_what_is_given_is_written_where_it_does_not_lie_yet() -> None:
    results = [np.zeros(3), np.zeros((2, 50_000)).T, np.zeros(50_000)]
    pack = Pack([0, 1, 2], [a.shape for a in results], F8, F8, F8)
    assert pack.counts == (3, 100_000, 50_000)
    targets = pack.targets(results, Pool())
    for number, target in enumerate(targets):
        target[:] = number + 1
    given = list(results)
    pack.deliver(targets, results, are_given=True)
    assert all(one is other for one, other in zip(given, results, strict=True))
    assert [np.unique(result).tolist() for result in results] == [[1], [2], [3]]


def test_a_pack_casts_and_takes_any_memory_order() -> None:
    arrays = [np.arange(6, dtype="f4").reshape(2, 3).T, np.zeros((0, 4), "f4"), np.float32(7)[()] * np.ones((), "f4")]
    pack = Pack([2, 0, 1], [a.shape for a in arrays], F8, F4, F4)
    (flat,) = pack.inputs(arrays, Pool())
    assert flat.dtype == F8
    assert flat.tolist() == [7, 0, 3, 1, 4, 2, 5]
    results: list[np.ndarray] = [flat] * 3
    pack.deliver([flat], results, are_given=False)
    for array, result in zip(arrays, results, strict=True):
        assert result.dtype == F4
        np.testing.assert_array_equal(result, array)


def test_more_arrays_than_one_call_takes_travel_together() -> None:
    shapes = [(8192,)] * (MOST_PIECES + 1)
    assert Pack(range(len(shapes)), shapes, F8, F8, F8).counts == (8192 * len(shapes),)


@given(st.integers(0, 50), st.integers(1, 60))
def test_chunks_cover_a_count(count: int, limit: int) -> None:
    ranges = list(chunks(count, limit))
    assert [i for a, b in ranges for i in range(a, b)] == list(range(count))
    assert all(0 < b - a <= limit for a, b in ranges)


def test_a_signature_reads_like_its_arrays() -> None:
    assert signature_text(()) == "nothing"
    assert signature_text((((), F8), ((3,), F4), ((3,), F4))) == "float64(), 2 x float32(3,)"


def test_targets_that_contain_one_another_are_looked_at_to_their_end() -> None:
    whole = np.zeros(10)
    behind_the_inner, apart = whole[5:6], np.zeros(1)
    # The inner one begins later and ends earlier than the outer one.
    taken = copies_of_overlapping([behind_the_inner, apart], [whole[:8], whole[1:2]], Pool())
    assert [one is other for one, other in zip(taken, [behind_the_inner, apart], strict=True)] == [False, True]


def test_memory_of_one_owner_is_told_apart_by_addresses() -> None:
    whole = np.arange(10.0)
    backwards, of_bytes = whole[::-1][:3], np.frombuffer(whole, np.uint8)[:8]
    inputs = [whole[4:], whole[:2], backwards, of_bytes]
    taken = copies_of_overlapping(inputs, [whole[3:6], np.empty(1)], Pool())
    assert [one is other for one, other in zip(taken, inputs, strict=True)] == [False, True, True, True]
    for one, other in zip(taken, inputs, strict=True):
        np.testing.assert_array_equal(one, other)


def separate(count: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    return [np.ones(3) for _ in range(count)], [np.ones(3) for _ in range(count)]


def of_two_blocks(count: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    return list(np.ones((count, 3))), list(np.ones((count, 3)))


def in_place(count: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    values = list(np.ones((count, 3)))
    return values, values


@needs_core
@pytest.mark.parametrize("make", [separate, of_two_blocks])
def test_where_nothing_overlaps_the_core_says_so(make: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_bounds", lambda _: pytest.fail("an address was asked for"))
    values, out = make(5)
    taken = copies_of_overlapping(values, out, Pool())
    assert all(one is other for one, other in zip(taken, values, strict=True))


@pytest.mark.parametrize("make", [separate, of_two_blocks, in_place])
def test_arrays_in_place_are_copied_and_others_are_not(make: Callable[[int], Any]) -> None:
    values, out = make(5)
    taken = copies_of_overlapping(values, out, Pool())
    assert [one is other for one, other in zip(taken, values, strict=True)] == [make is not in_place] * 5


def test_addresses_are_asked_for_once_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = packing._bounds
    monkeypatch.setattr(packing, "_bounds", lambda arrays: (asked.extend(arrays), real(arrays))[1])
    whole = np.ones((100, 3))
    copies_of_overlapping(list(whole[:50]), list(whole[49:99]), Pool())
    assert len(asked) == 100


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=12), st.integers(0, 12))
def test_overlaps_are_counted_as_numpy_finds_them(cuts: list[tuple[int, int, bool]], first: int) -> None:
    whole = np.zeros(10)
    parts = [whole[min(a, b) : max(a, b)][:: -1 if back else 1] for a, b, back in cuts]
    arrays, others = parts[:first], parts[first:]
    assert overlaps(arrays, others) == [sum(np.may_share_memory(one, other) for other in others) for one in arrays]
