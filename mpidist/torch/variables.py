"""The environment variables that programs of torch.distributed read."""

from __future__ import annotations

import logging
import os

from mpidist.topology.launchers import read_launcher


def set_variables() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE from the launcher's variables.

    Does not change variables that are set. Skips variables whose value the launcher does not provide.
    """
    info = read_launcher()
    if info is None or info.size is None or "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return
    set_missing(RANK=info.rank, WORLD_SIZE=info.size, LOCAL_RANK=info.local_rank, LOCAL_WORLD_SIZE=info.local_size)


def set_missing(**values: int | str | None) -> None:
    """Set known variables that are missing, and mark those that users often set."""
    for name, value in values.items():
        if value is None or name in os.environ:
            continue
        os.environ[name] = str(value)
        if name in ("WORLD_SIZE", "MASTER_ADDR"):
            os.environ[f"{name}_OF_MPIDIST"] = str(value)


def report_default_backend() -> None:
    """Log on rank 0 that torch chose its own backend."""
    info = read_launcher()
    if info is not None and info.rank == 0:
        logging.getLogger("mpidist").warning(
            "mpidist: init_process_group() was called without a backend, so PyTorch uses its defaults: gloo for CPU "
            'tensors, nccl for CUDA tensors. To communicate over MPI, use init_process_group("mpidist").'
        )
