"""What each node sends in an all-reduce; arguments: MiB, and the interface."""

from __future__ import annotations

import sys

from result import leave

import mpidist
from benchmarks.measuring.inputs import count_wrong, input_of, sum_of_inputs
from benchmarks.measuring.wire import Sent

count, interface = (int(sys.argv[1]) << 20) // 4, sys.argv[2]
with mpidist.Communicator() as comm:
    value = input_of(comm.rank, count)
    # The first call makes connections and plans.
    comm.all_reduce("SUM", value)
    comm.barrier()
    before = Sent.by(interface)
    comm.barrier()
    result = comm.all_reduce("SUM", value)
    comm.barrier()
    after = Sent.by(interface)
    comm.barrier()
    wrong = count_wrong(result, sum_of_inputs(comm.size, count))
    found = {"raw": after.nbytes - before.nbytes, "data": after.data_since(before), "wrong": wrong}
    leave(comm.rank, found | {"algorithm": comm.last_algorithm})
