"""Draw the rooms of the package from its import contract into docs/rooms.svg: ``python docs/draw_rooms.py``."""

from __future__ import annotations

import ast
import textwrap

from drawing import LETTER, ROOT, Picture
from importlinter.api import read_configuration

PICTURE = ROOT / "docs/rooms.svg"

_WIDTH, _NAME_WIDTH, _GAP, _LINE = 880, 150, 6, 15


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


def draw_floors(picture: Picture, package: str, left: int, top: int, width: int) -> int:
    """Draw the floors of a package, each room with its own floors inside, and return where they end."""
    for layer in layers()[package]:
        room_width = (width - _GAP * (len(layer) + 1)) / len(layer)
        # A room that has its floor for itself has its name beside what it is for, others above.
        right, down = (_NAME_WIDTH, 0) if len(layer) == 1 else (0, _LINE + 4)
        names = [f"{package}.{room}" for room in layer]
        texts = [textwrap.wrap(purpose_of(name), int((room_width - right - 16) / LETTER)) for name in names]
        height = own = _LINE * max(map(len, texts)) + down + 14
        for place, (room, name, lines) in enumerate(zip(layer, names, texts, strict=True)):
            x = round(left + _GAP + place * (room_width + _GAP))
            if name in layers():
                # Looked at first: the room is as high as its floors, which are drawn over it.
                height = draw_floors(Picture("", 0), name, x, top + own, round(room_width)) - top
            picture.box(x, top, round(room_width), height)
            picture.text(x + 8, top + 18, room, "bold code")
            for row, line in enumerate(lines):
                picture.text(x + 8 + right, top + 18 + down + row * _LINE, line)
            if name in layers():
                draw_floors(picture, name, x, top + own, round(room_width))
        top += height + _GAP
    return top


def drawn() -> str:
    """Return the picture as SVG."""
    picture = Picture("The rooms of mpidist: an import goes only down", _WIDTH)
    draw_floors(picture, "mpidist", 0, _GAP, _WIDTH)
    return picture.svg()


if __name__ == "__main__":
    PICTURE.write_text(drawn())
