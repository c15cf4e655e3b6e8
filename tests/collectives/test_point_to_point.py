"""Messages from rank to rank, and groups made by their members alone."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from mpidist import Communicator, MismatchError
from mpidist.cli.flight import merged_text
from mpidist.collectives.channel.observers import Observer
from mpidist.collectives.channel.operation import Operation
from mpidist.collectives.observe.record import read_flights
from mpidist.collectives.observe.trace import trace_path
from tests.support.ranks.jobs import run_script
from tests.support.speed import deadlines

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


def test_messages_arrive_in_order_by_tag(comm: Communicator) -> None:
    sent = [comm.send_async(np.array([number, tag]), NEXT, tag) for number in range(20) for tag in (0, 8189)]
    outs = {(number, tag): np.empty(2, int) for tag in (8189, 0) for number in range(20)}
    got = [comm.recv_async(out, None if number % 3 == 0 else PREVIOUS, tag) for (number, tag), out in outs.items()]
    assert {work.wait() for work in reversed(got)} == {PREVIOUS}
    for (number, tag), out in outs.items():
        assert out.tolist() == [number, tag]
    for work in sent:
        work.wait()


def test_recv_from_any_rank(comm: Communicator) -> None:
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
        with pytest.raises(TimeoutError, match=r"Call wait\(\) again"):
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


@pytest.mark.jobs
@pytest.mark.one_rank
def test_closing_with_messages_in_flight_raises() -> None:
    program = """
    import numpy, mpidist
    comm = mpidist.Communicator()
    if comm.rank == 0:
        work = comm.recv_async(numpy.empty(3), 1)
    comm.close()
    """
    job = run_script(program, 2)
    assert job.returncode != 0
    assert "RuntimeError: recv from rank 1 with tag 0 of float64(3,), started at" in job.stderr
    assert "Call wait() for each message before close()" in job.stderr


@pytest.mark.jobs
@pytest.mark.one_rank
def test_a_deadline_is_the_end_of_a_communicator() -> None:
    program = """
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
    job = run_script(program, 2)
    assert job.returncode == 0, job.stderr
    for rank in range(2):
        message = f"recv from rank {1 - rank} with tag 7 of float64(3,)"
        assert f"MessageTimeoutError rank {rank} waited 0.3 s in {message}, at " in job.stdout
        assert f"can no longer be used: {message} did not arrive within its deadline" in job.stdout


@pytest.mark.jobs
@pytest.mark.one_rank
def test_a_killed_sender_ends_the_receiver() -> None:
    program = """
    import os, signal, numpy, mpidist
    comm = mpidist.Communicator()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.recv(numpy.empty(3), 1)
    """
    assert run_script(program, 2).returncode != 0


@pytest.mark.jobs
@pytest.mark.one_rank
@pytest.mark.parametrize("guard", ["1", "0"])
def test_a_long_wait_is_reported(guard: str) -> None:
    program = """
    import time, numpy, mpidist
    comm = mpidist.Communicator()
    if comm.rank == 1:
        comm.send(numpy.ones(2), 0, 1)
        time.sleep(3)  # for long
        comm.send(numpy.ones(3), 0)
    else:
        comm.recv(numpy.empty(2), 1, 1)
        comm.recv(numpy.empty(3))
    """
    job = run_script(program, 2, env={"MPIDIST_WARN_AFTER": "0.5", "MPIDIST_GUARD": guard})
    assert job.returncode == 0, job.stderr
    if guard == "0":
        assert "rank 0 of 2 has waited" in job.stderr
        assert "s in recv from any rank with tag 0 of float64(3,), at " in job.stderr
        return
    assert "rank 0 of 2 waits for recv from any rank with tag 0 of float64(3,), at " in job.stderr
    assert re.search(r"  rank 1: its last collective was .*; its program is at .*\.py:6 ", job.stderr), job.stderr
    assert "  rank 0: its last collective was" in job.stderr


@pytest.mark.jobs
@pytest.mark.one_rank
def test_a_peer_that_ends_later_is_noticed() -> None:
    program = """
    import time, numpy, mpidist
    from mpidist.collectives.move import point_to_point
    point_to_point._ASK_EVERY_SECONDS = 0.5
    comm = mpidist.Communicator()
    if comm.rank == 0:
        work = comm.recv_async(numpy.empty(3), 1)
        while True:
            try:
                work.wait(timeout=0.2)
            except TimeoutError:
                continue
            except mpidist.errors.PeerError as error:
                print(error)
                raise SystemExit
    time.sleep(2)  # longer than it takes the other to report
    """
    job = run_script(program, 2, env=deadlines(60, 0.1), timeout=30)
    assert job.returncode == 0, job.stderr
    assert "can never be done: rank 1 has ended the program" in job.stdout


