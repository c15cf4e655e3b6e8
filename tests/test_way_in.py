"""What shows newcomers the way: every file and name that it speaks of is there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_SHIPPED = ("mpidist", "benchmarks", "examples", "packaging", "slurm")
_TEXT = (".py", ".md", ".sbatch", ".def", ".yaml", "")

pytestmark = pytest.mark.one_rank


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|mailto:|#)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_nobody_installs_mpidist_from_an_index() -> None:
    shipped = [path for folder in _SHIPPED for path in (ROOT / folder).rglob("*") if path.suffix in _TEXT]
    files = [*PAGES, *filter(Path.is_file, shipped)]
    lines = [(path.name, line) for path in files for line in path.read_text().splitlines()]
    bare = re.compile(r"pip install\b(?!.*--no-index)[^#`()]* [\"']?mpidist([\"'\[\s]|$)")
    assert [line for line in lines if bare.search(line[1])] == []


def test_files_of_the_walkthrough_exist() -> None:
    files = re.findall(r"`([a-z_0-9/]+\.py)`", (ROOT / "docs/walkthrough.md").read_text())
    assert len(files) > 40
    assert [file for file in files if not (ROOT / "mpidist" / file).exists()] == []


def test_the_picture_is_that_of_the_import_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    module = importlib.import_module("draw_rooms")
    for package, layers in module.layers().items():
        rooms = {room for layer in layers for room in layer}
        folders = (ROOT / package.replace(".", "/")).iterdir()
        assert {path.name for path in folders if (path / "__init__.py").exists()} <= rooms
    assert module.PICTURE.read_text() == module.drawn(), "type: python docs/draw_rooms.py"
