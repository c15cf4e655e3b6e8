"""Draw the rooms of the package from its import contract into docs/rooms.svg: ``python docs/draw_rooms.py``."""

from __future__ import annotations

import ast
import textwrap
from html import escape
from pathlib import Path

from importlinter.api import read_configuration

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs/rooms.svg"

_WIDTH, _NAME_WIDTH, _GAP, _LINE = 880, 150, 6, 15
# Of a letter, on average, in pixels.
_LETTER = 6.2
_STYLE = "text{font:12px sans-serif;fill:#1f2328}.name{font:bold 13px monospace}rect{fill:#f6f8fa;stroke:#8c959f}"


def layers() -> list[list[str]]:
    """Return the rooms floor by floor, top first; an import goes only down."""
    (contract,) = read_configuration(str(ROOT / "pyproject.toml"))["contracts_options"]
    return [[room.strip() for room in layer.split("|")] for layer in contract["layers"]]


def purpose_of(room: str) -> str:
    """Return the first sentence of a room's docstring, without markup."""
    package, module = ROOT / "mpidist" / room / "__init__.py", ROOT / "mpidist" / f"{room}.py"
    text = ast.get_docstring(ast.parse((package if package.exists() else module).read_text()))
    assert text is not None, f"{room} says nothing of itself"
    return " ".join(text.split("\n\n")[0].split()).replace("``", "").rstrip(".")


def drawn() -> str:
    """Return the picture as SVG."""
    parts, top = [], _GAP
    for layer in layers():
        width = (_WIDTH - _GAP * (len(layer) + 1)) / len(layer)
        # A room that has its floor for itself has its name beside what it is for, others above.
        right, down = (_NAME_WIDTH, 0) if len(layer) == 1 else (0, _LINE + 4)
        texts = [textwrap.wrap(purpose_of(room), int((width - right - 16) / _LETTER)) for room in layer]
        height = _LINE * max(map(len, texts)) + down + 14
        for place, (room, lines) in enumerate(zip(layer, texts, strict=True)):
            left = round(_GAP + place * (width + _GAP))
            parts.append(f'<rect x="{left}" y="{top}" width="{width:.0f}" height="{height}" rx="4"/>')
            parts.append(f'<text class="name" x="{left + 8}" y="{top + 18}">{escape(room)}</text>')
            for row, line in enumerate(lines):
                x, y = left + 8 + right, top + 18 + down + row * _LINE
                parts.append(f'<text x="{x}" y="{y}">{escape(line)}</text>')
        top += height + _GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" role="img">'
    title = "<title>The rooms of mpidist: an import goes only down</title>"
    return "\n".join([head, title, f"<style>{_STYLE}</style>", *parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(drawn())
