"""torch.compile of programs with collectives."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from tests.torch.test_training import network, train, trained_alone

torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install 'mpidist[torch]'")
nn = torch.nn

pytestmark = [
    pytest.mark.torch,
    pytest.mark.powers,
    # torch warns of its own deprecated parts.
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(300),
]

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
COMPILERS = ["aot_eager", pytest.param("inductor", marks=needs_compiler)]


@pytest.fixture(scope="module", autouse=True)
def compiler_has_started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An empty cache for all that the compiler writes, and no threads of its own, which live as long as the process."""
    import torch._inductor.config as config

    folder = str(tmp_path_factory.mktemp("inductor"))
    with patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder), config.patch(compile_threads=1):
        if shutil.which("g++") is not None:
            torch.compile(torch.sin)(torch.ones(3))
        yield


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("compiler", COMPILERS)
def test_functional_collectives(dist: Any, compiler: str) -> None:
    import torch.distributed._functional_collectives as functional

    def doubled_sum(tensor: Any) -> Any:
        return functional.all_reduce(2 * tensor, "sum", dist.group.WORLD) + 1

    compiled = torch.compile(doubled_sum, backend=compiler, fullgraph=True)
    for number in (1, 2):
        expected = 2 * number * dist.get_world_size() + 1
        assert compiled(torch.full((3,), float(number))).tolist() == [expected] * 3


@pytest.mark.parametrize("compiler", COMPILERS)
def test_plain_collectives(dist: Any, compiler: str) -> None:
    def total(tensor: Any) -> Any:
        tensor = 2 * tensor
        dist.all_reduce(tensor)
        return tensor + 1

    compiled = torch.compile(total, backend=compiler, fullgraph=True)
    for number in (1, 2):
        expected = 2 * number * dist.get_world_size() + 1
        assert compiled(torch.full((3,), float(number))).tolist() == [expected] * 3


@pytest.mark.parametrize("compiler", COMPILERS)
def test_ddp(dist: Any, compiler: str) -> None:
    model = torch.compile(nn.parallel.DistributedDataParallel(network()), backend=compiler)
    found = train(model, dist.get_rank())
    for mine, expected in zip(found, trained_alone(dist.get_world_size()), strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)
