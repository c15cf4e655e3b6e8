"""Folders that all ranks see, and damage to the files in them."""

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


def damage(path: Path, name: str = "data.safetensors") -> None:
    """Flip a bit near the end of a file of a checkpoint."""
    content = bytearray((path / name).read_bytes())
    content[-20] ^= 4
    (path / name).write_bytes(content)
