"""The seed of the process. Random sources that were given no seed derive their own from it."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

# Keeps numbers for pipelines apart from those of generators, which also start from the seed.
_PIPELINES = 2


class _State:
    seed: int | None = None
    numbers: itertools.count[int] = itertools.count()


def set_seed(seed: int) -> None:
    """Make ``seed`` the seed of the process and start all sequences drawn from it anew.

    Raises:
        TypeError: Not a whole number.
        ValueError: Negative.
    """
    seed = operator.index(seed)
    if seed < 0:
        raise ValueError(f"seed is {seed}; expected 0 or more, for example set_seed(1)")
    _State.seed = seed
    _State.numbers = itertools.count()


def get_seed() -> int | None:
    """Return the seed, None where none was set."""
    return _State.seed


def next_seed() -> int | None:
    """Return a new seed for a random source that was given none, or None.

    None where no seed was set. Ranks that make the same calls get the same seeds.

    >>> set_seed(1)
    >>> next_seed() == next_seed()
    False
    """
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
