"""The seed of the process, from which random sources without a seed derive their own."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

# Separates pipelines from generators, whose seeds also start from the process's seed.
_PIPELINES = 2


class _State:
    seed: int | None = None
    numbers: itertools.count[int] = itertools.count()


def set_seed(seed: int) -> None:
    """Set the seed of the process, and restart all sequences drawn from it."""
    seed = operator.index(seed)
    if seed < 0:
        raise ValueError(f"seed is {seed}; expected 0 or more, for example set_seed(1)")
    _State.seed = seed
    _State.numbers = itertools.count()


def get_seed() -> int | None:
    """Return the seed. None if it was not set."""
    return _State.seed


def next_seed() -> int | None:
    """Return a seed for the next random source, equal on ranks with equal calls. None if no seed was set."""
    if _State.seed is None:
        return None
    sequence = np.random.SeedSequence([_State.seed, _PIPELINES, next(_State.numbers)])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the sequence of seeds after the block."""
    kept = copy.copy(_State.numbers)
    try:
        yield
    finally:
        _State.numbers = kept
