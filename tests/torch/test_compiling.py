"""torch.compile of programs with collectives."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from mpi4py import MPI

from tests.torch.test_training import network, train, trained_alone

torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")
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


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of all ranks where inductor keeps what it compiled: a kernel is compiled by one of them."""
    folder: str = MPI.COMM_WORLD.bcast(str(tmp_path_factory.mktemp("inductor")))
    return folder


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch, compiled: str) -> None:
    """One that starts no threads, which would live as long as the process."""
    monkeypatch.setattr("torch._inductor.async_compile.get_compile_threads", lambda: 1)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", compiled)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", COMPILERS)
def test_functional_collectives(dist: Any, name: str) -> None:
    import torch.distributed._functional_collectives as functional

    def doubled_sum(tensor: Any) -> Any:
        return functional.all_reduce(2 * tensor, "sum", dist.group.WORLD) + 1

    compiled = torch.compile(doubled_sum, backend=name, fullgraph=True)
    for number in (1, 2):
        expected = 2 * number * dist.get_world_size() + 1
        assert compiled(torch.full((3,), float(number))).tolist() == [expected] * 3


@pytest.mark.parametrize("name", COMPILERS)
def test_plain_collectives(dist: Any, name: str) -> None:
    def total(tensor: Any) -> Any:
        tensor = 2 * tensor
        dist.all_reduce(tensor)
        return tensor + 1

    compiled = torch.compile(total, backend=name, fullgraph=True)
    for number in (1, 2):
        expected = 2 * number * dist.get_world_size() + 1
        assert compiled(torch.full((3,), float(number))).tolist() == [expected] * 3


@pytest.mark.parametrize("name", COMPILERS)
def test_ddp(dist: Any, name: str) -> None:
    model = torch.compile(nn.parallel.DistributedDataParallel(network()), backend=name)
    found = train(model, dist.get_rank())
    for mine, expected in zip(found, trained_alone(dist.get_world_size()), strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)
