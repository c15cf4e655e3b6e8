"""The environment variables in which programs of torch.distributed look for their place."""

from __future__ import annotations

import os

from mpidist.topology.environments import OWN_WORLD_SIZE, read_launcher


def set_variables() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE from the launcher's variables.

    Variables that are set stay. A variable is skipped if the launcher does not tell its value.
    """
    info = read_launcher()
    if info is None or info.size is None or "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return
    set_missing(info.rank, info.size, info.local_rank, info.local_size)


def set_missing(rank: int, size: int, local_rank: int | None, local_size: int | None) -> None:
    """Set the variables that are missing and known, and record a WORLD_SIZE of mpidist's own."""
    known = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    if "WORLD_SIZE" not in os.environ:
        os.environ[OWN_WORLD_SIZE] = str(size)
    for name, value in known.items():
        if value is not None:
            os.environ.setdefault(name, str(value))
