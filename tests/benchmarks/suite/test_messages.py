"""The counts of messages that the page on scaling draws, against what is known of each kind."""

from __future__ import annotations

import pytest

from benchmarks.cases.messages import Counted, kinds

pytestmark = pytest.mark.one_rank

KNOWN = {
    "all_reduce, ring": Counted(30, 30, 2),
    "all_reduce, pairwise": Counted(30, 2, 15),
    "all_reduce, leaders, small": Counted(4, 4, 4),
    "all_reduce, leaders, larger": Counted(8, 8, 4),
    "all_gather": Counted(15, 15, 2),
    "all_to_all": Counted(15, 1, 15),
    "reduce_scatter": Counted(15, 1, 15),
}


@pytest.mark.parametrize("name", KNOWN)
def test_on_sixteen_nodes(name: str) -> None:
    assert kinds()[name](16) == KNOWN[name]


@pytest.mark.parametrize("nodes", [33, 128])
def test_doubling_takes_twice_as_many_rounds_as_there_are_doublings(nodes: int) -> None:
    counted = kinds()["all_reduce, halving_doubling"](nodes)
    assert counted.rounds == counted.messages == 2 * (nodes - 1).bit_length()
    assert counted.peers <= counted.messages
