"""The blocks of Python of all pages as programs, and how they are run.

A block that begins with an import begins a program, and the blocks below it go on with it. A ``diff`` changes the
program before it, or the one in the comment above it (``<!-- given``), which is its reader's. A block of text right
below says what a program prints on two ranks, or on the most that it is run on, with ``...`` for anything.
"""

from __future__ import annotations

import ast
import doctest
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.docs.pages import PAGES, Block, blocks
from tests.docs.shell import run_command
from tests.support.ranks.jobs import ROOT
from tests.support.ranks.programs import run_program

# All blocks of these pages are run by tests of their own, which know who follows which block, and what goes where.
ELSEWHERE = {
    "docs/extending.md": "tests/test_recipes.py",
    "docs/tutorials/custom_training.md": "tests/tutorials, tests/torch, tests/keras",
    "docs/tutorials/distributed_input.md": "tests/tutorials, tests/torch, tests/keras",
    "docs/tutorials/save_and_load.md": "tests/torch, tests/keras",
}
EXCEPTED = {"tests/cluster/lab/README.md": "needs root and Slurm; the tests of tests/cluster are such programs"}
# The diffs of the first page are lines of diffs of the second one, which are run.
REPEATED = ("README.md", "docs/get_started.md")
# Not on one rank and on two.
_RANKS = {
    "README.md": (1, 4),
    "docs/elastic.md": (2,),
    "docs/gpu.md": (2,),
    "docs/tuning.md": (2,),
    "docs/parameter_servers.md": (4,),
    "docs/notebooks.md": (1,),
    "docs/horovod.md": (2,),
    "docs/get_started.md": (2,),
}
# Not on warm ranks: it sets up logging, starts ranks itself, ends some of its ranks before the others.
_IN_A_JOB = ("docs/tuning.md", "docs/notebooks.md", "docs/parameter_servers.md")
_LIBRARY = re.compile(r"^import (keras|jax|torch|cupy)\b", re.MULTILINE)


class Program(NamedTuple):
    """A program of a page.

    Attributes:
        blocks: Those that it consists of.
        text: All of it.
        shown: What it prints, or None.
    """

    blocks: tuple[Block, ...]
    text: str
    shown: Block | None = None

    def __str__(self) -> str:
        return str(self.blocks[0])

    @property
    def page(self) -> str:
        """The page's path in the checkout."""
        return self.blocks[0].page

    @property
    def library(self) -> str | None:
        """The library that it needs, or None."""
        found = _LIBRARY.search(self.text)
        return found[1] if found else None

    @property
    def ranks(self) -> tuple[int, ...]:
        """On how many it is run, one after the other."""
        return _RANKS.get(self.page, (1, 2))


def programs_of(page: str | Path) -> list[Program]:
    """Return the programs of a page, in its order."""
    found: list[Program] = []
    last = None
    for block in blocks(page):
        if block.kind == "python" and _begins(block):
            found.append(Program((block,), block.text))
        elif block.kind == "python":
            found[-1] = Program((*found[-1].blocks, block), found[-1].text + block.text)
        elif block.kind == "diff" and block.page != REPEATED[0]:
            found.append(Program((block,), changed(block, block.given or found[-1].text)))
        elif block.kind == "text" and last == "python":
            found[-1] = found[-1]._replace(shown=block)
        last = block.kind
    return found


def _begins(block: Block) -> bool:
    return isinstance(ast.parse(block.text).body[0], (ast.Import, ast.ImportFrom))


def changed(block: Block, text: str) -> str:
    """Return ``text`` with the change that a block shows."""
    lines = block.text.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    assert text.count(before) == 1, f"{block} is about lines that are there {text.count(before)} times:\n{before}"
    return text.replace(before, after)


def all_programs() -> Iterator[Program]:
    """Yield the programs of all pages but those that have tests of their own."""
    for page in (str(page.relative_to(ROOT)) for page in PAGES):
        if page not in ELSEWHERE and page not in EXCEPTED:
            yield from programs_of(page)


def programs_with(library: str | None) -> list[Program]:
    """Return the programs of all pages that need ``library``, or none."""
    return [program for program in all_programs() if program.library == library]


def follow(program: Program, folder: Path) -> None:
    """Run a program as its page says, and compare what it prints.

    Args:
        program: Of a page.
        folder: It is run in folders in this one, whose names are its only argument.
    """
    for ranks in program.ranks:
        place = folder / str(ranks)
        place.mkdir()
        path = place / "program.py"
        path.write_text(program.text)
        # A library has state that ranks do not lose, and one for GPUs a stand-in.
        if program.library is None and program.page not in _IN_A_JOB:
            done = run_program(path, ranks, str(place / "out"), folder=place)
        else:
            stand_in = "-m tests.support.fake_cupy " if program.library == "cupy" else ""
            launcher = "" if program.page == "docs/notebooks.md" else f"mpirun -n {ranks} "
            done = run_command(f"{launcher}python {stand_in}program.py {place / 'out'}", place, timeout=90)
        assert done.returncode == 0, f"{program} on {ranks} ranks:\n{done.stdout}{done.stderr}"
        if program.shown and ranks == program.ranks[-1]:
            check_printed(unordered(program.shown.text), unordered(done.stdout + done.stderr))


def check_printed(shown: str, printed: str) -> None:
    """Raise AssertionError if something else was printed than what is shown, where ``...`` is anything."""
    is_shown = doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS)
    assert is_shown, f"shown:\n{shown}\nprinted:\n{printed}"


def unordered(text: str) -> str:
    """Return the lines of a text, each once, in the order of the alphabet."""
    return "\n".join(sorted(set(text.splitlines())))
