"""A folder that all ranks of the session see, also those that pytest gave folders of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def of_all_ranks(mine: Path) -> Iterator[Path]:
    """Return the first rank's folder (collective); when it is left, all ranks have left it."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    try:
        yield Path(world.bcast(str(mine)))
    finally:
        world.Barrier()
