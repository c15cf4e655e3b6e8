"""Messages from rank to rank, and groups made by their members alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

from mpidist import Communicator, MismatchError
from tests.support.ranks.jobs import run_script

pytestmark = [pytest.mark.counts, pytest.mark.nodes]

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
NEXT, PREVIOUS = (RANK + 1) % SIZE, (RANK - 1) % SIZE


@pytest.fixture(scope="module")
def comm() -> Iterator[Communicator]:
    with Communicator() as communicator:
        yield communicator


@pytest.mark.parametrize("count", [0, 1, 600, 100_000, 3_000_000])
@pytest.mark.parametrize("dtype", ["?", "f4", "c16"])
def test_around_a_ring(comm: Communicator, count: int, dtype: str) -> None:
    out = np.empty(count, dtype)
    work = comm.send_async((np.arange(count) % 50 + RANK).astype(dtype), NEXT)
    assert comm.recv(out, PREVIOUS) == PREVIOUS
    work.wait()
    np.testing.assert_array_equal(out, (np.arange(count) % 50 + PREVIOUS).astype(dtype))


def test_messages_come_in_order_and_tags_are_apart(comm: Communicator) -> None:
    sent = [comm.send_async(np.array([number, tag]), NEXT, tag) for number in range(20) for tag in (0, 8189)]
    outs = {(number, tag): np.empty(2, int) for tag in (8189, 0) for number in range(20)}
    got = [comm.recv_async(out, None if number % 3 == 0 else PREVIOUS, tag) for (number, tag), out in outs.items()]
    assert {work.wait() for work in reversed(got)} == {PREVIOUS}
    for (number, tag), out in outs.items():
        assert out.tolist() == [number, tag]
    for work in sent:
        work.wait()


def test_of_whoever_sends_first(comm: Communicator) -> None:
    """Large ones, whose data come after the receiver knows who sends; a later call for one rank waits its turn."""
    if RANK:
        for turn in range(3):
            comm.send(np.full(50_000, 10 * RANK + turn), 0, 5)
        return
    outs = [np.empty(50_000, int) for _ in range(3 * (SIZE - 1))]
    works = [comm.recv_async(out, None, 5) for out in outs]
    sources = [work.wait() for work in works]
    turns = dict.fromkeys(range(1, SIZE), 0)
    for source, out in zip(sources, outs, strict=True):
        assert set(out) == {10 * source + turns[source]}
        turns[source] += 1


def test_between_collectives_and_other_memory(comm: Communicator) -> None:
    wide = np.zeros((4, 6))
    work = comm.recv_async(wide[:, ::2], PREVIOUS, 1)
    assert comm.all_reduce("SUM", 1) == SIZE
    comm.send(np.asfortranarray(np.arange(12.0).reshape(4, 3)), NEXT, 1)
    comm.barrier()
    assert work.wait() == PREVIOUS
    np.testing.assert_array_equal(wide[:, ::2], np.arange(12.0).reshape(4, 3))
    assert not wide[:, 1::2].any()
    assert work.done()


@pytest.mark.parametrize("given", [np.ones(3), np.ones(1000, "f4"), np.ones(0, "f4"), np.ones((4, 1), "f4")])
def test_what_is_sent_has_to_be_what_is_expected(comm: Communicator, given: np.ndarray) -> None:
    work = comm.send_async(given, NEXT, 2)
    with pytest.raises(MismatchError) as raised:
        comm.recv(np.ones(4, "f4"), PREVIOUS, 2)
    assert f"rank {PREVIOUS} sends {given.dtype.name}{given.shape}, at {__file__}:" in str(raised.value)
    assert f"rank {RANK} expects float32(4,), at {__file__}:" in str(raised.value)
    work.wait()
    # And what comes after it is unharmed.
    out = np.empty(2)
    work = comm.send_async(np.ones(2), NEXT, 2)
    comm.recv(out, PREVIOUS, 2)
    work.wait()
    assert out.tolist() == [1, 1]


def test_wrong_arguments(comm: Communicator) -> None:
    with pytest.raises(ValueError, match=f"expected a rank from 0 to {SIZE - 1}"):
        comm.send(np.ones(1), SIZE)
    with pytest.raises(ValueError, match="expected a whole number from 0 to 8189"):
        comm.recv(np.ones(1), 0, tag=8190)
    with pytest.raises(ValueError, match="holds the number|cannot be written"):
        comm.recv(1.0, 0)
    with pytest.raises(ValueError, match="different ranks from 0"):
        comm.group([RANK, RANK])
    comm.barrier()


def test_a_wait_with_a_limit_may_be_repeated() -> None:
    with Communicator() as comm:
        out = np.empty(1)
        work = comm.recv_async(out, NEXT, 3)
        with pytest.raises(TimeoutError, match="may be waited for again"):
            work.wait(timeout=0.01)
        comm.barrier()
        comm.send(np.ones(1), PREVIOUS, 3)
        assert work.wait() == NEXT


def test_groups_are_made_by_their_members_alone(comm: Communicator) -> None:
    mine = [rank for rank in range(SIZE) if rank % 2 == RANK % 2]
    if RANK == 0 and SIZE > 2:
        # The others have theirs long before.
        comm.recv(np.empty(1), 1, 4)
    group = comm.group(mine[::-1])
    assert (group.rank, group.size) == (mine[::-1].index(RANK), len(mine))
    assert group.all_reduce("SUM", RANK) == sum(mine)
    np.testing.assert_array_equal(group.all_gather(np.array([RANK])), mine[::-1])
    if RANK == 1 and SIZE > 2:
        comm.send(np.ones(1), 0, 4)
    group.close()


UNDER_WAY = """
import numpy, mpidist
comm = mpidist.Communicator()
if comm.rank == 0:
    work = comm.recv_async(numpy.empty(3), 1)
