"""The pictures of the docs show what jobs do."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.ranks.jobs import ROOT, run_script
from tests.support.ranks.programs import run_program

pytestmark = pytest.mark.one_rank


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return how a script of docs/ is imported."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module


def texts_without_numbers(picture: str) -> set[str]:
    found = re.findall(r"<text[^>]*>(.*?)</text>", picture)
    return {re.sub(r"[\d.,-]+", "", text) for text in found}


def record(script: ModuleType, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Run the script's program, and return its trace and what it printed on stderr."""
    job = run_script(script.PROGRAM, script.RANKS, env={"MPIDIST_TRACE": str(folder), **script.ENVIRONMENT})
    assert job.returncode == 0, job.stderr
    return json.loads((folder / "trace-merged.json").read_text())["traceEvents"], job.stderr


@pytest.mark.jobs
def test_layouts(scripts: Any) -> None:
    script = scripts("draw_layouts")
    outputs = [run_program(script.PROGRAM, ranks, str(script.REPLICAS // ranks)).stdout for ranks in script.RANKS]
    assert script.drawn(outputs) == script.PICTURE.read_text(), "type: python docs/draw_layouts.py"


@pytest.mark.jobs
def test_dealing(scripts: Any) -> None:
    script = scripts("draw_dealing")
    output = run_program(script.PROGRAM, script.RANKS).stdout
    assert script.drawn(output) == script.PICTURE.read_text(), "type: python docs/draw_dealing.py"


def test_speed(scripts: Any) -> None:
    script = scripts("draw_speed")
    results = json.loads(script.RESULTS.read_text())
    assert script.drawn(results) == script.PICTURE.read_text(), "type: python docs/draw_speed.py"
    curves = script.ratios(results)
    points = [point for curve in curves.values() for point in curve.items()]
    slower = [f"{script.text_of(size)} ({ratio:.2f}x)" for size, ratio in points if ratio < 1]
    ordinary = curves["ordinary arrays (out=)"].values()
    readme = (ROOT / "README.md").read_text()
    assert [text for text in slower if text not in readme] == [], "README names the sizes at which MPI is faster"
    assert f"{min(ordinary):.1f} to {max(ordinary):.1f} times" in readme


@pytest.mark.jobs
def test_a_hang(scripts: Any, tmp_path: Path) -> None:
    script = scripts("draw_hang")
    events, printed = record(script, tmp_path)
    picture = script.drawn(events, script.report_in(printed))
    assert "rank 1: has not reached it" in picture
    assert texts_without_numbers(picture) == texts_without_numbers(script.PICTURE.read_text())


@pytest.mark.jobs
def test_two_levels(scripts: Any, tmp_path: Path) -> None:
    script = scripts("draw_two_levels")
    events, _ = record(script, tmp_path)
    picture = script.drawn(events)
    assert texts_without_numbers(picture) == texts_without_numbers(script.PICTURE.read_text())
    # Every rank has each of the 16 chunks in its shared memory, on its wire and out of it.
    for fill in (script.FILLS["fill chunk"], script.FILLS["chunk"], script.FILLS["copy chunk"]):
        assert len(re.findall(f'fill="{fill}" stroke="{fill}"', picture)) == 16 * script.RANKS
