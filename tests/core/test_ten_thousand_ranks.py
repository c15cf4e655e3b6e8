"""Messages about 10,000 ranks: each fits on a screen, names the odd rank first, and takes time by the ranks."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from mpidist.checkpoint.agreement import Agreement
from mpidist.cli.doctor.checks import findings
from mpidist.cli.doctor.facts import CoreFacts, Interface, SharedMemoryFacts
from mpidist.cli.doctor.report import report_text as doctor_text
from mpidist.cli.flight import merged_text
from mpidist.collectives.channel.executor import ChannelStatus
from mpidist.collectives.channel.mismatch import Told, mismatch_text
from mpidist.collectives.mpi import communicator_names
from mpidist.collectives.observe.hang_report import Answer, Wait, WaitState, find_deadlock, report_text
from mpidist.collectives.observe.record import Entry, Flight, FlightHead, Kind, State
from mpidist.core.errors import PeerError
from mpidist.core.text import group_lines, groups_of, names_text, numbered_ranks, ranks_text, said_lines
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
