"""``python -m mpidist example NAME``: writes an example into this folder."""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
from pathlib import Path

from mpidist.cli.json_output import add_json_argument, json_text
from mpidist.core.files import open_regular, replacing

HELP = "write an example program into this folder; without a name, list them"
_USAGE_ERROR = 2
_PACKAGE = Path(__file__).resolve().parents[1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="such as train; without one they are listed")
    parser.add_argument("--force", action="store_true", help="write over files that are there and differ")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """List them, or write one with the files that it needs."""
    folder = examples_folder()
    names = sorted(path.stem for path in folder.glob("*.py"))
    if arguments.name is None:
        about = {name: first_sentence(folder / f"{name}.py") for name in names}
        listed = [{"name": name, "about": text} for name, text in about.items()]
        width = max(map(len, names))
        lines = [*(f"{name:<{width}}  {text}" for name, text in about.items()), "", _NEXT]
        print(json_text({"examples": listed}) if arguments.json else "\n".join(lines))
        return 0
    name = arguments.name.removesuffix(".py")
    try:
        if name not in names:
            raise ValueError(f"there is no example {arguments.name!r}; expected one of {', '.join(names)}")
        files = files_of(folder, f"{name}.py")
        write(folder, files, is_forced=arguments.force)
    except (OSError, ValueError) as error:
        print(f"python -m mpidist example: {error}", file=sys.stderr)
        return _USAGE_ERROR
    started = f"start it: python -m mpidist launch -n 2 {name}.py"
    text = f"wrote {', '.join(files)}; the head of {name}.py says how it is started"
    print(json_text({"files": files}) if arguments.json else text if name in _OTHERWISE else f"{text}; {started}")
    return 0


_NEXT = "type: python -m mpidist example NAME"
# Not programs of ranks.
_OTHERWISE = ("reframe_checks",)


def examples_folder() -> Path:
    """Return the folder of the examples: in the package, or in a checkout beside it."""
    inside = _PACKAGE / "examples"
    return inside if inside.is_dir() else _PACKAGE.parent / "examples"


def first_sentence(path: Path) -> str:
    """Return the first line of a program's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def files_of(folder: Path, name: str) -> list[str]:
    """Return an example and the files of its folder that it imports or opens."""
    found = [name]
    for each in found:  # which grows
        text = (folder / each).read_text() if each.endswith(".py") else ""
        needed = (other.name for other in sorted(folder.iterdir()) if _names(text, other))
        found += [other for other in needed if other not in found]
    return found


def _names(text: str, file: Path) -> bool:
    return (
        f'"{file.name}"' in text or re.search(rf"^from {re.escape(file.stem)} import", text, re.MULTILINE) is not None
    )


def write(folder: Path, files: list[str], *, is_forced: bool) -> None:
    """Write files into the current folder; all or, where one is in the way, none.

    Raises:
        FileExistsError: One is there and has another content.
        OSError: It cannot be written, or is no regular file.
    """
    content = {name: (folder / name).read_bytes() for name in files}
    there = [name for name in files if os.path.lexists(name)]
    other = [name for name in there if _read(name) != content[name]]
    if other and not is_forced:
        raise FileExistsError(
            f"{', '.join(other)} is here already and differs; expected a folder without it, or --force to write over it"
        )
    for name in files:
        if name in other or name not in there:
            with replacing(name) as descriptor, open(descriptor, "wb", closefd=False) as file:
                file.write(content[name])


def _read(name: str) -> bytes:
    with open(open_regular(name, os.O_RDONLY), "rb") as file:
        return file.read()
