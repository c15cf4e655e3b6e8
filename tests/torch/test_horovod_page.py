"""The calls in the table of docs/horovod.md, over mpidist."""

from __future__ import annotations

from textwrap import dedent

import pytest

from tests.support.ranks import jobs

pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")

pytestmark = [pytest.mark.torch, pytest.mark.one_rank, pytest.mark.jobs, pytest.mark.timeout(300)]


def test_calls_of_the_table() -> None:
    program = """
    import os

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("mpidist")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert int(os.environ["LOCAL_RANK"]) == rank and int(os.environ["LOCAL_WORLD_SIZE"]) == size

    sizes = [None] * size
    dist.all_gather_object(sizes, rank + 1)
    parts = [torch.empty(rows, 2) for rows in sizes]
    dist.all_gather(parts, torch.full((rank + 1, 2), float(rank)))
    assert [part.tolist() for part in parts] == [[[0.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]]]

    told = [{"from": 0} if rank == 0 else None]
    dist.broadcast_object_list(told)
    assert told == [{"from": 0}]

    xs = [torch.ones(3), torch.ones(5)]
    for work in [dist.all_reduce(x, async_op=True) for x in xs]:
        work.wait()
    assert [x.sum().item() for x in xs] == [6.0, 10.0]

    out = torch.empty(2 if rank == 0 else 4)
    dist.all_to_all_single(out, torch.full((3,), float(rank)), [1, 1] if rank == 0 else [2, 2], [1, 2])
    assert out.tolist() == ([0.0, 1.0] if rank == 0 else [0.0, 0.0, 1.0, 1.0])

    torch.manual_seed(rank)
    ddp = DistributedDataParallel(nn.Linear(4, 1))
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with Join([ddp]):
        for _ in range(3 + rank):
            with ddp.no_sync():
                ddp(torch.ones(2, 4)).sum().backward()
            ddp(torch.ones(2, 4)).sum().backward()
    weights = [torch.empty_like(ddp.module.weight) for _ in range(size)]
    dist.all_gather(weights, ddp.module.weight.detach())
    assert torch.equal(*weights)
    dist.destroy_process_group()
    """
    done = jobs.run_script(dedent(program), 2, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
