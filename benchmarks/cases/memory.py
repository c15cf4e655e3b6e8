"""Memory: what an all-reduce takes beyond its arrays, what variables take, and whether anything grows over steps."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import mpidist
from benchmarks.measuring.inputs import Array, input_of
from benchmarks.measuring.models import MODELS, Shape, size_of
from benchmarks.measuring.rows import Figure
from benchmarks.measuring.session import Session, algorithm_of
from mpidist.experimental import CentralStorageStrategy
from mpidist.topology import world_topology

if TYPE_CHECKING:
    from mpi4py import MPI

LARGE, SMALL = "resnet50", "small_cnn"
_SAMPLE_SECONDS = 0.001
# Inputs, results, and what is allowed beyond them.
_SETS = 4


def own_memory(kind: str = "Pss") -> int:
    """Return the bytes this process holds; memory that k processes share counts as its k-th part in each.

    Args:
        kind: All of it, or ``Pss_Shmem`` for that in files of /dev/shm and the like.
    """
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/smaps_rollup has no line {kind}; the memory benchmark needs Linux 5.0 or newer")


def shm_used() -> int:
    """Return the bytes taken in /dev/shm, by anyone."""
    state = os.statvfs("/dev/shm")
    return (state.f_blocks - state.f_bfree) * state.f_frsize


def run(session: Session, steps: int, advance: Callable[[str], None]) -> None:
    """Measure both with a communicator of their own, which has no buffers from before (collective)."""
    with mpidist.Communicator(session.bare, options=session.options) as comm:
        advance("memory of one all-reduce")
        if session.has_memory_for(_SETS * size_of(MODELS[LARGE]()), f"memory of {LARGE}"):
            _beyond_arrays(session, comm)
        advance(f"memory over {steps} steps")
        _growth(session, comm, steps)
    advance("memory of variables")
    if world_topology().num_nodes > 1:
        session.skipped.append("central_storage: the ranks are on several nodes")
    elif session.has_memory_for(size_of(MODELS[LARGE]()), f"variables of {LARGE}"):
        _central_storage(session)


def _arrays(session: Session, shapes: list[Shape]) -> list[Array]:
    return [input_of(session.rank, math.prod(shape)).reshape(shape) for shape in shapes]


def _beyond_arrays(session: Session, comm: mpidist.Communicator) -> None:
    """Compare memory before with the most that is held during all-reduces of the gradients of ResNet-50."""
    shapes = MODELS[LARGE]()
    values, outs = _arrays(session, shapes), _arrays(session, shapes)
    session.bare.Allreduce(values[0], outs[0])
    before = own_memory()
    session.bare.Barrier()
    with _peak() as samples:
        for _ in range(3):
            comm.all_reduce("SUM", values, out=outs)
    beyond: int = session.bare.allreduce(max(samples) - before)
    buffers = beyond / world_topology().num_nodes / size_of(shapes)
    session.figures.append(Figure("memory", "beyond_arrays", buffers, "buffers", algorithm_of(comm)))


@contextmanager
def _peak() -> Iterator[list[int]]:
    """Sample this process's memory from a thread while the block runs, and once after it."""
    samples: list[int] = []
    over = threading.Event()

    def sample() -> None:
        while not over.wait(_SAMPLE_SECONDS):
            samples.append(own_memory())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()
        samples.append(own_memory())


def _growth(session: Session, comm: mpidist.Communicator, steps: int) -> None:
    """Compare memory after a tenth of the steps with that after all; each reduces gradients and a loss."""
    values = _arrays(session, MODELS[SMALL]())
    before: tuple[int, int] = (0, 0)
    for step in range(steps):
        comm.all_reduce("MEAN", 1.0)
        comm.all_reduce("SUM", values)
        if step == steps // 10:
            before = _held(session.bare)
    after = _held(session.bare)
    algorithm = algorithm_of(comm)
    growth = (after[0] - before[0]) / session.ranks / 2**20
    session.figures.append(Figure("memory", "growth", growth, "MiB", algorithm))
    session.figures.append(Figure("memory", "dev_shm_growth", (after[1] - before[1]) / 2**20, "MiB", algorithm))


def _central_storage(session: Session) -> None:
    """Compare what the weights of ResNet-50 take on all ranks together with one copy of them."""
    shapes = MODELS[LARGE]()
    one = np.ones((), np.float32)
    with CentralStorageStrategy(["cpu:0"], communicator=session.bare) as strategy, strategy.scope():
        before = own_memory()
        # Views of one number: no rank holds initial values.
        variables = [mpidist.Variable(np.broadcast_to(one, shape)) for shape in shapes]
        assert all(np.asarray(variable).min() == 1 for variable in variables)
        # A page is shared by those that have looked at it.
        session.bare.Barrier()
        held: int = session.bare.allreduce(own_memory() - before)
    session.figures.append(Figure("memory", "central_storage", held / size_of(shapes), "copies", "-"))


def _held(comm: MPI.Intracomm) -> tuple[int, int]:
    """Return the memory of all ranks, and what is taken in /dev/shm on the node of rank 0 (collective)."""
    total: int = comm.allreduce(own_memory())
    return total, comm.bcast(shm_used())
