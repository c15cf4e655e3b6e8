"""Sizes as they are given on the command line: "4", "256K", "64M"."""

from __future__ import annotations

import argparse


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
