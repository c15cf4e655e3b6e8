"""Count how the library is built: ``python -m tests.house [--calls] [--json] [CHECKOUT ...]``.

Several checkouts stand side by side, such as this one and a git worktree of an older commit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.house import calls, imports, source

_HERE = Path(__file__).resolve().parents[2]


def figures(checkout: Path) -> dict[str, Any]:
    """Return what can be counted in the source of a checkout, by name: a number, or a list of what there is."""
    sources = source.read(checkout)
    private = source.private_accesses(sources)
    circles = imports.circles(imports.graph(sources))
    return {
        **source.lines(sources),
        "files": len(sources),
        **source.functions(sources),
        "imports upward": imports.upward(checkout, sources),
        "circles of files": circles,
        "files in circles": sum(map(len, circles)),
        "private accesses": private,
        "private accesses of a name": sum(map(source.is_of_a_name, private)),
        "Any": source.any_count(sources),
        '"what" in 10,000 words of docstrings': source.what_per_10_000(sources),
        "first sentences of more than 15 words": source.long_first_sentences(sources),
        "class names that occur twice": source.classes_twice(sources),
        "file names that occur twice": source.files_twice(sources),
    }


def table(columns: dict[str, dict[str, Any]]) -> str:
    """Return a line for each figure and a column for each checkout; lists by length, private accesses by room too."""
    rows = [("", [name[-19:] for name in columns])]
    for name in next(iter(columns.values())):
        values = [column[name] for column in columns.values()]
        rows.append((name, [str(len(value) if isinstance(value, list) else value) for value in values]))
        if name == "private accesses":
            rooms = [Counter(access.split("/")[0] for access in value) for value in values]
            rows += [(f"  {room}", [str(count[room]) for count in rooms]) for room in sorted(set().union(*rooms))]
    return "\n".join(f"{name:<42}" + "".join(f"{text:>20}" for text in texts) for name, texts in rows)


def main(arguments: list[str]) -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.house", description=__doc__)
    parser.add_argument("checkouts", type=Path, nargs="*", metavar="CHECKOUT", help="this one by default")
    parser.add_argument("--calls", action="store_true", help="also what calls cross, on two ranks")
    parser.add_argument("--json", action="store_true", help="as JSON, with the names of what is counted")
    given = parser.parse_args(arguments)
    columns = {}
    for checkout in given.checkouts or [_HERE]:
        columns[str(checkout)] = figures(checkout) | (calls.figures(checkout) if given.calls else {})
    print(json.dumps(columns, indent=2) if given.json else table(columns))


if __name__ == "__main__":
    main(sys.argv[1:])
