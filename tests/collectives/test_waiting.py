"""How a wait for a request of MPI treats others that need the core."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from mpidist.collectives.mpi import waiting

pytestmark = pytest.mark.one_rank


class _Request:
    """Is complete at the third look."""

    def __init__(self) -> None:
        self.looks = 0

    def Test(self) -> bool:  # noqa: N802 - the name of mpi4py
        self.looks += 1
        return self.looks == 3


@pytest.fixture
def fresh() -> Iterator[None]:
    """Forget what this process knows of its cores, before and after."""
    waiting.looks_before_yield.cache_clear()
    yield
    waiting.looks_before_yield.cache_clear()


@pytest.mark.parametrize("is_short", [False, True])
def test_the_core_is_given_away_at_once_where_cores_are_short(fresh, monkeypatch, is_short: bool) -> None:
    given_away = []
    monkeypatch.setattr(waiting, "cores_are_short", lambda: is_short)
    monkeypatch.setattr(os, "sched_yield", lambda: given_away.append(True))
    assert len(list(waiting.until_done(_Request()))) == 2
    assert len(given_away) == (2 if is_short else 0)
