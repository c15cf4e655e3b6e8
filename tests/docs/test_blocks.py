"""All blocks of all pages are run, or stand in one of the tables that say why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import programs, transcripts
from tests.docs.commands import commands_of
from tests.docs.pages import PAGES, Block, blocks
from tests.support.ranks.jobs import ROOT
from tests.test_recipes import blocks as blocks_of_recipe
from tests.test_recipes import commands_of_recipe, recipes
from tests.tutorials import documents

pytestmark = pytest.mark.one_rank

_HERE = [page for page in map(str, (page.relative_to(ROOT) for page in PAGES)) if page not in programs.ELSEWHERE]


def test_every_page_is_looked_at() -> None:
    """Also those that come to be: but for what lists changes, and what is not written here."""
    found = {
        path for path in ROOT.rglob("*.md") if not any(part.startswith(".") or part == "out" for part in path.parts)
    }
    assert {path for path in found if blocks(path)} - set(PAGES) == set()


def test_every_program_is_run_or_excepted() -> None:
    run = {block for program in programs.all_programs() for block in program.blocks}
    repeated = programs.REPEATED[0]
    shown = [
        block
        for page in _HERE
        for block in blocks(page)
        if block.kind == "python" or (block.kind == "diff" and page != repeated)
    ]
    excepted = [block for block in shown if block.page in programs.EXCEPTED]
    assert len(run) + len(excepted) == len(shown) > 30
    assert {block.page for block in excepted} == set(programs.EXCEPTED)


def test_short_diffs_are_lines_of_diffs_that_are_run() -> None:
    short, whole = ([block.text for block in blocks(page) if block.kind == "diff"] for page in programs.REPEATED)
    assert len(short) == 4
    for text in short:
        assert any(set(text.splitlines()) <= set(other.splitlines()) for other in whole), text


def test_every_command_is_run_or_excepted() -> None:
    """With one reason at most, as tests/docs/test_commands.py sees."""
    shown = [command for page in _HERE for command in commands_of(page)]
    lines = [line for page in _HERE for block in blocks(page) if block.kind == "sh" for line in block.text.splitlines()]
    continued = [line for line in lines if line.endswith("\\")]
    assert len(shown) == len([line for line in lines if line]) - len(continued) > 100


def test_every_text_is_compared_or_excepted() -> None:
    compared = [program.shown for program in programs.all_programs() if program.shown]
    others = [block for page in _HERE for block in blocks(page) if block.kind == "text" and block not in compared]
    known = [*transcripts.PRINTED_BY, *transcripts.EXCEPTED]
    assert sorted((block.page, block.text.splitlines()[0]) for block in others) == sorted(map(tuple, known))


def test_there_are_no_other_blocks() -> None:
    kinds: dict[str, list[Block]] = {}
    for page in PAGES:
        for block in blocks(page):
            kinds.setdefault(block.kind, []).append(block)
    assert set(kinds) == {"python", "diff", "sh", "text", "json"}
    assert [block.page for block in kinds["json"]] == ["docs/tuning.md"]


def test_pages_with_tests_of_their_own_are_run_whole() -> None:
    typed = [block for recipe in recipes().values() for block in blocks_of_recipe(recipe)]
    page = "docs/extending.md"
    assert len(typed) == len([block for block in blocks(page) if block.kind in ("python", "diff")])
    assert len(commands_of(page)) == sum(len(commands_of_recipe(recipe)) for recipe in recipes().values())
    for path in sorted(documents.FOLDER.glob("*.md")):
        assert str(path.relative_to(ROOT)) in programs.ELSEWHERE
        assert len(list(documents.blocks(path.stem))) == len(programs_in(path))


def programs_in(path: Path) -> list[Block]:
    """Return the blocks of Python of a page."""
    return [block for block in blocks(path) if block.kind == "python"]
