"""Count the source of the library: ``python -m tests.house [--calls] [--json] [CHECKOUT ...]``.

Several checkouts stand side by side, such as this one and a git worktree of an older commit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.house import calls
from tests.house.source import figures

_HERE = Path(__file__).resolve().parents[2]


def table(columns: dict[str, dict[str, Any]]) -> str:
    """Return a row for each figure and a column for each checkout, with private accesses also by folder."""
    rows = [("", [name[-19:] for name in columns])]
    for name in next(iter(columns.values())):
        values = [column[name] for column in columns.values()]
        rows.append((name, [str(len(value) if isinstance(value, list) else value) for value in values]))
        if name == "private accesses":
            rooms = [Counter(access.split("/")[0] for access in value) for value in values]
            rows += [(f"  {room}", [str(count[room]) for count in rooms]) for room in sorted(set().union(*rooms))]
    return "\n".join(f"{name:<42}" + "".join(f"{text:>20}" for text in texts) for name, texts in rows)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.house", description=__doc__)
    parser.add_argument("checkouts", type=Path, nargs="*", metavar="CHECKOUT", help="this one by default")
    parser.add_argument("--calls", action="store_true", help="also what calls pass through, on two ranks")
    parser.add_argument("--json", action="store_true", help="print JSON with the occurrences that are counted")
    given = parser.parse_args(arguments)
    columns = {}
    for checkout in given.checkouts or [_HERE]:
        columns[str(checkout)] = figures(checkout) | (calls.figures(checkout) if given.calls else {})
    print(json.dumps(columns, indent=2) if given.json else table(columns))


if __name__ == "__main__":
    main(sys.argv[1:])
