"""docs/tutorials with models of Keras, on the backend that KERAS_BACKEND names."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.tutorials.documents import follow

pytestmark = [pytest.mark.counts, pytest.mark.filterwarnings("default")]


TWO_IN_A_PROCESS = pytest.param(2, marks=pytest.mark.one_rank)


@pytest.mark.parametrize("local_replicas", [1, TWO_IN_A_PROCESS])
@pytest.mark.parametrize("document", ["custom_training", "distributed_input", "save_and_load"])
def test_with_keras(keras: ModuleType, document: str, local_replicas: int, tmp_path: Path) -> None:
    if (document, local_replicas) == ("custom_training", 2):
        pytest.skip("adopted as a module of PyTorch, or called by JAX, a Keras model has one replica in a process")
    backend = {"torch": "PyTorch", "jax": "JAX"}[keras.backend.backend()]
    follow(document, f"Keras on {backend}", tmp_path, local_replicas)
