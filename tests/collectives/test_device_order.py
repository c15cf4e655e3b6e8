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
from mpidist.arrays import device_ops
from mpidist.arrays import streams as array_streams
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


Late = Callable[[pytest.MonkeyPatch], None]


def sleep_on(stream: Any, seconds: float = LATE_SECONDS) -> None:
    """Let a stream be late from here."""
    streams.worker_of(stream.raw).enqueue(lambda: time.sleep(seconds))


def late_caller(patch: pytest.MonkeyPatch) -> None:
    """The arrays of the program come late."""
    make = device_streams.ReductionCall.__init__

    def made(self: Any, plan: Any, arrays: Any, *others: Any) -> None:
        ops = ops_of(arrays[0])
        stream = ops.current_stream(ops.device_of(arrays[0]))
        # Page-locked: the host would wait for copies from other memory.
        self.value = ops.pinned(arrays[0].nbytes)[: arrays[0].nbytes].view(arrays[0].dtype)
        self.value[:] = arrays[0].get()
        arrays[0][:] = -1
        # Longer than ranks take to meet.
        sleep_on(stream, 10 * LATE_SECONDS)
        ops.copy_to_device(arrays[0], self.value, stream)
        make(self, plan, arrays, *others)

    patch.setattr(device_streams.ReductionCall, "__init__", made)


def late_streams(patch: pytest.MonkeyPatch) -> None:
    """What the communicator does on the device comes late."""
    load = device_streams.ReductionCall.load

    def loaded(self: Any) -> None:
        sleep_on(self.streams.stream)
        load(self)

    patch.setattr(device_streams.ReductionCall, "load", loaded)


def late_copies(name: str) -> Late:
    """The copies of one direction come late."""
    copy = getattr(device_ops.CupyOps, name)

    def copied(self: Any, target: Any, source: Any, stream: Any) -> None:
        sleep_on(stream)
        copy(self, target, source, stream)

    return lambda patch: patch.setattr(device_ops.CupyOps, name, copied)


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


def deaf_in(function: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Let streams not wait for events where ``function`` says so."""
    wait = array_streams.Stream.wait

    def wait_elsewhere(self: Any, event: Any) -> None:
        if sys._getframe(1).f_code.co_name != function:
            wait(self, event)

    return lambda patch: patch.setattr(array_streams.Stream, "wait", wait_elsewhere)


def hasty(module: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Let the host not wait for events in a module."""

    def at_once(event: Any, relaxes: bool = True) -> Steps[None]:
        yield from ()

    return lambda patch: patch.setattr(module, "until_event", at_once)


def slots_are_always_free(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reduce.PinnedBuffer, "free_after", property(lambda _: None, lambda *_: None), raising=False)


def mpi_begins_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reduce._Run, "_nccl_is_done", lambda _: True)


def run(
    fake_gpus: Any,
    patch: pytest.MonkeyPatch,
    algorithm: str,
    mutate: Callable[[pytest.MonkeyPatch], None] | None,
    late: Late,
) -> int:
    """Return in how many rounds there is a wrong number where something is late, and something does not wait for it."""
    patch.setenv("MPIDIST_STAGING_BYTES", "65536")
    patch.setattr(reduce, "_SLOTS", 1)
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


@pytest.mark.nodes
@pytest.mark.parametrize(
    ("mutate", "late"),
    [
        pytest.param(deaf_in("follow_caller"), late_caller, id="its streams do not wait for the caller"),
        pytest.param(deaf_in("_through"), late_streams, id="the copy to the host does not wait for its streams"),
        pytest.param(hasty(reduce), TO_HOST, id="MPI does not wait for the copy to the host"),
        pytest.param(deaf_in("move"), TO_DEVICE, id="its streams do not wait for the copy to the device"),
        pytest.param(deaf_in("_wait_for"), TO_DEVICE, id="the caller does not wait for its streams"),
        pytest.param(slots_are_always_free, TO_DEVICE, id="slots are used again at once"),
    ],
)
def test_the_hierarchical_way(fake_gpus: Any, monkeypatch: pytest.MonkeyPatch, mutate: Any, late: Late) -> None:
    some_layout(monkeypatch)
    assert run(fake_gpus, monkeypatch, "halving_doubling", mutate, late) > 0


@pytest.mark.parametrize(
    ("mutate", "late"),
    [
        pytest.param(deaf_in("_stage_first"), late_streams, id="neither copies nor sums wait for its streams"),
        pytest.param(hasty(reduce), TO_HOST, id="MPI does not wait for the copy to the host"),
        pytest.param(deaf_in("_add"), TO_DEVICE, id="the copy to the host does not wait for the sum"),
        pytest.param(deaf_in("move"), TO_DEVICE, id="its streams do not wait for the copy to the device"),
        pytest.param(slots_are_always_free, TO_DEVICE, id="slots are used again at once"),
    ],
)
def test_the_ring_whose_sums_are_formed_on_the_device(
    fake_gpus: Any, monkeypatch: pytest.MonkeyPatch, mutate: Any, late: Late
) -> None:
    some_layout(monkeypatch)
    assert run(fake_gpus, monkeypatch, "ring", mutate, late) > 0


@pytest.mark.parametrize(
    ("mutate", "late"),
    [
        pytest.param(mpi_begins_at_once, late_streams, id="MPI does not wait for its streams"),
        pytest.param(hasty(reduce), late_streams, id="MPI does not wait for the sums"),
    ],
)
def test_the_hierarchical_way_on_device_memory(
    fake_gpus: Any, monkeypatch: pytest.MonkeyPatch, mutate: Any, late: Late
) -> None:
    some_layout(monkeypatch)
    monkeypatch.setenv("MPIDIST_GPU_AWARE_MPI", "1")
    assert run(fake_gpus, monkeypatch, "halving_doubling", mutate, late) > 0


@pytest.mark.parametrize(
    ("mutate", "late"),
    [
        pytest.param(deaf_in("follow_caller"), late_caller, id="its streams do not wait for the caller"),
        pytest.param(hasty(reduce), TO_HOST, id="the host does not wait for the copy to it"),
        pytest.param(deaf_in("_wait_for"), TO_DEVICE, id="the caller does not wait for its streams"),
    ],
)
def test_the_staged_way(fake_gpus: Any, monkeypatch: pytest.MonkeyPatch, mutate: Any, late: Late) -> None:
    assert run(fake_gpus, monkeypatch, "staged", mutate, late) > 0


@pytest.mark.parametrize(
    ("mutate", "late"),
    [
        pytest.param(deaf_in("follow_caller"), late_caller, id="NCCL does not wait for the caller"),
        pytest.param(deaf_in("_wait_for"), late_streams, id="the caller does not wait for NCCL"),
    ],
)
def test_nccl_alone(fake_gpus: Any, monkeypatch: pytest.MonkeyPatch, mutate: Any, late: Late) -> None:
    assert run(fake_gpus, monkeypatch, "nccl", mutate, late) > 0


@pytest.mark.parametrize("is_kept", [True, False])
def test_results_that_nobody_waits_for_are_kept_until_they_are_there(
    fake_gpus: Any, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
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
