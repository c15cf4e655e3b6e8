"""Hang queries of up to 10,000 ranks: all observers in one process, with simulated messages and a simulated clock."""

from __future__ import annotations

import heapq
import pickle
import random
import weakref
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from mpidist.collectives import rpc
from mpidist.collectives.channel.connections import Connections
from mpidist.collectives.channel.executor import ChannelStatus
from mpidist.collectives.observe import hangs
from mpidist.collectives.observe.hang_report import Answer, Wait, WaitState
from mpidist.collectives.observe.hangs import DEADLOCK, MESSAGE, REPORT, HangObserver, Question, Report, send_answers

pytestmark = pytest.mark.one_rank

RANKS, PER_NODE = 10_000, 8
# A service thread polls four times a second, and very often for a second after a message.
IDLE, BUSY, BUSY_FOR = 0.25, 0.005, 1.0
TEXT = "all_reduce SUM of float64(5,)"
LATE = ChannelStatus(16, 16, "barrier", False, 61.0, False)
OPERATION: Any = SimpleNamespace(number=17, text=f"recv of {TEXT}", call_site="train.py:3", hopeless="")


class World:
    """The observers of a job, their messages and their clock. It takes the part of the service threads."""

    def __init__(self, ranks: int, per_node: int, stopped: Iterable[int], odd: dict[int, ChannelStatus]) -> None:
        self.now = 0.0
        self.stopped = {*stopped}
        self.partners: dict[int, set[int]] = {rank: set() for rank in range(ranks)}
        self.longest, self.received = 0, dict.fromkeys(range(ranks), 0)
        # By how much service threads are late with each message, and until when they are stopped.
        self.late: dict[int, float] = {}
        self.stopped_until: dict[int, float] = {}
        self._busy_until = dict.fromkeys(range(ranks), 0.0)
        self._endpoints: dict[int, Any] = {}
        self._order, self._due = count(), list[tuple[float, int, Callable[[], object]]]()
        nodes = [range(first, min(ranks, first + per_node)) for first in range(0, ranks, per_node)]
        waits = ChannelStatus(17, 17, TEXT, True, 60.0, False)
        self.observers = [
            HangObserver(
                SimpleNamespace(  # type: ignore[arg-type]  # the part of a channel that observers use
                    rank=rank,
                    size=ranks,
                    name="a",
                    node=SimpleNamespace(ranks=nodes),
                    comm=SimpleNamespace(world=self, Get_rank=lambda rank=rank: rank),
                    message_counts=[],
                    executor=SimpleNamespace(
                        status=lambda rank=rank: odd.get(rank, waits), waiting=lambda: [(17, TEXT)]
                    ),
                ),
                self,  # type: ignore[arg-type]
            )
            for rank in range(ranks)
        ]
        # Each stands for a process of its own.
        hangs._observers.clear()

    def call(self, function: Callable[[], object]) -> None:
        self.later(0, function)

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._order), function))

    def watch(self, endpoint: Any) -> None:
        self._endpoints[endpoint.mailbox.rank] = endpoint

    def forget(self, endpoint: Any) -> None:
        del self._endpoints[endpoint.mailbox.rank]

    def deliver(self, source: int, rank: int, message: tuple[Any, ...]) -> None:
        assert source not in self.stopped
        size = len(pickle.dumps(message))
        self.longest = max(self.longest, size)
        takes = (BUSY if self.now < self._busy_until[rank] else IDLE) + self.late.get(rank, 0)
        takes = max(takes, self.stopped_until.get(rank, 0) - self.now)
        self._busy_until[source] = self.now + BUSY_FOR
        self._busy_until[rank] = self.now + takes + BUSY_FOR
        self.partners[source].add(rank)
        self.partners[rank].add(source)
        if rank not in self.stopped:
            self.received[rank] += size
            self.later(takes, lambda: rank in self._endpoints and self._endpoints[rank].receive(source, *message))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while self._due and not until():
            self.now, _, function = heapq.heappop(self._due)
            function()


class SimulatedMailbox:
    """Hands messages to the world."""

    def __init__(self, comm: Any, tag: int, on_loss: object) -> None:
        self._world, self.rank, self.count = comm.world, comm.Get_rank(), None

    def send(self, rank: int, message: tuple[Any, ...]) -> None:
        self._world.deliver(self.rank, rank, message)


