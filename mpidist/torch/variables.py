"""The environment variables in which programs of torch.distributed look for their place."""

from __future__ import annotations

import os

from mpidist.topology.environments import read_launcher


def set_variables() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE as the launcher has them.

    Those that are set stay. A launcher that does not tell all of them gets none set that it does not tell.
    """
    info = read_launcher()
    if info is None or info.size is None or "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return
    told = {
        "RANK": info.rank,
        "WORLD_SIZE": info.size,
        "LOCAL_RANK": info.local_rank,
        "LOCAL_WORLD_SIZE": info.local_size,
    }
    for name, value in told.items():
        if value is not None:
            os.environ.setdefault(name, str(value))
