"""Texts of errors about calls that ranks did not make alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpidist.core.errors import MORE_TIME
from mpidist.core.text import group_lines, groups_of, numbered_ranks


@dataclass(frozen=True)
class Advice:
    """Advice for the errors of a channel. It fits the library that the program uses.

    Attributes:
        calls: Sentences about making the same calls on all ranks.
        time: Settings that allow a call more time.
    """

    calls: str
    time: str = MORE_TIME


# Most often a call that is meant to print or to save stands under `if rank == 0:`.
FOR_COMMUNICATORS = Advice(
    "Make this call on every rank, even if only one rank needs the result. Put only the printing under "
    "`if mpidist.rank() == 0:`."
)
# Limit of the differing calls whose traceback is printed.
_MOST_PRINTED = 4
# The kind of what a rank tells of itself, its text, and the line of its program.
Told = tuple[str, str, str]


def mismatch_text(everyone: Sequence[Told], advice: Advice = FOR_COMMUNICATORS) -> str:
    """Return the message on different calls, the odd ones first.

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

    For different calls, rank 0 and one rank of each of the rarest calls. For news, the first rank that makes a call.

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
    """Return the news of the ranks that make no call.

    >>> news_text([("plan", "barrier", "a.py:3")] + [("left", "has left the program", "its end")] * 2)
    'ranks 1-2: has left the program (at its end)'
    """
    news = ((rank, (text, site)) for rank, (kind, text, site) in enumerate(everyone) if kind != "plan")
    lines = group_lines(
        groups_of(news),
        lambda told, ranks: (f"{numbered_ranks(ranks)}{':' * (len(ranks) > 1)} ", told[0], f" (at {told[1]})"),
    )
    return "; ".join(lines)