@pytest.mark.jobs
@pytest.mark.one_rank
@pytest.mark.parametrize(("what", "text"), [("one", "recv from rank 1"), ("any", "recv from any"), ("send", "send to")])
def test_messages_of_an_ended_rank_raise(what: str, text: str) -> None:
    program = """
    import sys, numpy, mpidist
    comm = mpidist.Communicator()
    source = None if sys.argv[1] == "any" else 1
    if comm.rank == 0:
        try:
            if sys.argv[1] == "send":
                comm.send(numpy.ones(100_000), 1)
            else:
                comm.recv(numpy.empty(3), source)
        except mpidist.errors.PeerError as error:
            print(error)
            raise SystemExit
    """
    job = run_script(program, 2, what, env=deadlines(60, 0.5), timeout=30)
    assert job.returncode == 0, job.stderr
    assert job.stdout.startswith(text), job.stdout
    assert "can never be done: rank 1 has ended the program" in job.stdout


@pytest.mark.jobs
@pytest.mark.one_rank
def test_messages_are_traced_and_recorded(tmp_path: Path) -> None:
    program = """
    import numpy, mpidist
    comm = mpidist.Communicator()
    other, got = 1 - comm.rank, numpy.empty(1000)
    for _ in range(3):
        work = comm.recv_async(got, other, 2)
        comm.send(numpy.ones(1000), other, 2)
        work.wait()
    comm.barrier()
    try:
        if comm.rank == 0:
            comm.recv(numpy.empty(3), 1, 5)
        else:
            comm.send(numpy.ones(4), 0, 5)
    except mpidist.MismatchError:
        pass
    work = comm.recv_async(numpy.empty(5), other, 9)
    comm.barrier()
    raise SystemExit
    """
    trace, flight = tmp_path / "trace", tmp_path / "flight"
    watched = {"MPIDIST_TRACE": trace, "MPIDIST_FLIGHT_RECORD": flight, "MPIDIST_REPORT": 1, "MPIDIST_TIMEOUT": 10}
    job = run_script(program, 2, env={name: str(value) for name, value in watched.items()})
    report = job.stdout + job.stderr
    assert re.search(r"^  send +3\.5 +", report, re.MULTILINE), report
    assert re.search(r"^  recv +3\.5 +", report, re.MULTILINE), report
    for rank in range(2):
        events = json.loads(trace_path(trace, rank).read_text())["traceEvents"]
        names = Counter(event["name"] for event in events if event["ph"] == "b")
        assert names[f"send to rank {1 - rank} with tag 2"] == names[f"recv from rank {1 - rank} with tag 2"] == 3
        assert names[f"unfinished recv from rank {1 - rank} with tag 9"] == 1
    (error,) = [
        event
        for event in json.loads(trace_path(trace, 0).read_text())["traceEvents"]
        if "error" in event.get("args", ())
    ]
    assert (error["name"], error["args"]["error"]) == ("recv from rank 1 with tag 5", "MismatchError")
    text = merged_text(read_flights(str(flight), []), 2)
    assert "diverged" not in text
    assert re.search(r"not ended  rank 1: recv from rank 0 with tag 9 of float64\(5,\), at .*:17", text), text
    assert re.search(r"ms  rank 1: send to rank 0 with tag 5 of float64\(4,\), at .*:14", text), text


class Failing(Observer):
    def message_began(self, operation: Operation[object]) -> None:
        raise ValueError("began")

    def message_ended(self, operation: Operation[object]) -> None:
        raise ValueError("ended")


def test_an_observer_that_fails_costs_no_message(comm: Communicator, caplog: pytest.LogCaptureFixture) -> None:
    observer, out = Failing(), np.empty(2)
    comm.add_observer(observer)
    work = comm.send_async(np.ones(2), NEXT, 6)
    assert comm.recv(out, PREVIOUS, 6) == PREVIOUS
    work.wait()
    comm.remove_observer(observer)
    assert out.tolist() == [1, 1]
    told = sorted(str(record.exc_info[1]) for record in caplog.records if record.exc_info)
    assert told == ["began", "began", "ended", "ended"]
    comm.barrier()
