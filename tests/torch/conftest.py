"""What the tests of torch.distributed have in common."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import ModuleType

import pytest

import mpidist


@pytest.fixture(scope="module")
def dist() -> Iterator[ModuleType]:
    """torch.distributed with a default group of all ranks of this session."""
    pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")
    import torch.distributed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = {} if mpidist.size() > 1 else {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
        torch.distributed.init_process_group("mpidist", **alone)
    yield torch.distributed
    torch.distributed.destroy_process_group()
