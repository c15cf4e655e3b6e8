"""``python -m mpidist example NAME``: writes an example into this folder."""

from __future__ import annotations

import argparse
import ast
import os
import re
from pathlib import Path

from mpidist.cli.json_output import add_json_argument, json_text
from mpidist.core.files import open_regular, replacing

HELP = "write an example program into this folder; without a name, list them"
_PROGRAM = "python -m mpidist example"
_NOT_FOR_RANKS = ("reframe_checks",)
_PACKAGE = Path(__file__).resolve().parents[1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="such as train; without one they are listed")
    parser.add_argument("--force", action="store_true", help="overwrite different files")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """List the examples, or write one with the files that it needs."""
    folder = _PACKAGE / "examples"
    if not folder.is_dir():  # in a checkout
        folder = _PACKAGE.parent / "examples"
    about = {path.stem: _first_sentence(path) for path in sorted(folder.glob("*.py"))}
    if arguments.name is None:
        width = max(map(len, about))
        lines = [*(f"{name:<{width}}  {text}" for name, text in about.items()), "", f"type: {_PROGRAM} NAME"]
        listed = [{"name": name, "about": text} for name, text in about.items()]
        print(json_text({"examples": listed}) if arguments.json else "\n".join(lines))
        return 0
    name = arguments.name.removesuffix(".py")
    if name not in about:
        raise ValueError(f"unknown example {arguments.name!r}. Choose one of {', '.join(about)}")
    files = _files_of(folder, f"{name}.py")
    _write(folder, files, is_forced=arguments.force)
    text = f"wrote {', '.join(files)}; the docstring of {name}.py shows how to start it"
    if name not in _NOT_FOR_RANKS:
        text += f"; type for example: python -m mpidist launch -n 2 {name}.py"
    print(json_text({"files": files}) if arguments.json else text)
    return 0


def _first_sentence(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def _files_of(folder: Path, name: str) -> list[str]:
    """Return an example and the files of its folder that it imports or opens."""
    found = [name]
    for each in found:  # the list grows
        text = (folder / each).read_text() if each.endswith(".py") else ""
        for other in sorted(folder.iterdir()):
            is_imported = re.search(rf"^from {re.escape(other.stem)} import", text, re.MULTILINE)
            if other.name not in found and (is_imported or f'"{other.name}"' in text):
                found.append(other.name)
    return found


def _write(folder: Path, files: list[str], *, is_forced: bool) -> None:
    """Write files into the current folder, all of them or none."""
    content = {name: (folder / name).read_bytes() for name in files}
    different = [name for name in files if os.path.lexists(name) and _read(name) != content[name]]
    if different and not is_forced:
        raise FileExistsError(
            f"{', '.join(different)} is here already and differs. Use another folder, or --force to overwrite it"
        )
    for name in files:
        if name in different or not os.path.lexists(name):
            with replacing(name) as descriptor, open(descriptor, "wb", closefd=False) as file:
                file.write(content[name])


def _read(name: str) -> bytes:
    with open(open_regular(name, os.O_RDONLY), "rb") as file:
        return file.read()
