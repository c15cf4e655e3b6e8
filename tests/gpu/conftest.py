"""Settings of the tests that need a GPU: they are marked ``gpu``, and skipped with the reason where there is none."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import machine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    mine = [item for item in items if here in item.path.parents]
    problem = machine.problem() if mine else None
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        reason = problem or _bfloat16_problem(item)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _bfloat16_problem(item: pytest.Item) -> str | None:
    """Return why a test of arrays of bfloat16 cannot run, None for one that can."""
    given = item.callspec.params.values() if hasattr(item, "callspec") else ()
    is_meant = any(value == "bfloat16" or (isinstance(value, list) and "bfloat16" in value) for value in given)
    return "bfloat16 needs ml_dtypes" if is_meant and find_spec("ml_dtypes") is None else None


@pytest.fixture
def cupy() -> Any:
    from mpidist.arrays.streams import require_cupy

    return require_cupy()
