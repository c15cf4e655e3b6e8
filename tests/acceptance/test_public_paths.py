"""Public import paths stay importable.

``public_paths.txt`` lists the names in each ``__all__``, and the names that README, docs and examples mention. The
recipes of docs/extending.md change the package itself, so they may name modules that move (tests/test_recipes.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.ranks.jobs import ROOT

pytestmark = pytest.mark.one_rank

PATHS = Path(__file__).with_name("public_paths.txt").read_text().split()
# A file name, or a placeholder.
NO_PATHS = {"mpidist.X", "mpidist.pth", "mpidist.sif", "mpidist.so"}
ABOUT_INTERNALS = {"extending.md", "architecture.md", "walkthrough.md"}
IMPORT = re.compile(r"^\s*[+>]? ?from (mpidist[\w.]*) import (\([^)]*\)|[^\n#]+)", re.MULTILINE)
DOTTED = re.compile(r"\bmpidist(?:\.[A-Za-z_]\w*)+")


@pytest.mark.parametrize("path", PATHS)
def test_path_is_importable(path: str) -> None:
    for library in ("torch", "jax", "keras"):
        if path.startswith(f"mpidist.{library}"):
            pytest.importorskip(library, reason=f"{library} is missing")
    module, rest = importable_part(path)
    assert reduce(getattr, rest, module) is not None


def test_every_name_in_all_is_listed() -> None:
    modules = [importable_part(path)[0] for path in PATHS if not path.startswith(("mpidist.torch", "mpidist.jax"))]
    names = {f"{module.__name__}.{name}" for module in modules for name in getattr(module, "__all__", ())}
    assert sorted(names - {*PATHS}) == []


def test_every_path_of_the_pages_is_listed() -> None:
    assert sorted(paths_of_pages() - {*PATHS} - NO_PATHS) == []


def importable_part(path: str) -> tuple[ModuleType, list[str]]:
    """Return the innermost module of a path, and the names behind it."""
    parts = path.split(".")
    module = importlib.import_module(parts[0])
    for number in range(2, len(parts) + 1):
        name = ".".join(parts[:number])
        if importlib.util.find_spec(name) is None:
            return module, parts[number - 1 :]
        module = importlib.import_module(name)
        if not hasattr(module, "__path__"):
            return module, parts[number:]
    return module, []


def paths_of_pages() -> set[str]:
    return {path for text in texts() for path in paths_of(text)}


def texts() -> Iterator[str]:
    pages = [
        path
        for pattern in ("docs/**/*.md", "slurm/*.md", "examples/*.py", "examples/*.md")
        for path in ROOT.glob(pattern)
    ]
    for page in [ROOT / "README.md", *pages]:
        if page.name not in ABOUT_INTERNALS and "api" not in page.parts:
            yield page.read_text()


def paths_of(text: str) -> Iterator[str]:
    for module, names in IMPORT.findall(text):
        for name in re.findall(r"(\w+)(?: as \w+)?", names):
            yield f"{module}.{name}"
    yield from DOTTED.findall(text)
