"""A user's program under mypy and pyright: the types of what it gets, its mistakes found, and the examples."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks.jobs import ROOT, run_script

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

PROGRAM, MISTAKES = (Path(__file__).with_name(name) for name in ("program.py", "mistakes.py"))
# Checked where their library is: without it nothing is known of the classes that they inherit from.
# ReFrame has no types.
_LIBRARIES = {"torch_": "torch", "lightning_": "lightning", "jax_": "optax", "keras_": "keras", "reframe_": None}
EXAMPLES = sorted(
    path
    for path in (ROOT / "examples").glob("*.py")
    if all(
        library and importlib.util.find_spec(library)
        for prefix, library in _LIBRARIES.items()
        if path.name.startswith(prefix)
    )
)
PYRIGHT = shutil.which("basedpyright", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
# The checkers search this tree for mpidist before what is installed.
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "MYPYPATH": str(ROOT)}

needs_mypy = pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
needs_pyright = pytest.mark.skipif(PYRIGHT is None, reason="basedpyright is not installed; see make test-types")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a user's folder: the program, the mistakes and the examples, with the settings of pyright by default."""
    for path in (PROGRAM, MISTAKES, *EXAMPLES):
        shutil.copy(path, tmp_path)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "standard"}))
    return tmp_path


def complaints(project: Path, *command: str) -> dict[tuple[str, int], str]:
    """Return what a type checker prints, by file and line, but for lines that explain others."""
    done = subprocess.run(
        command, cwd=project, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^\s*(\S+\.py):(\d+)(?::\d+)?(?: -|:) (?!note: )(.*)", done.stdout, re.MULTILINE)
    return {(Path(file).name, int(line)): text for file, line, text in found}


def mistakes() -> set[tuple[str, int]]:
    lines = enumerate(MISTAKES.read_text().splitlines(), 1)
    return {(MISTAKES.name, number) for number, line in lines if "# wrong" in line}


@needs_mypy
def test_mypy_in_strict_mode(project: Path) -> None:
    # Without settings, and where users have no stubs of tqdm.
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--disable-error-code=import-untyped", "."]
    found = complaints(project, *command)
    assert set(found) == mistakes(), found


@needs_pyright
def test_pyright(project: Path) -> None:
    found = complaints(project, str(PYRIGHT), "--pythonpath", sys.executable)
    assert set(found) == mistakes(), found


@needs_mypy
def test_the_program_runs() -> None:
    done = run_script(PROGRAM, 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done") == 2
