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


def layers() -> dict[str, list[list[str]]]:
    """Return the rooms of each package, floor by floor, top first; an import goes only down."""
    contracts = read_configuration(str(ROOT / "pyproject.toml"))["contracts_options"]
    return {
        contract["containers"][0]: [[room.strip() for room in layer.split("|")] for layer in contract["layers"]]
        for contract in contracts
    }


def purpose_of(room: str) -> str:
    """Return the first sentence of a room's docstring, without markup."""
    path = ROOT / room.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text()))
    assert text is not None, f"{room} says nothing of itself"
    return " ".join(text.split("\n\n")[0].split()).replace("``", "").rstrip(".")


def floors(package: str, left: int, top: int, width: int) -> tuple[list[str], int]:
    """Return the floors of a package as SVG, each room with its own floors inside, and where they end."""
    parts = []
    for layer in layers()[package]:
        room_width = (width - _GAP * (len(layer) + 1)) / len(layer)
        # A room that has its floor for itself has its name beside what it is for, others above.
        right, down = (_NAME_WIDTH, 0) if len(layer) == 1 else (0, _LINE + 4)
        names = [f"{package}.{room}" for room in layer]
        texts = [textwrap.wrap(purpose_of(name), int((room_width - right - 16) / _LETTER)) for name in names]
        height = _LINE * max(map(len, texts)) + down + 14
        for place, (room, name, lines) in enumerate(zip(layer, names, texts, strict=True)):
            x = round(left + _GAP + place * (room_width + _GAP))
            inner: list[str] = []
            if name in layers():
                inner, end = floors(name, x, top + height, round(room_width))
                height = end - top
            parts.append(f'<rect x="{x}" y="{top}" width="{room_width:.0f}" height="{height}" rx="4"/>')
            parts.append(f'<text class="name" x="{x + 8}" y="{top + 18}">{escape(room)}</text>')
            for row, line in enumerate(lines):
                parts.append(f'<text x="{x + 8 + right}" y="{top + 18 + down + row * _LINE}">{escape(line)}</text>')
            parts += inner
        top += height + _GAP
    return parts, top


def drawn() -> str:
    """Return the picture as SVG."""
    parts, height = floors("mpidist", 0, _GAP, _WIDTH)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">'
    title = "<title>The rooms of mpidist: an import goes only down</title>"
    return "\n".join([head, title, f"<style>{_STYLE}</style>", *parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(drawn())
