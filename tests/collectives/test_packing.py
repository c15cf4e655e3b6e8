"""The packing rule, and flat buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.collectives.channel.operation import signature_text
from mpidist.collectives.node import packing
from mpidist.collectives.node.memory import Pool
from mpidist.collectives.node.packing import MOST_PIECES, Pack, copies_of_overlapping, group_by_size, overlaps

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


@given(st.lists(st.integers(0, 100)), st.integers(0, 300))
def test_packs_keep_the_order(sizes: list[int], bytes_per_pack: int) -> None:
    packs = group_by_size(sizes, bytes_per_pack)
    assert [i for pack in packs for i in pack] == list(range(len(sizes)))
    for pack in packs[:-1]:
        assert sum(sizes[i] for i in pack) > bytes_per_pack
        assert sum(sizes[i] for i in pack[:-1]) <= bytes_per_pack


def test_contiguous_arrays_are_not_copied() -> None:
    arrays = [np.ones((2, 3)), np.ones(40_000), np.ones((200, 200))]
    out = [np.empty_like(array) for array in arrays]
    assert np.shares_memory(Pack([0], [(2, 3)], F8, F8, F8).inputs(arrays, Pool())[0], arrays[0])
    pack = Pack([2, 1, 0], [a.shape for a in arrays], F8, F8, F8)
    pieces, targets = pack.inputs(arrays, Pool()), pack.targets(out, Pool())
    assert pack.counts == tuple(piece.size for piece in pieces) == tuple(target.size for target in targets)
    for index, position in ((2, 0), (1, 1)):
        assert np.shares_memory(pieces[position], arrays[index])
        assert np.shares_memory(targets[position], out[index])


def test_more_arrays_than_one_call_takes() -> None:
    shapes = [(8192,)] * (MOST_PIECES + 1)
    assert Pack(range(len(shapes)), shapes, F8, F8, F8).counts == (8192 * len(shapes),)


def test_a_signature_reads_like_its_arrays() -> None:
    assert signature_text(()) == "nothing"
    assert signature_text((((), F8), ((3,), F4), ((3,), F4))) == "float64(), 2 x float32(3,)"


def test_nested_targets_are_compared_to_their_end() -> None:
    whole = np.zeros(10)
    behind_the_inner, apart = whole[5:6], np.zeros(1)
    # The inner one begins later and ends earlier than the outer one.
    taken = copies_of_overlapping([behind_the_inner, apart], [whole[:8], whole[1:2]], Pool())
    assert [one is other for one, other in zip(taken, [behind_the_inner, apart], strict=True)] == [False, True]


def test_memory_of_one_owner_is_compared() -> None:
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


@pytest.mark.parametrize("make", [separate, of_two_blocks, in_place])
def test_only_arrays_in_place_are_copied(make: Callable[[int], Any]) -> None:
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
