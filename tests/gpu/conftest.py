"""Settings of the tests that need a GPU: they are marked ``gpu``, and skipped with the reason where there is none."""

from __future__ import annotations

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
        if problem is not None:
            item.add_marker(pytest.mark.skip(reason=problem))


@pytest.fixture
def cupy() -> Any:
    from mpidist.arrays.cupy_module import require_cupy

    return require_cupy()
