"""Errors about calls that the ranks did not make alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from mpidist.collectives.mpi.exchange import exchange_words, gather_objects
from mpidist.collectives.mpi.waiting import Comm, Steps
from mpidist.core.errors import MORE_TIME, MismatchError
from mpidist.core.text import cut_text, group_lines, groups_of, numbered_ranks, user_call_site


@dataclass(frozen=True)
class Advice:
    """Advice for the errors of a channel. It fits the library that the program uses.

    Attributes:
        calls: Sentences about making the same calls on all ranks.
        time: Settings that allow a call more time.
    """

    calls: str
    time: str = MORE_TIME


# Most often the call is meant to print or to save, and stands under `if rank == 0:`.
FOR_COMMUNICATORS = Advice(
    "Make this call on every rank, even if only one rank needs the result. Put only the printing under "
    "`if mpidist.rank() == 0:`."
)
# Besides rank 0, at most this many ranks print a traceback, each for another call.
_MOST_PRINTED = 4
# Kind of a rank's message ("plan" or a notice), its text, and the line of its program.
Told = tuple[str, str, str]


def mismatch_text(everyone: Sequence[Told], advice: Advice = FOR_COMMUNICATORS) -> str:
    """Return the message about different calls, outliers first.

    >>> print(mismatch_text([("plan", "barrier", "a.py:3")] * 9 + [("plan", "all_reduce SUM", "a.py:3")]))
    the ranks made different calls at the same point; expected the same operation, shapes, dtypes, structure and \
options on every rank, in the same order:
      rank 9: all_reduce SUM
          at a.py:3
      ranks 0-8: barrier
          at a.py:3
    """
    groups = groups_of((rank, (text, site)) for rank, (_, text, site) in enumerate(everyone))
    lines = group_lines(groups, lambda call, ranks: (f"  {numbered_ranks(ranks)}: ", call[0], f"\n      at {call[1]}"))
    # If all ranks are at one line, only their arguments differ.
    remedy = f"\n{advice.calls}" if len({site for (_, site), _ in groups}) > 1 else ""
    return (
        "the ranks made different calls at the same point; expected the same operation, shapes, dtypes, structure "
        "and options on every rank, in the same order:\n" + "\n".join(lines) + remedy
    )


def printing_ranks(everyone: Sequence[Told]) -> set[int]:
    """Return the ranks that print the error if the program does not catch it.

    For different calls: rank 0, and one rank of each of the rarest calls. For notices: the first rank with a call.

    >>> sorted(printing_ranks([("plan", "barrier", "a.py:3")] * 9 + [("plan", "all_reduce SUM", "a.py:3")]))
    [0, 9]
    >>> printing_ranks([("failed", "has failed", "a.py:3")] + [("plan", "barrier", "a.py:3")] * 9)
    {1}
    """
    calls = [(rank, (text, site)) for rank, (kind, text, site) in enumerate(everyone) if kind == "plan"]
    if len(calls) < len(everyone):
        return {rank for rank, _ in calls[:1]}
    return {0, *(ranks[0] for _, ranks in groups_of(calls)[:_MOST_PRINTED])}


def news_text(everyone: Sequence[Told]) -> str:
    """Return the notices of the ranks that make no call.

    >>> news_text([("plan", "barrier", "a.py:3")] + [("left", "has left the program", "its end")] * 2)
    'ranks 1-2: has left the program (at its end)'
    """
    news = ((rank, (text, site)) for rank, (kind, text, site) in enumerate(everyone) if kind != "plan")
    lines = group_lines(
        groups_of(news),
        lambda told, ranks: (f"{numbered_ranks(ranks)}{':' * (len(ranks) > 1)} ", told[0], f" (at {told[1]})"),
    )
    return "; ".join(lines)


# Expected rows of all_to_all -------------------------------------------------------------------------------------

# The checksums of all ranks add up to zero if every rank sends the rows that the others expect. Otherwise they do not,
# except for a chance of one in 2**60. Random weights keep rows too many from balancing rows too few.
_BITS = 62
_MOST_PAIRS, _LONGEST_TEXT = 4, 120
# The first ranks that send other rows than expected (with both numbers), the number of such ranks, and the line.
_Rows = tuple[list[tuple[int, int, int]], int, str]


def rows_checksum(rank: int, sent: Sequence[int], expected: Sequence[int]) -> int:
    """Return the checksum of a rank's numbers of rows to and from each rank.

    >>> checksums_fit([rows_checksum(0, [1, 2], [1, 3]), rows_checksum(1, [3, 4], [2, 4])])
    True
    >>> checksums_fit([rows_checksum(0, [1, 2], [2, 2]), rows_checksum(1, [3, 4], [2, 4])])
    False
    """
    from_each, to_each = _weights(len(sent))
    sends = sum([rows * weight for rows, weight in zip(sent, to_each, strict=True)])
    expects = sum([rows * weight for rows, weight in zip(expected, from_each, strict=True)])
    return (from_each[rank] * sends - to_each[rank] * expects) % (1 << _BITS)


def checksums_fit(checksums: Sequence[int]) -> bool:
    """Return whether all ranks get the rows that they expect."""
    return sum(checksums) % (1 << _BITS) == 0


@lru_cache(maxsize=64)
def _weights(size: int) -> tuple[list[int], list[int]]:
    import random

    bits = random.Random(size)  # equal on all ranks
    from_each, to_each = ([bits.getrandbits(_BITS) | 1 for _ in range(size)] for _ in range(2))
    return from_each, to_each


def raise_rows_mismatch(comm: Comm, sent: list[int], expected: list[int], call_site: str | None) -> Steps[None]:
    """Raise the MismatchError that names the pairs of ranks that differ (collective)."""
    call_site = call_site or user_call_site()  # before other threads may continue the steps
    # Each rank compares its own rows only, because there are as many as pairs of ranks.
    (got,) = yield from exchange_words(comm, [sent])
    wrong = [(rank, sends, expects) for rank, (sends, expects) in enumerate(zip(got, expected, strict=True))]
    wrong = [each for each in wrong if each[1] != each[2]]
    told: _Rows = (wrong[:_MOST_PAIRS], len(wrong), call_site)
    sends, expects = (cut_text(str(rows), _LONGEST_TEXT) for rows in (sent, expected))
    everyone = yield from gather_objects(comm, (told, f"all_to_all that gives {sends} rows and expects {expects}"))
    texts = {rank: text for rank, (_, text) in enumerate(everyone)}
    raise MismatchError(_rows_message([told for told, _ in everyone]), texts)


def _rows_message(everyone: list[_Rows]) -> str:
    """Return the message about rows that differ.

    >>> print(_rows_message([([], 0, "a.py:3 (main)"), ([(0, 2, 3)], 1, "b.py:4 (main)")]))
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