comm.close()
"""


@pytest.mark.jobs
@pytest.mark.one_rank
def test_closing_with_messages_under_way_is_an_error_on_all_ranks() -> None:
    job = run_script(UNDER_WAY, 2)
    assert job.returncode != 0
    assert "RuntimeError: recv from rank 1 with tag 0 of float64(3,), started at" in job.stderr
    assert "expected wait() for each message before" in job.stderr


TOO_LATE = """
import numpy, mpidist
comm = mpidist.Communicator()
options = mpidist.experimental.CommunicationOptions(timeout_seconds=0.3)
try:
    comm.recv(numpy.empty(3), 1 - comm.rank, 7, options)
except TimeoutError as error:
    print(type(error).__name__, error, flush=True)
try:
    comm.barrier()
except RuntimeError as error:
    print(error, flush=True)
"""


@pytest.mark.jobs
@pytest.mark.one_rank
def test_a_deadline_is_the_end_of_a_communicator() -> None:
    job = run_script(TOO_LATE, 2)
    assert job.returncode == 0, job.stderr
    for rank in range(2):
        message = f"recv from rank {1 - rank} with tag 7 of float64(3,)"
        assert f"MessageTimeoutError rank {rank} waited 0.3 s in {message}, at " in job.stdout
        assert f"can no longer be used: {message} did not come within its deadline" in job.stdout


LOST = """
import os, signal, numpy, mpidist
comm = mpidist.Communicator()
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
comm.recv(numpy.empty(3), 1)
"""


@pytest.mark.jobs
@pytest.mark.one_rank
def test_a_killed_rank_ends_those_that_wait_for_its_message() -> None:
    assert run_script(LOST, 2).returncode != 0


SLOW = """
import time, numpy, mpidist
comm = mpidist.Communicator()
if comm.rank == 1:
    time.sleep(1.5)
    comm.send(numpy.ones(3), 0)
else:
    comm.recv(numpy.empty(3))
"""


@pytest.mark.jobs
@pytest.mark.one_rank
def test_a_long_wait_is_reported() -> None:
    job = run_script(SLOW, 2, env={"MPIDIST_WARN_AFTER": "0.5"})
    assert job.returncode == 0, job.stderr
    assert "rank 0 of 2 has waited" in job.stderr
    assert "s in recv from any rank with tag 0 of float64(3,), at " in job.stderr
