"""The GPU of tests/gpu: whether there is one, and how several ranks share it."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

# Where this is set, the stand-in for CuPy takes the place of the GPU, so that these tests are tried without one.
STAND_IN = "TESTS_GPU_STAND_IN"


def is_stand_in() -> bool:
    """Whether there is no GPU, but the stand-in for CuPy."""
    return bool(os.environ.get(STAND_IN))


def use_stand_in_if_asked() -> None:
    """Install the stand-in for CuPy where ``STAND_IN`` says so: by how many seconds its streams are late at most."""
    if is_stand_in():
        from tests.support import fake_cupy
        from tests.support.fake_cupy import devices

        if devices.installed() is None:
            fake_cupy.install(devices=1, jitter=float(os.environ[STAND_IN]))


def problem() -> str | None:
    """Return why nothing can run on a GPU here, None where it can."""
    from benchmarks.measuring.machine import gpu_problem

    use_stand_in_if_asked()
    return gpu_problem()


def nccl_problem() -> str | None:
    """Return why NCCL cannot be used here, None where it can."""
    from mpidist.collectives.gpu import nccl as nccl_module

    return problem() or nccl_module.nccl_problem()


def join() -> tuple[Any, int]:
    """Return CuPy and the world's rank of this process, on its GPU; call it first on every rank.

    Several ranks may have one GPU: NCCL takes them for ranks of different hosts (docs/gpu.md, "Several ranks on one
    GPU").
    """
    from mpi4py import MPI

    import mpidist  # noqa: F401 - before MPI starts

    use_stand_in_if_asked()
    share_one_gpu(MPI.COMM_WORLD.rank)
    from mpidist.arrays.streams import require_cupy
    from mpidist.topology import world_topology
    from mpidist.topology.topology import devices_of_each, visible_devices

    cupy: Any = require_cupy()
    node = world_topology().node
    cupy.cuda.Device(devices_of_each(node.allgather(visible_devices()))[node.Get_rank()][0]).use()
    return cupy, MPI.COMM_WORLD.rank


def torch_problem() -> str | None:
    """Return why PyTorch cannot use a GPU here, None where it can."""
    if find_spec("torch") is None:
        return "needs PyTorch with CUDA"
    if problem() is None and not is_stand_in():
        import torch

        return None if torch.cuda.is_available() else "needs a PyTorch that sees the GPU"
    return problem()


def join_torch() -> Callable[[Any], Any]:
    """Return what puts a tensor of PyTorch on the GPU of this process; call it first on every rank.

    ``torch.distributed`` knows mpidist then, also where that is not installed.
    """
    cupy, _ = join()
    import torch

    import mpidist_torch_entry

    if "mpidist" not in torch.distributed.Backend.backend_list:
        mpidist_torch_entry.register()
    device: int = cupy.cuda.Device().id
    if is_stand_in():
        import pytest

        from tests.support import torch_on_gpu

        torch_on_gpu.install(pytest.MonkeyPatch(), device)
        return torch_on_gpu.on_gpu
    torch.cuda.set_device(device)
    return lambda tensor: tensor.cuda()


def share_one_gpu(rank: int) -> None:
    """Prepare NCCL, before its first use in this process, for other ranks on the same GPU."""
    os.environ.update(
        NCCL_HOSTID=f"mpidist-test-{rank}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_NET="Socket",
        NCCL_IB_DISABLE="1",
        NCCL_MNNVL_ENABLE="0",
        NCCL_NVLS_ENABLE="0",
        NCCL_RAS_ENABLE="0",
        NCCL_MAX_CTAS="2",
        NCCL_ALGO="Ring",
        NCCL_PROTO="Simple",
    )
    os.environ.setdefault("NCCL_DEBUG", "WARN")
