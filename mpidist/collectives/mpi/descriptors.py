"""The check that every rank has the file descriptors for a communicator."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from mpidist.core.errors import PeerError
from mpidist.topology import import_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

# MPI's shared window and mpidist's shared memory take a few for a moment; without them Open MPI ends with a
# segmentation fault, or leaves the other ranks waiting in a call that has no deadline.
_NEEDED = 8


def check_descriptors(comm: MPI.Intracomm) -> None:
    """Check that every rank of ``comm`` can open some more files (collective).

    Raises:
        OSError: This rank cannot.
        PeerError: Another rank cannot.
    """
    rank, lacks = comm.Get_rank(), not _can_open(_NEEDED)
    lacking = int(comm.allreduce(rank if lacks else -1, op=import_mpi().MAX))
    lack = f"has fewer than {_NEEDED} file descriptors left, which making a communicator takes; type: ulimit -n 4096"
    if lacks:
        raise OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)}: rank {rank} {lack}")
    if lacking >= 0:
        raise PeerError(f"rank {lacking} {lack}")


def _can_open(count: int) -> bool:
    opened: list[int] = []
    try:
        while len(opened) < count:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return False
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return True
