"""mpidist.errors has every error that mpidist raises."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
from pathlib import Path

import pytest

from mpidist import errors
from tests.support.ranks.jobs import ROOT

pytestmark = pytest.mark.one_rank

PACKAGE = Path(ROOT, "mpidist")


def _modules() -> list[str]:
    """Return all modules except commands, the build, and packages whose library may be missing."""
    paths = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))
    left_out = ("cli", "native", "torch", "jax", "keras")
    found = [path for path in paths if path.parts[0] not in left_out and path.stem != "__main__"]
    return [".".join((PACKAGE.name, *path.parts)) for path in found]


def _errors_of(module: str) -> set[type]:
    """Return the exceptions that a module defines. Reads its source, so that few modules are imported."""
    source = PACKAGE.parent.joinpath(*module.split("."))
    source = source / "__init__.py" if source.is_dir() else source.with_suffix(".py")
    named = [node.name for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef) and node.bases]
    public = [name for name in named if not name.startswith("_")]
    found = [getattr(importlib.import_module(module), name) for name in public]
    return {kind for kind in found if issubclass(kind, BaseException)}


def test_every_exception_is_listed() -> None:
    defined = set().union(*map(_errors_of, _modules()))
    assert {getattr(errors, name) for name in errors.__all__} == defined


def test_pages_name_known_errors() -> None:
    named = set()
    for path in (Path(ROOT, "README.md"), *Path(ROOT, "docs").glob("*.md")):
        named |= set(re.findall(r"\b[A-Z]\w*(?:Error|Warning|Failure)\b", path.read_text()))
    others = {name for name in named if name not in errors.__all__ and not hasattr(builtins, name)}
    # Errors of concurrent.futures, JAX and PyTorch.
    assert others == {"CancelledError", "JaxRuntimeError", "DistStoreError"}
