"""Finding: one problem or possible improvement, and the command to type."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ERROR = "error"
"""Jobs do not work, or not on all of these ranks."""
WARNING = "warning"
"""They work, slower or more fragile than they could."""


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        level: ``ERROR`` or ``WARNING``.
        subject: In a word.
        text: The problem and its effect.
        command: The literal command to type.
    """

    level: str
    subject: str
    text: str
    command: str


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as text, the first few by number.

    >>> ranks_text([3]), ranks_text([0, 1, 2]), ranks_text(range(9))
    ('rank 3', 'ranks 0, 1 and 2', 'ranks 0, 1, 2 and 6 more')
    """
    numbers = list(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {names_text(map(str, numbers))}"


def names_text(names: Iterable[str]) -> str:
    """Return names as text, the first few of many.

    >>> names_text(["node0"]), names_text(["a", "b", "c", "d", "e"])
    ('node0', 'a, b, c and 2 more')
    """
    *most, last = names
    if len(most) > 3:
        return f"{', '.join(most[:3])} and {len(most) - 2} more"
    return f"{', '.join(most)} and {last}" if most else last
