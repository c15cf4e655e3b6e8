"""docs/tutorials with models of Keras, on the backend that KERAS_BACKEND names."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.tutorials.documents import follow

pytestmark = [pytest.mark.counts, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize(
    ("document", "local_replicas"),
    [
        # Adopted as a module of PyTorch, or called by JAX, a Keras model has one replica in a process.
        ("custom_training", 1),
        *((document, count) for document in ("distributed_input", "save_and_load") for count in (1, 2)),
    ],
)
def test_with_keras(keras: ModuleType, document: str, local_replicas: int, tmp_path: Path) -> None:
    backend = {"torch": "PyTorch", "jax": "JAX"}[keras.backend.backend()]
    follow(document, f"Keras on {backend}", tmp_path, local_replicas)
