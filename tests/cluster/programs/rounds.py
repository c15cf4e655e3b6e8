"""All-reduces round after round, small and of 16 MiB, until the file "enough" is there, or until one gives up.

Argument: whether a rank that gives up "raises" the error, so that the first one ends the job, or "ends" its program.
Each leaves what became of it: how many rounds it did, which error it got, and when, in time.monotonic() of all hosts.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from result import leave

import mpidist
from benchmarks.measuring.inputs import count_wrong, input_of, sum_of_inputs

LARGE = (16 << 20) // 4
ROUNDS_BEFORE_IT_GOES = 3
folder = Path(os.environ["RESULTS"])


def rounds(comm: mpidist.Communicator, found: dict[str, Any]) -> None:
    value, expected = input_of(comm.rank, LARGE), sum_of_inputs(comm.size, LARGE)
    is_enough = False
    while not is_enough:
        # Rank 0 decides, and all see it in the same round.
        told = np.array([comm.rank == 0 and (folder / "enough").exists(), 1.0])
        total = np.asarray(comm.all_reduce("SUM", told))
        if total[1] != comm.size or count_wrong(comm.all_reduce("SUM", value), expected):
            raise AssertionError(f"rank {comm.rank}: wrong results in round {found['rounds']}")
        is_enough = bool(total[0])
        found["rounds"] += 1
        if comm.rank == 0 and found["rounds"] == ROUNDS_BEFORE_IT_GOES:
            (folder / "going").touch()


# In communicators but the first of all ranks, who keeps the others waiting is asked after half a second.
first, comm = mpidist.Communicator(), mpidist.Communicator()
found: dict[str, Any] = {"rounds": 0, "error": None}
try:
    rounds(comm, found)
except mpidist.CollectiveTimeoutError as error:
    found |= {"error": type(error).__name__, "text": str(error)}
    if sys.argv[1] == "raises":
        raise
else:
    comm.close()
    first.close()
finally:
    leave(comm.rank, found | {"at": time.monotonic()})
