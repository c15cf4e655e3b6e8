"""docs/tutorials with models of Keras, on the backend that KERAS_BACKEND names."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.tutorials.documents import follow

pytestmark = [pytest.mark.counts, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("document", ["custom_training", "distributed_input", "save_and_load"])
def test_with_keras(keras: ModuleType, document: str, tmp_path: Path) -> None:
    backend = {"torch": "PyTorch", "jax": "JAX"}[keras.backend.backend()]
    follow(document, f"Keras on {backend}", tmp_path)
