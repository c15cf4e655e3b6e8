"""Tensors of PyTorch on GPUs through torch.distributed over mpidist, on ranks that share a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu import machine
from tests.support.ranks.jobs import run_alone

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.one_rank,
    pytest.mark.timeout(120),
    pytest.mark.skipif(machine.torch_problem() is not None, reason=machine.torch_problem() or ""),
]

LIMIT_SECONDS = 100.0
# Ranks, and ranks per virtual node.
LAYOUTS = [pytest.param(2, None, id="1x2"), pytest.param(2, 1, id="2x1")]
NAMES = ["float32", "float16", "bfloat16", "float64", "int16", "int64", "complex64", "bool"]
COUNT = 70_001


def _opened() -> tuple[Any, Any, Callable[[Any], Any]]:
    """Return torch, torch.distributed with a group of all ranks, and what puts a tensor on this rank's GPU."""
    import torch
    import torch.distributed as dist

    put = machine.join_torch()
    dist.init_process_group("mpidist")
    return torch, dist, put


def _collectives() -> bool:
    torch, dist, put = _opened()
    rank, size = dist.get_rank(), dist.get_world_size()
    for name in NAMES:
        mine = torch.full((300, 7), rank + 1).to(getattr(torch, name))
        on_host, tensor = mine.clone(), put(mine)
        address = tensor.data_ptr()
        dist.all_reduce(on_host)
        dist.all_reduce(tensor)
        assert tensor.data_ptr() == address
        assert torch.equal(tensor.cpu(), on_host), name
    parts = [put(torch.zeros(COUNT)) for _ in range(size)]
    dist.all_gather(parts, put(torch.full((COUNT,), float(rank))))
    assert [part.cpu().unique().tolist() for part in parts] == [[other] for other in range(size)]
    kept = put(torch.zeros(COUNT))
    dist.reduce_scatter(kept, [put(torch.full((COUNT,), float(other))) for other in range(size)])
    assert (kept.cpu() == size * rank).all()
    dist.broadcast(kept, size - 1)
    assert (kept.cpu() == size * (size - 1)).all()
    whole = put(torch.zeros(size, 3))
    dist.all_to_all_single(whole, put(torch.full((size, 3), float(rank))))
    assert whole.cpu()[:, 0].tolist() == list(range(size))
    dist.destroy_process_group()
    return True


def _streams() -> bool:
    """Started on one stream, waited for on another, and by functions of futures; the inputs are dropped at once."""
    torch, dist, put = _opened()
    rank, size = dist.get_rank(), dist.get_world_size()
    total = size * (size + 1) // 2
    for number in range(10):
        made, used = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(made):
            tensors = [put(torch.full((COUNT + k,), rank + 1.0)).mul_(k + 1) for k in range(3)]
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            doubled = [work.get_future().then(lambda done: [done.value()[0] * 2]) for work in works]
            targets = [put(torch.zeros(60, 40)).t() for _ in range(size)]
            gathering = dist.all_gather(targets, put(torch.full((40, 60), rank + 1.0)), async_op=True)
        with torch.cuda.stream(used):
            for k, work in enumerate(works):
                work.wait()
                assert (tensors[k].cpu() == total * (k + 1)).all(), (number, k)
            gathering.wait()
            assert [target.cpu().unique().tolist() for target in targets] == [[other + 1] for other in range(size)]
            if not machine.is_stand_in():  # PyTorch's own future in between knows nothing of its streams
                assert all((future.wait()[0].cpu() == 2 * total * (k + 1)).all() for k, future in enumerate(doubled))
    dist.destroy_process_group()
    return True


def _ddp() -> list[float]:
    torch, dist, put = _opened()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1)).cuda()
    model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(8 * size, 20)
    for _ in range(5):
        optimizer.zero_grad()
        model(put(inputs[rank::size])).square().mean().backward()
        optimizer.step()
    weights: list[float] = torch.cat([part.detach().reshape(-1).cpu() for part in model.parameters()]).tolist()
    dist.destroy_process_group()
    return weights


@pytest.mark.parametrize(("ranks", "per_node"), LAYOUTS)
def test_collectives(ranks: int, per_node: int | None) -> None:
    assert run_alone(_collectives, ranks, ranks_per_node=per_node, timeout=LIMIT_SECONDS) == [True] * ranks


@pytest.mark.parametrize(("ranks", "per_node"), LAYOUTS)
def test_streams(ranks: int, per_node: int | None) -> None:
    assert run_alone(_streams, ranks, ranks_per_node=per_node, timeout=LIMIT_SECONDS) == [True] * ranks


def test_ddp_trains_as_one_process_does() -> None:
    if machine.is_stand_in():
        pytest.skip("DDP's reducer is C++, of which the stand-in knows nothing")
    (alone,) = run_alone(_ddp, 1, timeout=LIMIT_SECONDS)
    for weights in run_alone(_ddp, 2, timeout=LIMIT_SECONDS):
        assert weights == pytest.approx(alone, abs=1e-5)
