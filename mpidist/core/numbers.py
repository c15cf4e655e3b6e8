"""Numbers as text, read strictly. Other text that Python accepts, such as ' 1', '+1', '1_000' and '٣', is an error."""

from __future__ import annotations

import re

# Launchers and Slurm write nothing longer; a longer one could not be counted to.
_WHOLE = re.compile(r"[0-9]{1,18}")
_DECIMAL = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|inf")


def whole_number(text: str) -> int:
    """Return the whole number of at least 0 that ASCII digits are.

    Raises:
        ValueError: There is something else in ``text``.

    >>> whole_number("08")
    8
    """
    if _WHOLE.fullmatch(text) is None:
        raise ValueError(f"{text!r} is no whole number; expected digits alone")
    return int(text)


def decimal_number(text: str) -> float:
    """Return the number of at least 0 in a text such as ``1800`` or ``0.5``. ``1e3`` and ``inf`` are read, too.

    Raises:
        ValueError: There is something else in ``text``.
    """
    if _DECIMAL.fullmatch(text) is None:
        raise ValueError(f"{text!r} is no number of at least 0; expected one such as 60 or 0.5")
    return float(text)
