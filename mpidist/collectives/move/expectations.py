"""Compares how many rows each rank gives with how many the others expect.

The number of a rank is made of the rows that it gives and of those that it expects. The numbers of all ranks add up to
zero where both are the same, and otherwise to another one, but for a chance of one in 2**60: weights keep rows too many
from making up for rows too few.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

from mpidist.collectives.mpi.gathering import exchange_lengths
from mpidist.collectives.mpi.objects import gather_objects
from mpidist.collectives.mpi.waiting import Comm, Steps
from mpidist.core.errors import MismatchError
from mpidist.core.text import cut_text, user_call_site

_BITS = 62
# Of the pairs of ranks in a message.
_MOST_PAIRS = 4
# Of the rows of a rank as text, for each error.
_LONGEST_TEXT = 120
# The first ranks that give other rows than a rank expects, with both numbers; how many there are; its line.
_Told = tuple[list[tuple[int, int, int]], int, str]


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
    # A rank learns its own rows alone: those of all would be as many as pairs of ranks.
    got, _ = yield from exchange_lengths(comm, given, 0)
    wrong = [(rank, gives, expects) for rank, (gives, expects) in enumerate(zip(got, expected, strict=True))]
    wrong = [each for each in wrong if each[1] != each[2]]
    told: _Told = (wrong[:_MOST_PAIRS], len(wrong), call_site or user_call_site())
    gives, expects = (cut_text(str(rows), _LONGEST_TEXT) for rows in (given, expected))
    everyone = yield from gather_objects(comm, (told, f"all_to_all that gives {gives} rows and expects {expects}"))
    texts = {rank: text for rank, (_, text) in enumerate(everyone)}
    raise MismatchError(_message([told for told, _ in everyone]), texts)


def _message(everyone: list[_Told]) -> str:
    """Return which pairs of ranks do not fit, with their lines.

    >>> print(_message([([], 0, "a.py:3 (main)"), ([(0, 2, 3)], 1, "b.py:4 (main)")]))
    the parts of all_to_all do not fit; expected each rank to give another one as many rows as that one expects:
      rank 0 gives rank 1 2 rows
          at a.py:3 (main)
      rank 1 expects 3 from it
          at b.py:4 (main)
    """
    pairs = [
        f"  rank {other} gives rank {rank} {gives} rows\n      at {everyone[other][2]}\n"
        f"  rank {rank} expects {expects} from it\n      at {site}"
        for rank, (wrong, _, site) in enumerate(everyone)
        for other, gives, expects in wrong
    ]
    count = sum(count for _, count, _ in everyone)
    more = f"\n  and {count - _MOST_PAIRS} more such pairs" if count > _MOST_PAIRS else ""
    return (
        "the parts of all_to_all do not fit; expected each rank to give another one as many rows as that one expects:\n"
        + "\n".join(pairs[:_MOST_PAIRS])
        + more
    )
