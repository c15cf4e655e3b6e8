"""The progress thread: it leaves the core to a program that computes, and takes it while the program waits."""

from __future__ import annotations

import time

import numpy as np
import pytest

from mpidist.collectives.channel.progress import Progress

pytestmark = pytest.mark.one_rank
SECONDS = 0.05


def looks_while(progress: Progress, compute: bool) -> int:
    """Return how often a new work is moved on meanwhile."""
    looks, array = [0], np.ones(1 << 16)

    def move() -> object:
        looks[0] += 1
        return looks

    progress.watch(move)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if compute:
            np.sqrt(array, out=array)
        else:
            time.sleep(SECONDS)
    progress.forget(move)
    return looks[0]


def test_looks_are_rare_only_while_the_program_computes() -> None:
    progress = Progress()
    assert looks_while(progress, compute=False) > 2 * looks_while(progress, compute=True)
