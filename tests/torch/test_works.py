"""Works of torch.distributed, beside the collectives that they stand for."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")

from mpidist.torch.works import StartedWork

pytestmark = [pytest.mark.torch, pytest.mark.one_rank]


class EndsJustBehindTheLimit:
    """A work that another thread moves on to its end when the wait for it has just been given up."""

    is_done = False

    def wait(self, timeout: float | None = None) -> str:
        if timeout is None:
            return "the result"
        self.is_done = True
        raise TimeoutError("is not done")


def test_a_wait_that_is_given_up_is_no_error_of_the_collective() -> None:
    taken: list[Any] = []
    work: Any = EndsJustBehindTheLimit()
    started = StartedWork(work, taken.append, [], threading.RLock(), None)
    assert started.wait(timedelta(seconds=1))
    assert started.exception() is None
    assert taken == ["the result"]
