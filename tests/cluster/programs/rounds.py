"""All-reduces round after round, small and of 16 MiB, until the file "enough" is there; or until one gives up.

A rank leaves what became of it: its host, how many rounds it did, and the error that ended them. Times are those of
CLOCK_MONOTONIC, which hosts of a lab share.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import numpy as np
from result import leave

import mpidist
from benchmarks.inputs import count_wrong, input_of, sum_of_inputs

LARGE = (16 << 20) // 4
ROUNDS_BEFORE_IT_GOES = 3
folder = Path(os.environ["RESULTS"])


def rounds(comm: mpidist.Communicator, found: dict[str, object]) -> None:
    value, expected = input_of(comm.rank, LARGE), sum_of_inputs(comm.size, LARGE)
    is_enough = False
    while not is_enough:
        # Rank 0 decides, and all see it in the same round.
        told = np.array([comm.rank == 0 and (folder / "enough").exists(), 1.0])
        total = np.asarray(comm.all_reduce("SUM", told))
        if total[1] != comm.size or count_wrong(comm.all_reduce("SUM", value), expected):
            raise AssertionError(f"rank {comm.rank}: wrong results in round {found['rounds']}")
        is_enough = bool(total[0])
        found["rounds"] = int(str(found["rounds"])) + 1
        if comm.rank == 0 and found["rounds"] == ROUNDS_BEFORE_IT_GOES:
            (folder / "going").touch()


comm = mpidist.Communicator()
found: dict[str, object] = {"host": socket.gethostname(), "rounds": 0, "error": None}
try:
    rounds(comm, found)
except BaseException as error:
    found |= {"error": type(error).__name__, "text": str(error)}
    raise
finally:
    leave(comm.rank, found | {"at": time.monotonic(), "process": os.getpid()})
comm.close()
print(f"rank {comm.rank} has come to its end", file=sys.stderr)
