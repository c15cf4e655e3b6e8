"""One rank asks for another shape than the others; argument: which one."""

from __future__ import annotations

import sys

import numpy as np
from result import leave

import mpidist

odd = int(sys.argv[1])
with mpidist.Communicator() as comm:
    try:
        comm.all_reduce("SUM", np.ones(1000 + (comm.rank == odd), np.float32))
        told = {"error": "none", "text": ""}
    except Exception as error:
        told = {"error": type(error).__name__, "text": str(error)}
    after = float(comm.all_reduce("SUM", 1.0))
    leave(comm.rank, told | {"after": after})
