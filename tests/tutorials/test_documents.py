"""docs/tutorials with NumPy; tests/torch and tests/keras have their readers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tutorials.documents import follow

pytestmark = pytest.mark.counts


@pytest.mark.parametrize("local_replicas", [1, 2])
@pytest.mark.parametrize("document", ["custom_training", "distributed_input"])
def test_with_numpy(document: str, local_replicas: int, tmp_path: Any) -> None:
    follow(document, "NumPy", tmp_path, local_replicas)
