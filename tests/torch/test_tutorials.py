"""docs/tutorials with models of PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tutorials.documents import follow

pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")
pytestmark = [pytest.mark.torch, pytest.mark.counts]


@pytest.mark.parametrize("local_replicas", [1, 2])
@pytest.mark.parametrize("document", ["custom_training", "distributed_input", "save_and_load"])
def test_with_torch(document: str, local_replicas: int, tmp_path: Path) -> None:
    follow(document, "PyTorch", tmp_path, local_replicas)
