"""Every dependency between streams, host and MPI is needed: leaving any one out gives wrong numbers.

On stand-ins for CuPy and NCCL whose streams are threads that are late (see tests/support/fake_cupy).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpidist import Communicator
from mpidist.arrays import streams as array_streams
from mpidist.arrays.cupy_ops import CupyOps
from mpidist.arrays.device_ops import ops_of
from mpidist.collectives.gpu import device_streams, reduce
from mpidist.collectives.mpi.waiting import Steps
from mpidist.experimental import CommunicationOptions
from mpidist.topology import world_topology
from tests.support.fake_cupy import streams

pytestmark = [
    pytest.mark.min_ranks(2),
    pytest.mark.parametrize("fake_gpus", [{"devices": 6, "jitter": 0.0005}], indirect=True),
    # Of wrong numbers, which are expected here.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
ROUNDS = 6
# So late is what a mutation fails to wait for.
LATE_SECONDS = 0.01
# One chunk, and many.
COUNTS = (1000, 130_000)


Mutation = Late = Callable[[pytest.MonkeyPatch], None]


def sleep_on(stream: Any, seconds: float = LATE_SECONDS) -> None:
    """Let a stream be late from here."""
    streams.worker_of(stream.raw).enqueue(lambda: time.sleep(seconds))


def late_caller(patch: pytest.MonkeyPatch) -> None:
    """The arrays of the program come late."""
    make = device_streams.DeviceCall.__init__

    def made(self: Any, streams: Any, timeout: Any, arrays: Any, *others: Any) -> None:
        ops = ops_of(arrays[0])
        stream = ops.current_stream(ops.device_of(arrays[0]))
        # Page-locked: the host would wait for copies from other memory.
        self.value = ops.pinned(arrays[0].nbytes)[: arrays[0].nbytes].view(arrays[0].dtype)
        self.value[:] = arrays[0].get()
        arrays[0][:] = -1
        # Longer than ranks take to meet.
        sleep_on(stream, 10 * LATE_SECONDS)
        ops.copy_to_device(arrays[0], self.value, stream)
        make(self, streams, timeout, arrays, *others)

    patch.setattr(device_streams.DeviceCall, "__init__", made)


def late_streams(patch: pytest.MonkeyPatch) -> None:
    """What the communicator does on the device comes late."""
    load = device_streams.DeviceCall.load

    def loaded(self: Any) -> None:
        sleep_on(self.streams.stream)
        load(self)

    patch.setattr(device_streams.DeviceCall, "load", loaded)


def late_copies(name: str) -> Late:
    """The copies of one direction come late."""
    copy = getattr(CupyOps, name)

    def copied(self: Any, target: Any, source: Any, stream: Any) -> None:
        sleep_on(stream)
        copy(self, target, source, stream)

    return lambda patch: patch.setattr(CupyOps, name, copied)


TO_HOST, TO_DEVICE = late_copies("copy_to_host"), late_copies("copy_to_device")


def wrong_rounds(comm: Communicator, cupy: Any, algorithm: str) -> int:
    """Return in how many rounds any rank has a wrong number."""
    options = CommunicationOptions(algorithm=algorithm)
    wrong = 0
    with cupy.cuda.Device(comm.rank):
        for number in range(ROUNDS):
            count = COUNTS[number % 2]
            pattern = np.arange(count, dtype="f4") % 97
            work = comm.all_reduce_async("SUM", cupy.asarray(pattern + number + comm.rank), options=options)
            expected = comm.size * (pattern + number) + sum(range(comm.size))
            wrong += not (work.wait().get() == expected).all()
    return int(comm.all_reduce("MAX", wrong))


def deaf_in(function: str) -> Mutation:
    """Let streams not wait for events where ``function`` says so."""
    wait = array_streams.Stream.wait

    def wait_elsewhere(self: Any, event: Any) -> None:
        if sys._getframe(1).f_code.co_name != function:
            wait(self, event)

    return lambda patch: patch.setattr(array_streams.Stream, "wait", wait_elsewhere)


def hasty(module: Any) -> Mutation:
    """Let the host not wait for events in a module."""

    def at_once(event: Any, relaxes: bool = True) -> Steps[None]:
        yield from ()

    return lambda patch: patch.setattr(module, "until_event", at_once)


def slots_are_always_free(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reduce.StagingSlot, "until_free", lambda _: iter(()))


def mpi_begins_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reduce._Run, "_until_reduced", lambda _: iter(()))


def run(
    fake_gpus: Any,
    patch: pytest.MonkeyPatch,
    algorithm: str,
    mutate: Mutation | None,
    late: Late,
) -> int:
    """Return in how many rounds there is a wrong number where something is late, and something does not wait for it."""
    patch.setenv("MPIDIST_STAGING_BYTES", "65536")
    patch.setattr(reduce, "SLOTS", 1)
    with Communicator() as comm:
        # What is made once is made in order.
        with fake_gpus.cuda.Device(comm.rank):
            comm.all_reduce("SUM", fake_gpus.ones(1, "f4"), options=CommunicationOptions(algorithm=algorithm)).get()
        late(patch)
        if mutate is not None:
            mutate(patch)
        return wrong_rounds(comm, fake_gpus, algorithm)


def some_layout(patch: pytest.MonkeyPatch) -> None:
    """Two nodes, with two ranks on the first where there are enough."""
    patch.setenv("MPIDIST_RANKS_PER_NODE", str(max(1, world_topology().size // 2)))


@pytest.mark.parametrize("late", [late_caller, late_streams, TO_HOST, TO_DEVICE])
@pytest.mark.parametrize(
    ("algorithm", "aware"),
    [
        ("halving_doubling", "0"),
        pytest.param("hierarchical", "1", marks=pytest.mark.long),
        ("ring", "0"),
        ("staged", "0"),
        ("nccl", "0"),
    ],
)
def test_nothing_is_wrong_as_it_is(
    fake_gpus: Any, monkeypatch: pytest.MonkeyPatch, algorithm: str, aware: str, late: Late
) -> None:
    some_layout(monkeypatch)
    monkeypatch.setenv("MPIDIST_GPU_AWARE_MPI", aware)
    assert run(fake_gpus, monkeypatch, algorithm, None, late) == 0


def omitted(algorithm: str, aware: str, mutate: Mutation, late: Late, what: str, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(algorithm, aware, mutate, late, id=f"{algorithm}: {what}", marks=marks)


NODES, HD = pytest.mark.nodes, "halving_doubling"


@pytest.mark.parametrize(
    ("algorithm", "aware", "mutate", "late"),
    [
        omitted(HD, "0", deaf_in("allocate"), late_caller, "streams wait for the caller", NODES),
        omitted(HD, "0", deaf_in("_through"), late_streams, "the copy to the host waits for streams", NODES),
        omitted(HD, "0", hasty(reduce), TO_HOST, "MPI waits for the copy to the host", NODES),
        omitted(HD, "0", deaf_in("move"), TO_DEVICE, "streams wait for the copy to the device", NODES),
        omitted(HD, "0", deaf_in("wait_here"), TO_DEVICE, "the caller waits for streams", NODES),
        omitted(HD, "0", slots_are_always_free, TO_DEVICE, "slots wait until they are free", NODES),
        # Sums are formed on the device.
        omitted("ring", "0", deaf_in("_stage_first"), late_streams, "copies and sums wait for streams"),
        omitted("ring", "0", hasty(reduce), TO_HOST, "MPI waits for the copy to the host"),
        omitted("ring", "0", deaf_in("_add"), TO_DEVICE, "the copy to the host waits for the sum"),
        omitted("ring", "0", deaf_in("move"), TO_DEVICE, "streams wait for the copy to the device"),
        omitted("ring", "0", slots_are_always_free, TO_DEVICE, "slots wait until they are free"),
        # MPI reads and writes device memory.
        omitted(HD, "1", mpi_begins_at_once, late_streams, "MPI waits for streams"),
        omitted(HD, "1", hasty(reduce), late_streams, "MPI waits for the sums"),
        omitted("staged", "0", deaf_in("allocate"), late_caller, "streams wait for the caller"),
        omitted("staged", "0", hasty(reduce), TO_HOST, "the host waits for the copy to it"),
        omitted("staged", "0", deaf_in("wait_here"), TO_DEVICE, "the caller waits for streams"),
        omitted("nccl", "0", deaf_in("allocate"), late_caller, "NCCL waits for the caller"),
        omitted("nccl", "0", deaf_in("wait_here"), late_streams, "the caller waits for NCCL"),
    ],
)
def test_every_dependency_is_needed(
    fake_gpus: Any, monkeypatch: pytest.MonkeyPatch, algorithm: str, aware: str, mutate: Mutation, late: Late
) -> None:
    if algorithm not in ("staged", "nccl"):
        some_layout(monkeypatch)
    monkeypatch.setenv("MPIDIST_GPU_AWARE_MPI", aware)
    assert run(fake_gpus, monkeypatch, algorithm, mutate, late) > 0


@pytest.mark.parametrize("is_kept", [True, False])
def test_results_live_without_a_wait(fake_gpus: Any, monkeypatch: pytest.MonkeyPatch, is_kept: bool) -> None:
    def finish(self: Any, call: Any) -> None:
        call.done = self.stream.record()

    late_streams(monkeypatch)
    if not is_kept:
        monkeypatch.setattr(device_streams.DeviceStreams, "finish", finish)
    wrong = 0
    with Communicator() as comm, fake_gpus.cuda.Device(comm.rank):
        for _ in range(ROUNDS):
            comm.all_reduce_async("SUM", fake_gpus.full(COUNTS[1], 1, "f4"), CommunicationOptions(algorithm="nccl"))
            comm.barrier()
            # Takes the memory of the result, if that has been let go.
            others = fake_gpus.asarray(np.full(COUNTS[1], -7, "f4"))
            comm._engine._on_device.streams.stream.synchronize()
            wrong += not (others.get() == -7).all()
        wrong = comm.all_reduce("MAX", wrong)
    assert (wrong == 0) == is_kept