class Job:
    """Makes a world, and keeps the printed reports."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.printed: list[str] = []
        monkeypatch.setattr(rpc, "Mailbox", SimulatedMailbox)
        monkeypatch.setattr(hangs, "tell_user", self.printed.append)
        monkeypatch.setattr(hangs, "main_thread_frame", lambda: None)

    def make(
        self, ranks: int, per_node: int, stopped: Iterable[int] = (), odd: dict[int, ChannelStatus] | None = None
    ) -> World:
        self.printed.clear()
        return World(ranks, per_node, stopped, odd or {})

    def report(self, world: World, ranks: Iterable[int]) -> str:
        """Return the only report that is printed when ranks have waited for long."""
        for rank in ranks:
            world.observers[rank].tells(OPERATION)
        world.run()
        (report,) = self.printed
        return report


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def ignore(_: Report) -> None:
    pass


def message() -> Any:
    return SimpleNamespace(**vars(OPERATION))


def test_ten_thousand_ranks_have_one_asker(job: Job) -> None:
    world = job.make(RANKS, PER_NODE, odd={4711: LATE})
    lines = job.report(world, {*range(RANKS)} - {4711}).splitlines()
    assert lines[0] == f"ranks 0-4710,4712-9999 of 10000 have waited 60 s for the other ranks in {TEXT}, " + (
        "collective number 17:"
    )
    assert lines[1].startswith("  rank 4711: has not reached it: its last collective was number 16, barrier")
    assert lines[2].startswith("  ranks 0-4710,4712-9999: waiting for them at ")
    assert len(lines) == 3
    talk = {rank: len(partners) for rank, partners in world.partners.items()}
    assert [talk.pop(0), talk.pop(PER_NODE)] == 2 * [2 * RANKS // PER_NODE - 2 + PER_NODE - 1]
    assert max(talk.values()) == PER_NODE + 1, "the ranks of its node, and for the first two the askers"
    assert world.longest < 3000
    assert world.received[0] < 1.5 * 2**20


@pytest.mark.parametrize("per_node", [1, 2, 5, 8])
def test_every_rank_gets_the_report_in_time(job: Job, per_node: int) -> None:
    ranks = 8 * per_node
    leaders, second = range(0, ranks, per_node), min(1, per_node - 1)
    for limit, stopped in (
        (2.0, []),
        (2.5, [0]),
        (4.0, [0, leaders[1]]),
        (2.0, [leaders[3]]),
        (4.0, [leaders[3], leaders[3] + second]),
        (2.0, [*leaders[2:]]),
        (2.5, [0, leaders[3]]),
    ):
        world = job.make(ranks, per_node, stopped)
        reports: dict[int, str] = {}
        alive = {*range(ranks)}.difference(stopped)
        for rank in alive:
            hear = partial(lambda rank, reports, report: reports.update({rank: report.text}), rank, reports)
            world.observers[rank].inquire(Question(REPORT, 17), hear)
        world.run(lambda alive=alive, reports=reports: reports.keys() == alive)
        assert reports.keys() == alive
        assert world.now <= limit, stopped
        for text in reports.values():
            assert text.count("gave no answer within 1.5 s") == bool(stopped)
            if len(stopped) == 1:
                assert f"rank {stopped[0]}: gave no answer" in text
                assert "could not be asked" not in text


def test_a_node_without_leaders_differs_from_a_slow_one(job: Job) -> None:
    world = job.make(64, 8, [16, 24, 25])
    lines = {line.split(":")[0].strip(): line for line in job.report(world, [40]).splitlines()[1:]}
    assert set(lines) == {"ranks 16,24-25", "ranks 26-31", "ranks 0-15,17-23,32-63"}
    assert "ranks 16,24-25: gave no answer within 1.5 s" in lines["ranks 16,24-25"]
    assert lines["ranks 26-31"].endswith("could not be asked, because the ranks that pass questions on gave no answer")


def test_a_node_reports_alone_without_askers(job: Job) -> None:
    report = job.report(job.make(64, 8, [0, 8]), range(16, 24))
    assert report.startswith("ranks 16-23 of 64 have waited")
    assert "  ranks 0,8: gave no answer within 1.5 s" in report
    assert "  ranks 1-7,9-15,24-63: could not be asked" in report


@pytest.mark.parametrize(("rank", "other"), [(63, 42), (63, 60), (63, 0), (0, 42), (9, 63), (63, None)])
def test_the_other_side_of_a_message_is_found(job: Job, rank: int, other: int | None) -> None:
    gone = LATE._replace(ended=True)
    world = job.make(64, 8, odd={each: gone for each in range(64) if each != rank})
    operation = message()
    world.observers[rank].message_tells(operation, other)
    world.run()
    assert job.printed[0].startswith(f"rank {rank} of 64 waits for recv of {TEXT}, at train.py:3:\n  rank")
    left = "ranks 0-62 have" if other is None else f"rank {other} has"
    assert operation.hopeless == f"{left} ended the program"


def test_ranks_with_the_same_question_ask_together(job: Job) -> None:
    received = []
    for ranks in (256, 512):
        world = job.make(ranks, 8)
        for observer in world.observers:
            observer.message_asks(message(), None)
        for observer in world.observers[1:]:
            observer.message_asks(message(), 0)
        world.run()
        received.append(world.received[0])
    assert received[1] < 2.5 * received[0]


def test_questions_leave_nothing_behind(job: Job) -> None:
    world = job.make(64, 8, [8])
    left = []
    for _ in range(3):
        asked = [(63, None), (63, 5), (62, 5), (61, 8)]
        questions = [*((rank, Question(MESSAGE, other=other)) for rank, other in asked), (60, Question(DEADLOCK, 17))]
        for rank, question in questions:
            hear = partial(ignore)
            left.append(weakref.ref(hear))
            world.observers[rank].inquire(question, hear)
        world.run()
        del hear
    assert [hear for hear in left if hear() is not None] == []


@pytest.mark.parametrize(("ranks", "per_node"), [(4, 4), (8, 4), (64, 8)])
@pytest.mark.parametrize("late", [0.3, 0.7, 1.2])
def test_a_late_asker_prints_the_only_report(job: Job, ranks: int, per_node: int, late: float) -> None:
    world = job.make(ranks, per_node)
    world.late[0] = late
    assert job.report(world, range(1, ranks))


def test_an_asker_that_resumes_prints_no_second_report(job: Job) -> None:
    world = job.make(64, 8, odd={0: LATE})
    world.stopped_until[0] = 10.0
    assert "rank 0: gave no answer" in job.report(world, range(1, 64))


def test_a_rank_without_leaders_has_a_report_printed(job: Job) -> None:
    assert "ranks 16-17: gave no answer" in job.report(job.make(64, 8, [16, 17]), [20])


def test_a_closed_communicator_reports_nothing(job: Job) -> None:
    world = job.make(4, 2, [3])
    for observer in world.observers[:3]:
        observer.tells(OPERATION)
    world.run(lambda: world.now > 1)
    for observer in world.observers:
        observer.closed()
    world.run()
    assert job.printed == []


def test_deadlocks_are_asked_for_again(job: Job) -> None:
    world = job.make(64, 8)
    for _ in range(2):
        world.received[0] = 0
        world.observers[63].inquire(Question(DEADLOCK, 17), ignore)
        world.run()
        assert world.received[0] > 1000, "answers"


def test_all_ranks_of_a_deadlock_get_its_error(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = iter(range(100_000))

    def state(where: str) -> WaitState:
        # Every second rank that answers waits elsewhere.
        rank = next(ranks)
        wait, issued = (("a", 17), {"a": 17, "b": 2}) if rank % 2 else (("b", 3), {"a": 16, "b": 3})
        return WaitState(rank, Wait(*wait, TEXT, where), issued)

    monkeypatch.setattr(hangs, "wait_state", state)
    world = job.make(64, 8, [16])
    world.observers[63].inquire(Question(DEADLOCK, 17), ignore)
    world.run()
    for rank, observer in enumerate(world.observers):
        error = observer.waits(OPERATION)
        assert rank == 16 or "different communicators" in str(error)
    assert max(len(each) for each in world.partners.values()) <= 7 + 2 * 7


def test_answers_are_cut_into_messages() -> None:
    answers = [
        (rank, Answer(LATE, where="".join(random.Random(rank).choices("0123456789abcdef", k=300))))
        for rank in range(99)
    ]
    messages: list[bytes] = []
    send_answers(messages.append, answers)
    assert max(map(len, messages)) <= 2500
    assert [answer for part in messages for answer in pickle.loads(zlib.decompress(part))] == answers


def test_askers_connect_to_the_first_two_ranks_of_nodes() -> None:
    known = {rank: Connections(rank, [range(3), range(3, 4), range(4, 9)]).known for rank in range(9)}
    assert [known[0], known[3], known[6]] == [{1, 2, 3, 4, 5}, {0, 1, 4, 5}, {4, 5, 7, 8}]
    assert known[5] == {0, 3, 4, 6, 7, 8}
    assert all(rank in known[other] for rank, others in known.items() for other in others)
