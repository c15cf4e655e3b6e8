"""The pages of the documentation as they lie in the checkout, and the blocks in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.ranks.jobs import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "packaging/README.md", "slurm/README.md")),
    ROOT / "tests/cluster/lab/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
_FENCE = re.compile(r"```(\S*)$")
_GIVEN = "<!-- given"
# What stands there without a name is what something prints.
_KINDS = {"": "text", "bash": "sh"}


class Block(NamedTuple):
    """A block of a page.

    Attributes:
        page: Its path in the checkout.
        line: Its first one, counted from 1.
        kind: "python", "diff", "sh", "json", or "text" for what is printed.
        text: What stands in it.
        given: The program that its reader has, from the comment before it.
    """

    page: str
    line: int
    kind: str
    text: str
    given: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str | Path) -> list[Block]:
    """Return the blocks of a page: fenced ones, and those of commands, which are indented."""
    return list(_blocks(str((ROOT / page).relative_to(ROOT))))


def _blocks(page: str) -> Iterator[Block]:
    lines = (ROOT / page).read_text().splitlines()
    number, given = 0, ""
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        begin = number + 1
        if fence:
            number = lines.index("```", begin)
            if not fence[1].startswith("{"):
                yield Block(page, begin + 1, _KINDS.get(fence[1], fence[1]), _joined(lines[begin:number]), given)
            given = ""
        elif lines[number] == _GIVEN:
            number = lines.index("-->", begin)
            given = _joined(lines[begin:number])
        elif lines[number].startswith("    ") and not lines[number - 1]:
            while number + 1 < len(lines) and (not lines[number + 1] or lines[number + 1].startswith("    ")):
                number += 1
            yield Block(page, begin, "sh", _joined([line[4:] for line in lines[begin - 1 : number + 1]]).strip("\n"))
        number += 1


def _joined(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def programs(page: str | Path) -> list[str]:
    """Return the blocks of Python in a page."""
    return [block.text for block in blocks(page) if block.kind == "python"]
