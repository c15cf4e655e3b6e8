"""Collectives on GPUs that never end: they are reported, and end the job at the deadline."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mpidist.collectives.gpu.device_streams import DeviceWatch
from tests.support.ranks.jobs import run_script
from tests.support.speed import deadlines

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

PROGRAM = """
import time
from tests.support import fake_cupy
cupy = fake_cupy.install(devices=2)
import mpidist
from mpidist.collectives.gpu.nccl import NcclComm
with mpidist.Communicator() as comm, cupy.cuda.Device(comm.rank):
    comm.all_reduce("SUM", cupy.ones(3))
    if comm.rank == 1:
        # Its GPU does not take part, as that of a rank that was killed.
        NcclComm.all_reduce = lambda *_: None
    comm.all_reduce("SUM", cupy.ones(3)).get()
    print("rank", comm.rank, "went on", flush=True)
    # It has more to compute than the job has time.
    time.sleep(50)
"""


FAILING = """
from tests.support import fake_cupy
cupy = fake_cupy.install(devices=2)
import mpidist
from mpidist.collectives.gpu.nccl import NcclComm
from tests.support.fake_cupy import nccl
with mpidist.Communicator() as comm, cupy.cuda.Device(comm.rank):
    comm.all_reduce("SUM", cupy.ones(3))
    nccl.abort_waits = True
    if comm.rank == 1:
        NcclComm.all_reduce = lambda *_: None
    else:
        for raw in nccl.open_communicators():
            raw.async_error = 6
    comm.all_reduce("SUM", cupy.ones(3)).get()
    comm.barrier()
"""


class Event:
    """An event that comes when it is told to."""

    def __init__(self, is_done: bool = False) -> None:
        self.is_done = is_done


class DeviceStreams:
    """Streams with one call under way."""

    def __init__(self, timeout: float = 60.0) -> None:
        self.timeout = timeout
        self.ready, self.event = Event(is_done=True), Event()
        self.looked = threading.Semaphore(0)

    def oldest(self) -> Any:
        self.looked.release()
        return None if self.event.is_done else (self.event, self)

    def raise_if_failed(self) -> None:
        """It never does."""


@pytest.fixture
def watch() -> Iterator[DeviceWatch]:
    watch = DeviceWatch()
    yield watch
    watch.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "mpidist-device-watch"]


def test_nothing_is_said_of_what_ends(watch: DeviceWatch, capfd: pytest.CaptureFixture[str]) -> None:
    streams = DeviceStreams()
    watch.watch(streams)
    for _ in range(3):
        assert streams.looked.acquire(timeout=10)
    streams.event.is_done = True
    watch.forget(streams)
    assert capfd.readouterr().err == ""


def test_what_the_program_does_before_a_call_does_not_count(watch: DeviceWatch) -> None:
    streams = DeviceStreams(timeout=1e-9)
    streams.ready.is_done = False
    watch.watch(streams)
    for _ in range(4):
        assert streams.looked.acquire(timeout=10)
    watch.forget(streams)


@pytest.mark.one_rank
def test_a_collective_that_never_ends_is_reported_and_ends_the_job() -> None:
    done = run_script(PROGRAM, 2, env=deadlines(3, 1))
    assert done.returncode != 0
    assert re.search(r"mpidist: rank 0 has waited \d+ s for a collective on its GPU to end", done.stderr)
    assert re.search(r"rank 0 ends the job: a collective on its GPU did not end within [\d.]+ s", done.stderr)
    assert "rank 0 went on" not in done.stdout


@pytest.mark.one_rank
def test_a_collective_that_fails_on_the_way_ends_the_job_at_once() -> None:
    done = run_script(FAILING, 2)
    assert done.returncode != 0
    assert "mpidist: rank 0 ends the job: a collective on its GPU failed: " in done.stderr
