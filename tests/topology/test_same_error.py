"""Ranks with the same error: it is printed once, and never lost."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from pathlib import Path

import pytest

from mpidist.core.wording import ranks_text
from mpidist.topology import last_output
from tests.support.ranks.jobs import run_script
from tests.support.speed import scaled

pytestmark = pytest.mark.one_rank


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(last_output, "write_last", texts.append)
    return texts


def prints(text: str, rank: int) -> None:
    last_output.print_once(text, text, rank, lambda ranks: f"ranks {ranks_text(ranks)}")


def in_threads(*errors: str) -> None:
    threads = [threading.Thread(target=prints, args=(text, rank)) for rank, text in enumerate(errors)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_one_prints_and_names_the_others(printed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_output, "_LISTEN_SECONDS", 3)
    monkeypatch.setattr(last_output, "_ANSWER_SECONDS", 10)
    in_threads("one", "one", "one", "one", "another")
    assert len(printed) == 3
    (first,) = {0, 1, 2, 3} & {int(text.split()[1].rstrip(":")) for text in printed if text.endswith(":\none")}
    others = ranks_text(rank for rank in range(4) if rank != first)
    assert set(printed) == {f"ranks {first}:\none", "ranks 4:\nanother", f"ranks {others}: the same error\n"}


def test_a_rank_that_is_not_named_prints_it_itself(printed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one has stopped, does not answer any more, or is not of this user; or there are no descriptors left."""
    monkeypatch.setattr(last_output, "_ANSWER_SECONDS", 0.05)
    address = last_output._address("one")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first:
        first.bind(address)
        prints("one", 1)  # it does not listen
        first.listen()
        start = time.monotonic()
        prints("one", 2)  # no answer
        assert time.monotonic() - start < scaled(1)
        thread = threading.Thread(target=prints, args=("one", 3))
        thread.start()
        given_up, waiting = first.accept()[0], first.accept()[0]
        with given_up, waiting:
            waiting.send(b"!")  # heard, and never named
            thread.join()
        monkeypatch.setattr(last_output.os, "getuid", lambda: -1)
        monkeypatch.setattr(last_output, "_address", lambda key: address)
        prints("one", 4)
    monkeypatch.setattr(last_output.socket, "socket", lambda *_: (_ for _ in ()).throw(OSError("too many open files")))
    prints("one", 5)
    assert printed == [f"ranks {rank}:\none" for rank in range(1, 6)]


def test_each_file_that_errors_go_to_has_the_whole_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = last_output._address("one")
    with (tmp_path / "rank0").open("w") as own, (tmp_path / "rank1").open("w") as other:
        monkeypatch.setattr(last_output.sys, "stderr", own)
        mine = last_output._address("one")
        monkeypatch.setattr(last_output.sys, "stderr", other)
        assert len({shared, mine, last_output._address("one")}) == 3
        monkeypatch.setattr(last_output.sys, "stderr", own)
        assert last_output._address("one") == mine
    monkeypatch.setattr(os, "getppid", lambda: 1)  # another launcher, another job
    assert last_output._address("one") != shared


DIFFERENT = """
import sys, time, numpy, mpidist
comm = mpidist.Communicator()
caught = [int(rank) for rank in sys.argv[2:]]
try:
    comm.all_reduce("SUM", numpy.ones(1 + (comm.rank == int(sys.argv[1]))))
except mpidist.MismatchError:
    if comm.rank not in caught:
        raise
time.sleep(20)
"""


def printing(odd: int, *caught: int, **variables: str) -> list[str]:
    """Run a job of four ranks on two nodes, of which one calls something else; return who printed its error."""
    start = time.monotonic()
    job = run_script(DIFFERENT, 4, str(odd), *map(str, caught), env=variables, ranks_per_node=2)
    assert job.returncode == 1
    assert time.monotonic() - start < scaled(15), "the ranks that caught it are not waited for"
    found = re.findall(r"^rank (\d) of 4 on host \S+:\nTraceback", job.stderr, re.MULTILINE)
    assert job.stderr.count("Traceback") == job.stderr.count("MismatchError: the ranks made") == len(found)
    return found


@pytest.mark.jobs
def test_a_mismatch_is_printed_on_the_first_node_alone() -> None:
    (first,) = printing(1)
    assert first in "01"


@pytest.mark.jobs
@pytest.mark.parametrize(("odd", "caught", "speaks"), [(1, (0, 1), "23"), (2, (0, 1), "2")])
def test_a_mismatch_that_the_first_node_catches_is_printed_by_another(
    odd: int, caught: tuple[int, ...], speaks: str
) -> None:
    (first,) = printing(odd, *caught)
    assert first in speaks


@pytest.mark.jobs
def test_with_full_tracebacks_each_rank_prints_its_own() -> None:
    assert sorted(printing(1, MPIDIST_FULL_TRACEBACK="1")) == ["0", "1", "2", "3"]


LATE = """
import time, numpy, mpidist
comm = mpidist.Communicator()
if comm.rank == {late}:
    time.sleep(60)
comm.all_reduce("SUM", numpy.ones(1), options=mpidist.experimental.CommunicationOptions(timeout_seconds={timeout}))
"""


@pytest.mark.jobs
@pytest.mark.parametrize("late", [5, 1, 0])
def test_ranks_that_wait_for_the_same_one_print_one_report(late: int) -> None:
    job = run_script(LATE.format(late=late, timeout=scaled(1)), 6, ranks_per_node=2)
    assert job.returncode != 0
    found = re.findall(r"^rank (\d) of 6 on host \S+:\nTraceback", job.stderr, re.MULTILINE)
    assert job.stderr.count("CollectiveTimeoutError: rank") == len(found)
    (first,) = found
    assert first in "01"
