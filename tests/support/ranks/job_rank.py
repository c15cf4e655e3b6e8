"""What a rank of a job of its own executes: call the function, write what it came to, leave together."""

from __future__ import annotations

import os
import pickle
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import mpidist  # noqa: F401 - it sets what the MPI of this machine needs, before MPI starts
from tests.support.ranks.outcomes import outcome_of
from tests.support.speed import scaled

if TYPE_CHECKING:
    from mpi4py import MPI

# How long a failed rank waits for the others: those that fail alike write their error too, and those that
# wait for this rank in a collective are then ended with the job.
_GRACE_SECONDS = scaled(3.0)


def main(folder: Path) -> int:
    """Run the call described in ``folder`` and return the exit status."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    private = world.Dup()
    outcome = outcome_of((folder / "call.pickle").read_bytes())
    failed = outcome.error is not None
    part = folder / f"{world.rank}.part"
    part.write_bytes(pickle.dumps(outcome))
    os.replace(part, folder / f"{world.rank}.pickle")
    if not MPI.Is_finalized():
        _leave(private, failed)
    return int(failed)


def _leave(comm: MPI.Comm, failed: bool) -> None:
    request = comm.Ibarrier()
    deadline = time.monotonic() + _GRACE_SECONDS
    while not request.Test():
        if failed and time.monotonic() > deadline:
            sys.stderr.flush()
            comm.Abort(1)
        time.sleep(0.001)
    comm.Free()


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    sys.exit(main(Path(sys.argv[1])))
