"""Sizes in bytes: as they are given on the command line ("4", "256K", "64M"), and as tables show them."""

from __future__ import annotations

import argparse

KIB, MIB = 1 << 10, 1 << 20


def size_of_text(text: str) -> int:
    """Return the bytes of "4", "256K" or "64M".

    >>> size_of_text("256K")
    262144
    """
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    factor = units.get(text[-1:].upper(), 1)
    digits = text[:-1] if factor > 1 else text
    if not digits.isdigit() or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"size is {text!r}; expected a number of bytes such as 4, 256K or 64M")
    return int(digits) * factor


def sizes_of_text(text: str) -> list[int]:
    """Return the bytes of sizes that commas separate.

    >>> sizes_of_text("4,1K")
    [4, 1024]
    """
    return [size_of_text(part) for part in text.split(",")]


def size_text(size: int) -> str:
    """Return a size in the largest unit that divides it.

    >>> size_text(64 << 20), size_text(1000)
    ('64 MiB', '1000 B')
    """
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"
