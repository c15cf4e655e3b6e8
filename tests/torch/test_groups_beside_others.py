"""Groups of mpidist beside a default group of another backend."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.support.ranks import jobs

pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")

pytestmark = [pytest.mark.torch, pytest.mark.one_rank, pytest.mark.jobs]

GROUPS = """
import sys, torch, torch.distributed as dist

def total(group, tensor=None):
    tensor = torch.full((1000,), float(dist.get_rank())) if tensor is None else tensor
    dist.all_reduce(tensor, group=group)
    return tensor[-1].item()

dist.init_process_group(sys.argv[1])
rank = dist.get_rank()
members = ([0, 1], [1, 3], [3, 1, 0, 2])
for turn in range(2):
    groups = [dist.new_group(ranks, backend="mpidist") for ranks in members]
    mine = [(group, ranks) for group, ranks in zip(groups, members) if rank in ranks]
    for _ in range(3):
        for group, ranks in mine:
            assert dist.get_backend(group) == "mpidist"
            assert total(group) == sum(ranks), (rank, ranks)
            part = torch.tensor([rank])
            parts = [torch.zeros_like(part) for _ in ranks]
            dist.all_gather(parts, part, group=group)
            assert [int(part) for part in parts] == sorted(ranks)
            tensor = torch.tensor([float(rank)])
            dist.broadcast(tensor, max(ranks), group=group)
            assert tensor.item() == max(ranks)
        assert total(None) == 6
    works = []
    for group, ranks in mine:
        tensor = torch.full((1 << 16,), float(rank))
        works.append((dist.all_reduce(tensor, group=group, async_op=True), tensor, ranks))
    for work, tensor, ranks in reversed(works):
        work.wait()
        assert tensor[-1].item() == sum(ranks)
    for group, _ in mine:
        dist.destroy_process_group(group)
dist.destroy_process_group()
print("end", rank)
"""


@pytest.mark.parametrize("default", ["gloo", "mpidist"])
@pytest.mark.parametrize("per_node", [None, 2], ids=["one node", "two nodes"])
def test_groups_of_some_ranks(default: str, per_node: int | None) -> None:
    done = jobs.run_script(GROUPS, 4, default, ranks_per_node=per_node)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"end {rank}" for rank in range(4)]


# Its ranks are those of MPI in reverse.
REVERSED = """
import os
from mpi4py import MPI
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": sys.argv[2]}
os.environ["RANK"] = str(MPI.COMM_WORLD.size - 1 - MPI.COMM_WORLD.rank)
"""


def test_ranks_of_torch_in_another_order_than_those_of_mpi() -> None:
    program = GROUPS.replace("\ndef total", f"{REVERSED}\ndef total", 1)
    done = jobs.run_script(program, 4, "gloo", str(free_port()))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"end {rank}" for rank in range(4)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


LOCAL = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
for _ in range(2):
    if dist.get_rank() != 1:
        group = dist.new_group([0, 2], backend="mpidist", use_local_synchronization=True)
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [2.0] * 3
        dist.destroy_process_group(group)
dist.barrier()
print("end")
"""


def test_only_members_call_new_group() -> None:
    done = jobs.run_script(LOCAL, 3)
    assert (done.returncode, done.stdout.split()) == (0, ["end"] * 3), done.stderr


LATE = """
import datetime, torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    try:
        dist.new_group([0, 1], backend="mpidist", timeout=datetime.timedelta(seconds=1), use_local_synchronization=True)
    except dist.DistStoreError as error:
        assert "MPI rank of group rank 1" in str(error), error
        print("late")
dist.barrier()
"""


def test_a_member_that_never_calls_new_group_is_named() -> None:
    done = jobs.run_script(LATE, 2)
    assert (done.returncode, done.stdout.split()) == (0, ["late"]), done.stderr


WITHOUT_MPI = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="tcp://localhost:" + sys.argv[2], rank=int(sys.argv[1]), world_size=2)
try:
    dist.new_group([0, 1], backend="mpidist")
except Exception as error:
    print(type(error).__name__, error)
"""


def test_ranks_without_mpi_are_an_error() -> None:
    port = str(free_port())
    environment = jobs.child_environment()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WITHOUT_MPI, str(rank), port],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(ranks):
        output, _ = process.communicate(timeout=100)
        assert output.startswith(f"LaunchError This process was started with rank {rank} of 2"), output
