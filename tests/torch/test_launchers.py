"""The entry point of torch knows the launchers without mpidist."""

from __future__ import annotations

import pytest

from mpidist.topology.environments import LAUNCHERS
from mpidist_torch_entry import RANK_VARIABLES

pytestmark = pytest.mark.one_rank


@pytest.mark.parametrize("name", LAUNCHERS)
def test_each_launcher_is_known_by_a_variable(name: str) -> None:
    row = LAUNCHERS[name]
    assert {row.rank, row.size} & {*RANK_VARIABLES}
