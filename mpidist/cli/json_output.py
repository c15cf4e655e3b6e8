"""The ``--json`` of every command that prints facts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

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
