"""Finding: one problem or possible improvement, and the command to type."""

from __future__ import annotations

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
