"""What a training meets, one after the other, on many ranks; arguments: the steps, by their names here.

All ranks leave what they found, before the step "killed", in which one kills itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from result import leave

import mpidist
from benchmarks.cases.scale import since_start
from benchmarks.measuring.inputs import count_wrong, input_of, sum_of_inputs
from mpidist.checkpoint import writer

KIB, MIB = 1 << 10, 1 << 20
BYTES = (8, 12, 4 * KIB, 64 * KIB, 64 * KIB + 4, MIB, 16 * MIB)
ROWS, BATCH = 5_000, 300
VALUES = 4 * MIB
# Each rank writes a file where there is so much for it.
writer.SMALLEST_FILE_BYTES = 64 * KIB
ODD = 37
# More than twice MPIDIST_WARN_AFTER of those that run this.
ASLEEP_SECONDS = 25.0
folder = Path(os.environ["RESULTS"])


def sums(strategy: mpidist.Strategy, comm: mpidist.Communicator) -> dict[str, Any]:
    wrong, took = {}, {}
    for size in BYTES:
        comm.barrier()
        begin = time.perf_counter()
        result = comm.all_reduce("SUM", input_of(comm.rank, size // 4))
        took[size] = time.perf_counter() - begin
        wrong[size] = count_wrong(result, sum_of_inputs(comm.size, size // 4))
    return {"wrong": wrong, "took": took}


def mismatch(strategy: mpidist.Strategy, comm: mpidist.Communicator) -> dict[str, Any]:
    try:
        comm.all_reduce("SUM", np.ones(1000 + (comm.rank == ODD % comm.size), np.float32))
        told = {"error": "none", "text": ""}
    except mpidist.MismatchError as error:
        told = {"error": type(error).__name__, "text": str(error)}
    return told | {"after": float(comm.all_reduce("SUM", 1.0))}


def rows(strategy: mpidist.Strategy, comm: mpidist.Communicator) -> dict[str, Any]:
    dataset = mpidist.Dataset.range(ROWS).shuffle(seed=1).batch(BATCH)
    batches = strategy.experimental_distribute_dataset(dataset)
    dealt = [part for batch in batches for part in strategy.experimental_local_results(batch)]
    return {"rows": [int(row) for row in np.concatenate(dealt)]}


def model(strategy: mpidist.Strategy, factor: float) -> dict[str, Any]:
    with strategy.scope():
        return {name: mpidist.Variable(factor * np.arange(VALUES // 4, dtype=np.float32)) for name in ("v", "w")}


def save(strategy: mpidist.Strategy, comm: mpidist.Communicator) -> dict[str, Any]:
    path = Path(mpidist.Checkpoint(**model(strategy, 2.0)).save(folder / "ckpt", sharded=True))
    return {"files": len([*path.glob("data*")])}


def restore(strategy: mpidist.Strategy, comm: mpidist.Communicator) -> dict[str, Any]:
    theirs, expected = model(strategy, 0.0), model(strategy, 2.0)
    mpidist.Checkpoint(**theirs).restore(folder / "ckpt-1").assert_consumed()
    return {"wrong": [name for name in theirs if not np.array_equal(theirs[name].numpy(), expected[name].numpy())]}


def late(strategy: mpidist.Strategy, comm: mpidist.Communicator) -> dict[str, Any]:
    comm.barrier()
    if comm.rank == ODD % comm.size:
        time.sleep(ASLEEP_SECONDS)  # asleep
    return {"after": float(comm.all_reduce("SUM", 1.0))}


def killed(comm: mpidist.Communicator) -> None:
    comm.barrier()
    if comm.rank == ODD % comm.size:
        (folder / "killed").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        comm.all_reduce("SUM", 1.0)


STEPS = {step.__name__: step for step in (sums, mismatch, rows, save, restore, late)}
comm = mpidist.Communicator()
found: dict[str, Any] = {"start": since_start()}
with mpidist.MultiWorkerMirroredStrategy() as strategy:
    for name in sys.argv[1:]:
        if name in STEPS:
            begin = time.monotonic()
            found[name] = STEPS[name](strategy, comm)
            found[name]["seconds"] = time.monotonic() - begin
leave(comm.rank, found)
if "killed" in sys.argv:
    killed(comm)
comm.close()
