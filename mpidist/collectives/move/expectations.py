"""Compares how many rows each rank gives with how many the others expect.

The number of a rank is made of the rows that it gives and of those that it expects. The numbers of all ranks add up to
zero where both are the same, and otherwise to another one, but for a chance of one in 2**60: weights keep rows too many
from making up for rows too few.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

from mpidist.collectives.mpi.objects import gather_objects
from mpidist.collectives.mpi.waiting import Comm, Steps
from mpidist.core.callsite import user_call_site
from mpidist.core.errors import MismatchError

_BITS = 62
# Of the pairs of ranks in a message.
_MOST_PAIRS = 4
# Rows for each rank, rows from each rank, and the line of the program.
_Told = tuple[list[int], list[int], str]


def number_of(rank: int, given: Sequence[int], expected: Sequence[int]) -> int:
    """Return the number of a rank.

    Args:
        rank: Which.
        given: How many rows it gives to each rank.
        expected: How many it expects from each.

    >>> fits([number_of(0, [1, 2], [1, 3]), number_of(1, [3, 4], [2, 4])])
    True
    >>> fits([number_of(0, [1, 2], [2, 2]), number_of(1, [3, 4], [2, 4])])
    False
    """
    from_each, to_each = _weights(len(given))
    gives = sum([rows * weight for rows, weight in zip(given, to_each, strict=True)])
    expects = sum([rows * weight for rows, weight in zip(expected, from_each, strict=True)])
    return (from_each[rank] * gives - to_each[rank] * expects) % (1 << _BITS)


def fits(numbers: Sequence[int]) -> bool:
    """Return whether all ranks expect the rows that they get."""
    return sum(numbers) % (1 << _BITS) == 0


@lru_cache(maxsize=64)
def _weights(size: int) -> tuple[list[int], list[int]]:
    # The same on all ranks.
    bits = random.Random(size)
    from_each, to_each = ([bits.getrandbits(_BITS) | 1 for _ in range(size)] for _ in range(2))
    return from_each, to_each


def raise_mismatch(comm: Comm, given: list[int], expected: list[int], call_site: str | None) -> Steps[None]:
    """Raise the error that names who expects something else (collective).

    Raises:
        MismatchError: Always.
    """
    everyone: list[_Told] = yield from gather_objects(comm, (given, expected, call_site or user_call_site()))
    told = enumerate(everyone)
    texts = {rank: f"all_to_all that gives {gives} rows and expects {expects}" for rank, (gives, expects, _) in told}
    raise MismatchError(_message(everyone), texts)


def _message(everyone: list[_Told]) -> str:
    """Return which pairs of ranks do not fit, with their lines.

    >>> print(_message([([1, 2], [1, 1], "a.py:3 (main)"), ([1, 0], [3, 0], "b.py:4 (main)")]))
    the parts of all_to_all do not fit; expected each rank to give another one as many rows as that one expects:
      rank 0 gives rank 1 2 rows
          at a.py:3 (main)
      rank 1 expects 3 from it
          at b.py:4 (main)
    """
    pairs = []
    for rank, (_, expected, site) in enumerate(everyone):
        for other, (given, _, other_site) in enumerate(everyone):
            if given[rank] != expected[other]:
                pairs.append(
                    f"  rank {other} gives rank {rank} {given[rank]} rows\n      at {other_site}\n"
                    f"  rank {rank} expects {expected[other]} from it\n      at {site}"
                )
    more = f"\n  and {len(pairs) - _MOST_PAIRS} more such pairs" if len(pairs) > _MOST_PAIRS else ""
    return (
        "the parts of all_to_all do not fit; expected each rank to give another one as many rows as that one expects:\n"
        + "\n".join(pairs[:_MOST_PAIRS])
        + more
    )
