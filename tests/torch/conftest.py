"""What the tests of torch.distributed have in common."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def dist() -> Iterator[ModuleType]:
    """torch.distributed with a default group of all ranks of this session."""
    pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")
    import torch.distributed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.init_process_group("mpidist")
    yield torch.distributed
    torch.distributed.destroy_process_group()
