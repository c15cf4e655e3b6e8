"""Long programs of torch.distributed leave nothing behind: memory, open files, shared memory and communicators."""

from __future__ import annotations

import pytest

from tests.support.ranks import jobs

pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")

pytestmark = [pytest.mark.torch, pytest.mark.one_rank, pytest.mark.jobs]

PROGRAM = """
import ctypes, gc, os, threading
import torch, torch.distributed as dist
from torch import nn

from mpidist.collectives.channel.channel import open_channels

def held():
    gc.collect()
    # What is free lies in the heaps of threads that have ended, more or less of it.
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as file:
        kibibytes = next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))
    shared = [name for name in os.listdir("/dev/shm") if name.startswith(f"mpidist-{os.getpid()}-")]
    counts = {
        "open files": len(os.listdir("/proc/self/fd")),
        "mappings of shared memory": sum("/dev/shm" in line for line in open("/proc/self/maps")),
        "files in /dev/shm": len(shared),
        "communicators": len(open_channels),
        "threads": threading.active_count(),
        "keys of the store": dist.distributed_c10d._get_default_store().num_keys(),
    }
    return kibibytes / 1024, counts

def check(work, times, warm, mebibytes):
    for _ in range(warm):
        work()
    dist.barrier()
    memory, before = held()
    # A rank that continues adds keys, which the others must not count.
    dist.barrier()
    for _ in range(times - warm):
        work()
    dist.barrier()
    more, after = held()
    assert after == before, f"{before} before, {after} after"
    assert more - memory < mebibytes, f"{more - memory:.1f} MiB more"
    print(f"{more - memory:.1f} MiB more")

dist.init_process_group("mpidist")
torch.manual_seed(0)
"""

STEPS = """
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)), bucket_cap_mb=1e-5)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
total = torch.ones(3)
parts = [torch.empty(3) for _ in range(dist.get_world_size())]

def step():
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    dist.all_reduce(total)
    dist.all_gather(parts, total)
    total.div_(1000)

check(step, 10_000, 500, 4)
dist.destroy_process_group()
"""

GROUPS = """
def group():
    group = dist.new_group([0, 1])
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor, group=group, async_op=True).wait()
    dist.destroy_process_group(group)

check(group, 1000, 50, 4)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("program", [STEPS, GROUPS], ids=["10,000 steps", "1,000 groups"])
def test_nothing_is_left(program: str) -> None:
    done = jobs.run_script(PROGRAM + program, 2, timeout=100)
    assert done.returncode == 0, done.stderr
