"""Arguments and texts of several commands: ``--json``, seconds, speeds and tables."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Container, Mapping, Sequence

from mpidist.core import __version__


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--json`` to the arguments of a command."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def json_text(facts: Mapping[str, object]) -> str:
    """Return the document of some facts, with the version of mpidist.

    >>> print(json_text({"path": "out"}).replace(__version__, "2.3"))
    {
      "mpidist": "2.3",
      "path": "out"
    }
    """
    return json.dumps({"mpidist": __version__, **facts}, indent=2)


def seconds(text: str, most: float = sys.float_info.max) -> float:
    """Return the seconds of an argument, more than 0 and at most ``most``."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; expected a number of seconds, more than 0")
    return number


def time_text(seconds: float) -> str:
    """Return a time to three digits.

    >>> time_text(1.234e-5), time_text(0.1234), time_text(2.5)
    ('12.3 us', '123 ms', '2.5 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def table_lines(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return the lines of a table. Columns of the numbers in ``right`` are aligned right.

    >>> table_lines([["rank", "for"], ["0", "3 s"], ["1-9", "12 s"]], right=[1])
    ['rank   for', '0      3 s', '1-9   12 s']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def speed_text(bytes_per_second: float) -> str:
    """Return a bandwidth.

    >>> speed_text(1.25e8), speed_text(1.234e10)
    ('125 MB/s', '12.3 GB/s')
    """
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.3g} GB/s"
    return f"{bytes_per_second / 1e6:.3g} MB/s"
