"""The recipes of docs/extending.md, typed in to the letter: applied to a copy of the package, and run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.ranks.jobs import ROOT, run_script

pytestmark = [pytest.mark.one_rank, pytest.mark.jobs]

PAGE = ROOT / "docs/extending.md"
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"`([\w/]+\.\w+)`")
_COMMAND = re.compile(r"^mpirun -n (\d+) python (\S+)$", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block, and the file that the text before it named last."""

    kind: str
    file: str
    text: str


def recipes() -> dict[str, str]:
    """Return the sections of the page that end in a command, by their titles."""
    sections = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return {title: text for title, text in zip(sections[::2], sections[1::2], strict=True) if _COMMAND.search(text)}


def blocks(recipe: str) -> Iterator[Block]:
    """Return the blocks of a recipe that are files, or changes of files, in their order."""
    file, end = "", 0
    for fence in _FENCE.finditer(recipe):
        # Not those of the table of members, or of a sentence: the line that leads to the block names it.
        lead = recipe[end : fence.start()].strip()
        found = _FILE.findall(lead[lead.rfind("\n\n") + 1 :])
        file, end = found[-1] if found else file, fence.end()
        if fence[1] in ("python", "diff"):
            yield Block(fence[1], file, fence[2])


def commands_of_recipe(recipe: str) -> list[tuple[str, str]]:
    """Return the commands of a recipe: numbers of ranks, and programs."""
    return _COMMAND.findall(recipe)


def apply(block: Block, folder: Path) -> None:
    """Do in ``folder`` what a block says."""
    path = folder / block.file
    if block.kind == "python":
        assert not path.exists(), f"{block.file} is there already"
        path.write_text(block.text)
        return
    lines = block.text.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    text = path.read_text()
    assert text.count(before) == 1, f"{block.file} has not once, but {text.count(before)} times:\n{before}"
    path.write_text(text.replace(before, after))


def test_the_page_has_recipes() -> None:
    assert set(recipes()) == {"A strategy", "An algorithm", "An algorithm between nodes", "A command"}


@pytest.mark.parametrize("title", recipes())
def test_a_recipe_typed_in(title: str, tmp_path: Path) -> None:
    recipe = recipes()[title]
    for room in ("mpidist", "tests"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    for block in blocks(recipe):
        apply(block, tmp_path)
    for ranks, program in commands_of_recipe(recipe):
        done = run_script(tmp_path / program, int(ranks), env={"PYTHONPATH": str(tmp_path)})
        assert done.returncode == 0, done.stderr
