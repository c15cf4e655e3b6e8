"""The library is built as docs/architecture.md and CONTRIBUTING.md say: ``python -m tests.house`` counts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.house import calls
from tests.house.__main__ import figures

pytestmark = pytest.mark.one_rank
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return figures(ROOT)


def test_imports_go_down_and_in_no_circle(found: dict[str, Any]) -> None:
    assert found["imports upward"] == []
    assert found["circles of files"] == []


def test_one_name_stands_for_one_thing(found: dict[str, Any]) -> None:
    assert found["class names that occur twice"] == []
    assert found["file names that occur twice"] == []


def test_objects_keep_to_their_own(found: dict[str, Any]) -> None:
    assert len(found["private accesses"]) < 30, found["private accesses"]


def test_types_say_something(found: dict[str, Any]) -> None:
    assert found["Any"] < 500


def test_docstrings_come_to_the_point(found: dict[str, Any]) -> None:
    assert found['"what" in 10,000 words of docstrings'] <= 5
    assert found["first sentences of more than 15 words"] == []


BARS_OF_CALLS = {
    "all_reduce: files outside node/, channel/": 9,
    "apply_gradients: files": 24,
    "save: files": 20,
    "save: calls": 300,
    "save: collectives": 2,
}


@pytest.mark.jobs
def test_calls_cross_few_files() -> None:
    # A rank that is late on a busy machine takes the other one through more files.
    crossed: dict[str, int] = {}
    for _ in range(3):
        crossed = calls.figures(ROOT)
        if all(crossed[name] <= bar for name, bar in BARS_OF_CALLS.items()):
            return
    assert {name: crossed[name] for name in BARS_OF_CALLS} == BARS_OF_CALLS
