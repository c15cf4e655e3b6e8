"""docs/tutorials with NumPy, and their tables; tests/torch and tests/keras have the other readers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tutorials.documents import FOLDER, blocks, follow

pytestmark = pytest.mark.counts

# How many blocks of code TensorFlow's page has, the one with its licence left out.
BLOCKS = {"custom_training": 18, "distributed_input": 21, "save_and_load": 17}
_ROW = re.compile(r"^\| (\d+) \| .+ \| (?:the same\b.*|differs: .+|not there: .+) \|$", re.MULTILINE)


@pytest.mark.parametrize("local_replicas", [1, 2])
@pytest.mark.parametrize("document", ["custom_training", "distributed_input"])
def test_with_numpy(document: str, local_replicas: int, tmp_path: Path) -> None:
    follow(document, "NumPy", tmp_path, local_replicas)


@pytest.mark.one_rank
@pytest.mark.parametrize("document", BLOCKS)
def test_every_block_of_tensorflow_is_judged(document: str) -> None:
    _, table = (FOLDER / f"{document}.md").read_text().split("## Block by block\n")
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert [int(number) for number in _ROW.findall(table)] == list(range(1, len(rows) + 1))
    assert len(rows) == BLOCKS[document]


@pytest.mark.one_rank
def test_every_block_is_for_somebody() -> None:
    """Also where the libraries are missing that it needs."""
    everything = [block for document in BLOCKS for block in blocks(document)]
    for block in everything:
        compile(block.code, "a block", "exec")
    readers = {name for block in everything for name in block.readers}
    assert readers == {"NumPy", "PyTorch", "Keras", "Keras on PyTorch", "Keras on JAX"}
