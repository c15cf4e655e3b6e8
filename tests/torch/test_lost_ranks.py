"""A rank of torch.distributed that is killed: the others end soon, with a report that names it."""

from __future__ import annotations

import time
from textwrap import dedent

import pytest

from tests.support.ranks import jobs
from tests.support.speed import scaled

pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")

pytestmark = [pytest.mark.torch, pytest.mark.one_rank, pytest.mark.jobs]

START = """
import os, signal, torch, torch.distributed as dist
from torch import nn
dist.init_process_group("mpidist")
rank = dist.get_rank()
torch.manual_seed(0)

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def train(model, layer):
    for step in range(1000):
        if rank == 1 and step == 5:
            layer.register_forward_hook(lambda module, given, result: result.register_hook(kill) and None)
        model(torch.ones(4, 100)).sum().backward()
    print("not reached")
"""

PROGRAMS = {
    "DDP": """
        network = nn.Sequential(*(nn.Linear(100, 100) for _ in range(4)))
        train(nn.parallel.DistributedDataParallel(network, bucket_cap_mb=0.01), network[1])
    """,
    "FSDP2": """
        from torch.distributed.fsdp import fully_shard

        network = nn.Sequential(*(nn.Linear(100, 100) for _ in range(4)))
        for layer in network:
            fully_shard(layer)
        train(fully_shard(network), network[1])
    """,
    "a started collective": """
        tensors = [torch.ones(1 << 18) for _ in range(4)]
        for step in range(1000):
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            if rank == 1 and step == 5:
                kill()
            for work in works:
                work.wait()
        print("not reached")
    """,
    "a future": """
        for step in range(1000):
            if rank == 1 and step == 5:
                kill()
            dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()
        print("not reached")
    """,
    "a message": """
        for step in range(1000):
            if rank == 1 and step == 5:
                kill()
            dist.send(torch.ones(3), 0) if rank == 1 else dist.recv(torch.ones(3), 1)
        print("not reached")
    """,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_rank_that_is_killed_ends_all(name: str) -> None:
    began = time.monotonic()
    done = jobs.run_script(START + dedent(PROGRAMS[name]), 2)
    assert done.returncode != 0
    assert "not reached" not in done.stdout
    assert "signal 9" in (done.stdout + done.stderr).lower(), done.stderr
    assert time.monotonic() - began < scaled(30)
