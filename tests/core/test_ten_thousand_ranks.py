"""Messages about 10,000 ranks: each fits on a screen, names the odd rank first, and takes time by the ranks."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from mpidist.checkpoint.agreement import Agreement
from mpidist.cli.doctor.checks import findings
from mpidist.cli.doctor.facts import CoreFacts, GpuFacts, Interface, SharedMemoryFacts
from mpidist.cli.doctor.report import report_text as doctor_text
from mpidist.cli.flight import merged_text
from mpidist.collectives.channel import mismatch
from mpidist.collectives.channel.executor import ChannelStatus
from mpidist.collectives.channel.mismatch import Told, mismatch_text, news_text
from mpidist.collectives.mpi import communicator_names
from mpidist.collectives.observe.hang_report import Answer, Wait, WaitState, find_deadlock, report_text
from mpidist.collectives.observe.record import Entry, Flight, FlightHead, Kind, State
from mpidist.collectives.observe.recorder import report_text as totals_text
from mpidist.core.errors import PeerError
from mpidist.core.text import group_lines, groups_of, names_text, numbered_ranks, ranks_text, said_lines
from mpidist.estimator.by_role import cast_of
from mpidist.parameter_server.link import Task, check_tasks
from mpidist.strategies.replica_devices import _check_kinds, _Rank
from mpidist.topology.topology import PLACE, map_of_ranks
from tests.cli import doctor_jobs as made

pytestmark = pytest.mark.one_rank

RANKS, PER_NODE = 10_000, 8
EVERYBODY = range(RANKS)
ODD = 4_711
LATE = "all_gather of float32(*, 3)"
SITE = "/home/me/projects/training/net/train.py:41 (step)"
# Every rank says something of its own, as where shapes differ.
EACH = [f"all_gather of float32({1000 + rank}, 3)" for rank in EVERYBODY]


def fitting(make: Callable[[], str], *, lines: int = 42, width: int = 230) -> list[str]:
    """Return the lines of a message that fits on a screen and was made in time."""
    start = time.process_time()
    text = make()
    assert time.process_time() - start < 5
    found = text.splitlines()
    assert len(found) <= lines, text
    assert max(map(len, found)) <= width, text
    return found


def error_of(act: Callable[[], object], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        act()
    return str(caught.value)


# The mechanism --------------------------------------------------------------------------------------------------------


def test_ranks_as_ranges() -> None:
    assert ranks_text([*range(4096), *range(5000, RANKS)]) == "0-4095,5000-9999"
    assert numbered_ranks(set(EVERYBODY) - {ODD}) == "ranks 0-4710,4712-9999"
    shuffled = random.Random(1).sample(EVERYBODY, 5000)
    for ranks in (range(0, RANKS, 2), shuffled, range(0, RANKS, PER_NODE)):
        text = ranks_text(ranks)
        assert len(text) <= 60
        assert text.endswith(f",... ({len(ranks)})")
    assert ranks_text(range(0, 10, 2)) == "0,2,4,6,8"


def test_nothing_is_lost_without_a_word() -> None:
    for kinds in (1, 2, 20, 21, 5000, RANKS):
        lines = said_lines((rank, f"kind {rank % kinds}") for rank in EVERYBODY)
        assert len(lines) == min(kinds, 21)
        if kinds > 20:
            left = sum(len(range(kind, RANKS, kinds)) for kind in range(kinds)) - sum(
                len(ranks) for _, ranks in groups_of((rank, rank % kinds) for rank in EVERYBODY)[:20]
            )
            assert lines[-1] == f"and {kinds - 20} more line{'s' * (kinds > 21)}, of {left} ranks"


def test_long_texts_share_the_room() -> None:
    for kinds in (1, 3, 100):
        groups = groups_of((rank, f"kind {rank % kinds} {'x' * 9000}") for rank in EVERYBODY)
        lines = group_lines(groups, lambda text, ranks: (f"{numbered_ranks(ranks)}: ", text, ""))
        assert sum(map(len, lines)) <= 6100
        assert all(line.endswith("...") for line in lines[:20])


def test_names_of_hosts() -> None:
    assert names_text(f"n{host:04}" for host in range(1250)) == "n0000, n0001, n0002 and 1247 more"


def test_names_of_communicators_are_short_and_not_of_other_ranks() -> None:
    names = {communicator_names._name(1, tuple(range(first, RANKS, 2))) for first in (0, 1, 2)}
    names.add(communicator_names._name(1, (*range(0, RANKS - 2, 2), RANKS - 1)))
    assert len(names) == 4
    assert max(map(len, names)) <= 80, "as long as the flight record keeps"


def test_a_map_of_the_ranks_is_small_and_kept_once() -> None:
    nodes = [rank // PER_NODE for rank in EVERYBODY]
    places = b"".join(PLACE.pack(node * PER_NODE, f"n{node:04}".encode()) for node in nodes)
    tracemalloc.start()
    found = map_of_ranks(places)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 512 << 10
    assert map_of_ranks(bytes(bytearray(places))) is found
    assert (found.node_of_rank[ODD], found.host_of_rank[ODD]) == (588, "n0588")
    assert found.ranks_of_node[588] == range(4704, 4712)


# Mismatches and news --------------------------------------------------------------------------------------------------


def plans(text_of: Callable[[int], str], site: str = SITE) -> list[Told]:
    return [("plan", text_of(rank), site) for rank in EVERYBODY]


def test_a_mismatch_of_one_rank() -> None:
    everyone = plans(lambda rank: "barrier" if rank == ODD else LATE)
    lines = fitting(lambda: mismatch_text(everyone))
    assert lines[1:4:2] == [f"  rank {ODD}: barrier", f"  ranks 0-{ODD - 1},{ODD + 1}-9999: {LATE}"]


def test_a_mismatch_of_all() -> None:
    lines = fitting(lambda: mismatch_text(plans(lambda rank: EACH[rank])))
    assert lines[1] == f"  rank 0: {EACH[0]}"
    assert lines[-1] == "  and 9980 more lines, of 9980 ranks"


def test_news_of_many() -> None:
    everyone = plans(lambda _: LATE)
    everyone[ODD] = ("failed", "raised ValueError: no rows", "data.py:3 (rows)")
    for rank in range(0, RANKS, 2):
        everyone[rank] = ("left", "has left the program", "its end")
    (line,) = fitting(lambda: news_text(everyone), width=400)
    assert line.startswith(f"rank {ODD} raised ValueError: no rows (at data.py:3 (rows)); ranks 0,2,4,")
    assert line.endswith(",... (5000): has left the program (at its end)")


def test_all_to_all_that_fits_nowhere() -> None:
    everyone = [([(other, 2, 3) for other in range(4)], RANKS, SITE) for _ in EVERYBODY]
    lines = fitting(lambda: mismatch._rows_message(everyone))
    assert lines[1] == "  rank 0 gives rank 0 2 rows"
    assert lines[-1] == "  and 99999996 more such pairs"


# Who waits for whom ---------------------------------------------------------------------------------------------------


def status(rank: int, number: int = 17, *, waits: bool = True, text: str = LATE, line: int = 41) -> Answer:
    seconds = 60.0 + rank / RANKS * 9
    return Answer(
        ChannelStatus(number, number, text, waits, seconds, False),
        where=f"/home/me/projects/training/net/train.py:{line} (step)",
        process=f"process {20_000 + rank} on n{rank // PER_NODE:04}",
    )


def test_a_hang_for_one_rank() -> None:
    answers = {rank: status(rank) for rank in EVERYBODY}
    answers[ODD] = status(ODD, 16, waits=False, line=30)
    lines = fitting(lambda: report_text(17, answers, RANKS))
    assert lines[1] == (
        f"  rank {ODD}: has not reached it: its last collective was number 16, {LATE}, 64 s ago; its program is at "
        f"/home/me/projects/training/net/train.py:30 (step) (process {20_000 + ODD} on n0588)"
    )
    assert lines[2].startswith(f"  ranks 0-{ODD - 1},{ODD + 1}-9999: waiting for them at ")
    assert len(lines) == 3


def test_a_hang_for_half_of_the_ranks() -> None:
    answers = {rank: status(rank, 17 if rank % 2 else 16, waits=bool(rank % 2)) for rank in EVERYBODY}
    answers[ODD - 1] = status(ODD - 1, 15, waits=False, line=30)
    del answers[ODD + 1]
    lines = fitting(lambda: report_text(17, answers, RANKS), width=460)
    assert [line.split(":")[0].split(",")[0] for line in lines[1:]] == [
        "  rank 4710", "  rank 4712", "  ranks 0", "  ranks 1"
    ]  # fmt: skip
    assert "gave no answer" in lines[2]
    assert "60 to 69 s ago" in lines[3]
    assert "(process 20000 on n0000, process 20002 on n0000, process 20004 on n0000 and 4995 more)" in lines[3]


def test_a_hang_where_each_does_something_else() -> None:
    answers = {rank: status(rank, 16, waits=False, text=EACH[rank], line=rank) for rank in EVERYBODY}
    lines = fitting(lambda: report_text(17, answers, RANKS), width=300)
    assert lines[-1].endswith(" ranks")
    assert sum(map(len, lines)) < 2500, "or MPI sends it only when the other side takes it"


def state(rank: int, wait: tuple[str, int], **issued: int) -> WaitState:
    return WaitState(rank, Wait(*wait, LATE, f"train.py:{rank if rank == ODD else 1}"), issued)


def test_a_deadlock_of_two_halves() -> None:
    found = [state(rank, ("a", 5), a=5, b=2) if rank % 2 else state(rank, ("b", 3), a=4, b=3) for rank in EVERYBODY]

    def text() -> str:
        deadlock = find_deadlock("a", 5, found)
        assert deadlock is not None
        assert deadlock.waits == {("a", 5), ("b", 3)}
        return deadlock.text

    lines = fitting(text)
    assert lines[1].startswith(f"  rank {ODD} of the job: ")
    assert len(lines) == 7


def test_no_deadlock_of_many_is_found_in_time() -> None:
    found = [state(rank, ("a", 5), a=5, b=3) if rank % 2 else state(rank, ("b", 3), a=4, b=3) for rank in EVERYBODY]
    start = time.process_time()
    assert find_deadlock("a", 5, found) is None
    assert time.process_time() - start < 2


# Records --------------------------------------------------------------------------------------------------------------


def entry(
    number: int,
    text: str = LATE,
    state: int = State.DONE,
    communicator: str = "communicator 1",
    kind: int = Kind.COLLECTIVE,
) -> Entry:
    end = 2.0 if state else 0.0
    return Entry(max(number, 1), number, 0, 1.0, end, "", state, kind, 0, communicator, text, SITE)


def flights(entries_of: Callable[[int], list[Entry]], ranks: Iterable[int] = EVERYBODY) -> Iterator[Flight]:
    """Yield them one after the other, as from a folder."""
    for rank in ranks:
        yield Flight(FlightHead(rank, RANKS, f"n{rank // PER_NODE:04}", rank, 0), entries_of(rank))


def test_flight_records() -> None:
    def entries(rank: int) -> list[Entry]:
        if rank == ODD:
            return [*map(entry, range(1, 19)), entry(19, "barrier", State.RUNNING)]
        return [*map(entry, range(1, 19)), entry(19, state=State.RUNNING)]

    lines = fitting(lambda: merged_text(flights(entries, EVERYBODY[:-1]), 10))
    assert lines[1] == "  without rank 9999: no file to read"
    place = lines.index("  the ranks diverged at number 19:")
    assert lines[place + 1] == f"    rank {ODD}: barrier, at {SITE}"


def test_flight_records_of_ranks_that_all_differ() -> None:
    made_so = flights(lambda rank: [entry(1), entry(2 + rank % 50), entry(60, EACH[rank], State.RUNNING)])
    lines = fitting(lambda: merged_text(made_so, 10), lines=80)
    assert any("more lines, of" in line for line in lines)


def test_flight_records_are_not_kept() -> None:
    def entries(rank: int) -> list[Entry]:
        made = [entry(number, f"all_reduce of float64({number},)") for number in range(1, 21)]
        return made[: -1 if rank == ODD else 20]

    tracemalloc.start()
    text = merged_text(flights(entries), 10)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert f"    rank {ODD}: did not reach it" in text
    assert most < 8 << 20, "of 10,000 records of 20 entries, 200 bytes or more each"


def test_flight_records_of_many_communicators() -> None:
    def entries(rank: int) -> list[Entry]:
        name = f"communicator 1 of node {rank // PER_NODE}"
        return [
            entry(n, state=State.RUNNING if rank == ODD and n == 9 else State.DONE, communicator=name)
            for n in range(1, 10)
        ]

    lines = fitting(lambda: merged_text(flights(entries), 10), lines=60)
    assert lines[2] == f"communicator 1 of node {ODD // PER_NODE}", "the one that is not well"
    assert lines[-1] == "and 1246 more communicators, 1246 of them well; all: --json"


def test_flight_records_of_messages() -> None:
    def entries(rank: int) -> list[Entry]:
        state = State.RUNNING if rank == ODD else State.DONE
        return [entry(0, f"send to rank {rank + 1}", state, kind=Kind.MESSAGE) for _ in range(3)]

    lines = fitting(lambda: merged_text(flights(entries), 3), lines=46)
    assert f"rank {ODD}: send to rank {ODD + 1}" in lines[4]


def test_the_report_of_totals() -> None:
    counts = Counter(calls=3, nbytes=8, time=1000, for_others=900)
    by_rank = {rank: {LATE: counts} for rank in range(0, RANKS, 2)}
    lines = fitting(lambda: totals_text(by_rank, RANKS, 5.0))
    assert "(without 1,3,5," in lines[0]
    assert lines[0].endswith("... (5000)), means over ranks, in 5.0 s")


# Doctor ---------------------------------------------------------------------------------------------------------------


def doctor_job(**odd: Any) -> Any:
    """A cluster as they are: binding, addresses and free memory differ; rank ``ODD`` in what is named."""
    hosts = [f"n{rank // PER_NODE:04}" for rank in EVERYBODY]

    def changes(rank: int) -> dict[str, Any]:
        host, local = divmod(rank, PER_NODE)
        address = f"10.0.{host // 250}.{1 + host % 250}/16"
        cores = CoreFacts(tuple(range(16 * local, 16 * local + 16)), 128, None, {"OMP_NUM_THREADS": "16"})
        return {
            "cores": cores,
            "interfaces": (Interface("eth0", address, 100_000),),
            "shared_memory": SharedMemoryFacts(512 << 30, (400 << 30) + (host << 20)),
            **(odd if rank == ODD else {}),
        }

    return made.job(*map(changes, EVERYBODY), hosts=hosts)


def test_the_doctor_on_a_cluster() -> None:
    job = doctor_job()
    lines = fitting(lambda: doctor_text(job, findings(job)))
    assert lines[0].endswith("doctor: 10000 ranks, 1250 hosts")
    row = "0,8,16,24,32,... (1250) n0000, n0001, n0002 and 1247 more 0-15 of 128 CPU"
    assert row in [" ".join(line.split()) for line in lines]
    assert "/dev/shm    n0000, n0001, n0002 and 1247 more: 256 GiB or more free of 512 GiB" in lines
    assert "network     n0000, n0001, n0002 and 1247 more: eth0 10.0.0.0/16 (100 Gbit/s)" in lines
    assert lines[-1] == "nothing wrong found"


def test_the_doctor_names_the_odd_rank() -> None:
    gpus = GpuFacts(True, (), problem="the driver is too old; pip install 'cupy-cuda11x'")
    job = doctor_job(
        cores=CoreFacts((0,), 128, None, {}),
        software={"Python": "3.12.1", "NumPy": "2.4.6", "mpi4py": "4.1.2", "mpidist": "0.1"},
        settings={"MPIDIST_TIMEOUT": "5"},
        without_core="no compiler",
        gpus=gpus,
    )
    lines = fitting(lambda: doctor_text(job, findings(job)), lines=60)
    ranks = next(number for number, line in enumerate(lines) if line.startswith("ranks"))
    assert lines[ranks + 1].split()[:2] == [str(ODD), "n0588"]
    text = "\n".join(lines)
    for part in (
        "3.12.1 on n0588",
        f"rank {ODD} differ",
        f"Rank {ODD} on n0588 cannot use",
        f"Rank {ODD} on n0588: the",
    ):
        assert part in text


def test_the_doctor_where_half_of_the_ranks_are_silent() -> None:
    job = doctor_job()
    ranks = tuple(None if rank > 5000 else facts for rank, facts in enumerate(job.ranks))
    failed = [(0, rank) for rank in range(5001, RANKS)]
    job = replace(job, ranks=ranks, reach=made.reach(RANKS, failed, {}, range(5001, RANKS)))
    lines = fitting(lambda: doctor_text(job, findings(job)), lines=60)
    assert any("No rank heard from ranks 5001-9999" in line for line in lines)


# Errors of set-up and of checkpoints ----------------------------------------------------------------------------------


class _Told(Agreement):
    """An agreement of 10,000 ranks that have answered."""

    def __init__(self, answers: list[dict[str, Any]]) -> None:
        self._doing, self._answers = "save out/ckpt-3", answers

    def _exchange(self, work: object) -> list[dict[str, Any]]:
        return self._answers


def test_a_checkpoint_that_fails() -> None:
    answers = [{"error": "OSError: no space left"} if rank % 4 else {"result": 1} for rank in EVERYBODY]
    answers[ODD] = {"error": "ValueError: no rows"}
    (line,) = fitting(lambda: error_of(lambda: _Told(answers).every_rank_does(lambda: 1), PeerError), width=400)
    assert line.startswith("save out/ckpt-3 failed on ranks 1-3,5-7,")
    assert f"of 10000, with rank {ODD}: ValueError: no rows; ranks 1-3,5-7," in line
    assert line.endswith("(7499): OSError: no space left")


def test_a_checkpoint_of_other_objects() -> None:
    answers = [{"result": ["model", *(["extra"] if rank == ODD else [])]} for rank in EVERYBODY]
    check = _Told(answers).check_same
    (line,) = fitting(lambda: error_of(lambda: check(["model"], [*EVERYBODY]), ValueError), width=400)
    assert f"the ranks hold different objects: 'extra' only on rank {ODD}; expected" in line


def test_roles_and_tasks() -> None:
    told: list[tuple[str | None, int | None, str]] = [("worker", rank, "/out") for rank in EVERYBODY]
    told[ODD] = ("evaluator", 0, "/out")
    told[ODD + 1] = ("evaluator", 1, "/out")
    (line,) = fitting(lambda: error_of(lambda: cast_of(told, 0), ValueError), width=400)
    assert line.startswith(f"there are 2 tasks 'evaluator' (ranks {ODD}-{ODD + 1}: evaluator, ranks 0-{ODD - 1},")
    elsewhere: list[tuple[str | None, int | None, str]] = [(None, None, f"/scratch/{rank}") for rank in EVERYBODY]
    fitting(lambda: error_of(lambda: cast_of(elsewhere, 0), ValueError), width=400)
    tasks = [Task("worker", rank % 5000) for rank in EVERYBODY]
    fitting(lambda: error_of(lambda: check_tasks(tasks, []), ValueError), width=400)


def test_ranks_without_gpus() -> None:
    told = [_Rank(None, ("a",) if rank % 2 else (), "m", f"n{rank // PER_NODE:04}", "no driver") for rank in EVERYBODY]
    told[ODD + 1] = told[ODD + 1]._replace(why_none="none to be seen")
    devices = [("gpu:0",) if own.seen else ("cpu:0",) for own in told]
    (line,) = fitting(lambda: error_of(lambda: _check_kinds(told, devices), Exception), width=700)
    assert f"rank {ODD + 1} on n0589: none to be seen; ranks 0,2," in line
