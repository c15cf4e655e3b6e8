"""What pages show: programs that run, and names that are there."""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, programs
from tests.support.ranks.jobs import ROOT
from tests.support.ranks.programs import run_program

pytestmark = pytest.mark.one_rank

_STATES = {"same", "more", "differs", "no effect", "refused", "absent"}
# These names need a library that the tests of all others have not.
_OF_LIBRARIES = ("mpidist.torch", "mpidist.jax", "mpidist.keras")


def printed(program: str, ranks: int) -> str:
    job = run_program(program, ranks)
    assert (job.returncode, job.stderr) == (0, "")
    return job.stdout


def leads_somewhere(name: str) -> bool:
    """Return whether a name such as ``mpidist.Strategy.run`` is there."""
    if name.startswith(_OF_LIBRARIES):
        _, room, *members = name.split(".")
        return not members or f'"{members[0]}"' in (ROOT / "mpidist" / room / "__init__.py").read_text()
    here = importlib.import_module("mpidist")
    for part in name.split(".")[1:]:
        if not hasattr(here, part):
            return False
        here = getattr(here, part)
    return True


def names_in(block: str) -> Iterator[str]:
    """Yield the names of mpidist in a block, such as ``mpidist.Strategy``."""
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("mpidist."):
            yield ast.unparse(node).partition("(")[0]


@pytest.mark.parametrize("page", [page for page in PAGES if programs(page)], ids=lambda page: page.name)
def test_blocks_are_python_and_name_what_is_there(page: Path) -> None:
    names = [name for block in programs(page) for name in names_in(textwrap.dedent(block))]
    # Those that a page makes itself, as extending.md does, are left to its own test.
    assert page.name == "extending.md" or [name for name in names if not leads_somewhere(name)] == []


@pytest.mark.jobs
def test_the_program_of_the_start_page_has_twelve_lines_and_one_result() -> None:
    (program,) = programs("docs/index.md")
    assert len([line for line in program.splitlines() if line]) == 12
    alone, three = printed(program, 1), printed(program, 3)
    assert alone.startswith("rank 0 of 1: [")
    assert Counter(line.partition(": ")[2] for line in three.splitlines()) == {alone.strip().partition(": ")[2]: 3}


def symbols() -> list[dict[str, str]]:
    """Return the rows of the table of TensorFlow's symbols."""
    lines = (ROOT / "docs/tf_distribute.md").read_text().partition("\n## tf.distribute\n")[2].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    keys = ("theirs", "ours", "state", "difference")
    return [dict(zip(keys, row, strict=True)) for row in rows if row[0] != "TensorFlow" and set(row[0]) != {"-"}]


def test_every_symbol_of_tensorflow_leads_to_a_name_that_is_there() -> None:
    rows = symbols()
    assert len(rows) > 150
    names = [name for row in rows for name in re.findall(r"`(mpidist\.[\w.]+)", " ".join(row.values()))]
    assert [name for name in names if not leads_somewhere(name)] == []


def test_every_symbol_of_tensorflow_has_a_state() -> None:
    for row in symbols():
        assert row["state"] in _STATES, row
        # Where there is nothing, the row says so, and what to take.
        assert (row["ours"] == "") == (row["state"] == "absent"), row
        assert row["difference"] or row["state"] in ("same", "more", "no effect", "refused"), row


def test_no_name_that_has_tensorflow_for_its_source_is_left_out() -> None:
    """Docstrings end their first sentence with the symbol that they are the counterpart of."""
    mpidist = importlib.import_module("mpidist")
    listed = " ".join(row["ours"] for row in symbols())
    documented = {name: getattr(mpidist, name).__doc__ or "" for name in mpidist.__all__ if name[0].isupper()}
    counterparts = [name for name, text in documented.items() if "(tf.distribute." in text.split("\n\n")[0]]
    assert len(counterparts) > 15
    assert [name for name in counterparts if f"mpidist.{name}`" not in listed] == []
