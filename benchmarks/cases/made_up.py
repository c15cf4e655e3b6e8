"""What a rank holds or is told in a job of any number of ranks, from the library's own objects with made-up content."""

from __future__ import annotations

import json
import pickle
import time
import tracemalloc
from collections.abc import Callable, Iterator

from benchmarks.measuring.rows import Figure
from mpidist.cli.doctor.machine import facts_of_this_rank
from mpidist.collectives.channel.executor import ChannelStatus
from mpidist.collectives.channel.mismatch import mismatch_text
from mpidist.collectives.observe.hang_report import Answer, Wait, WaitState, report_text
from mpidist.collectives.observe.hangs import send_answers
from mpidist.topology import import_mpi
from mpidist.topology.topology import PLACE, map_of_ranks

RANKS_PER_NODE = 8
# What each rank tells of its call, which goes to all ranks once, whoever makes it.
_DIGEST_AND_LENGTH = bytes(16)
_TEXT, _SITE = "all_reduce SUM of 161 x float32 arrays", "/home/somebody/projects/net/train.py:41 (step)"


def run(ranks: int) -> list[Figure]:
    """Return what a job of so many ranks has, on one process."""
    import_mpi()
    figures = [
        *_made("map of ranks and nodes", lambda: map_of_ranks(_places(ranks))),
        *_made("mismatch, message", lambda: mismatch_text(_calls(ranks))),
        *_made("hang report", lambda: report_text(17, {rank: _status(rank) for rank in range(ranks)}, ranks)),
    ]
    nodes = ranks // RANKS_PER_NODE
    told = {
        "start of a communicator": ("rank", ranks, _places(1)),
        "mismatch": ("rank", ranks, _DIGEST_AND_LENGTH),
        "hang report, to the rank that asks": ("node", nodes, b"".join(_answers(4711, RANKS_PER_NODE))),
        "checkpoint, an answer": (
            "rank", ranks, pickle.dumps(json.dumps({"result": {"digest": 1234567890, "problem": None}}))
        ),
        "doctor": ("rank", ranks, pickle.dumps(facts_of_this_rank())),
    }  # fmt: skip
    for name, (who, count, data) in told.items():
        figures.append(Figure("made up", f"{name}: from each {who}", len(data), "B"))
        figures.append(Figure("made up", f"{name}: in all", count * len(data) / 2**20, "MiB"))
    return figures


def _answers(first: int, ranks: int) -> Iterator[bytes]:
    """Yield the messages of a node: its first rank's own answer, and those of the others."""
    answers = [(rank, _status(rank)) for rank in range(first, first + ranks)]
    parts: list[bytes] = []
    for some in (answers[:1], answers[1:]):
        send_answers(parts.append, some)
    yield from (pickle.dumps(("", 17, (part,))) for part in parts)


def _made(name: str, make: Callable[[], object]) -> list[Figure]:
    """Return how long it takes to make an object, and what it holds, or the characters of a text."""
    begin = time.perf_counter()
    make()
    took = time.perf_counter() - begin
    tracemalloc.start()
    made = make()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    size = (len(made), "characters") if isinstance(made, str) else (kept / 2**10, "KiB")
    return [Figure("made up", name, *size), Figure("made up", f"{name}: time to make it", took * 1e3, "ms")]


def _places(ranks: int) -> bytes:
    nodes = [rank // RANKS_PER_NODE for rank in range(ranks)]
    return b"".join(PLACE.pack(node * RANKS_PER_NODE, f"node{node:05}".encode()) for node in nodes)


def _calls(ranks: int) -> list[tuple[str, str, str]]:
    return [("plan", _TEXT if rank < ranks - 1 else "barrier", _SITE) for rank in range(ranks)]


def _status(rank: int) -> Answer:
    wait = WaitState(rank, Wait("communicator 1", 17, _TEXT, _SITE), {"communicator 1 of ranks 0-9999": 17})
    status = ChannelStatus(17, 17, _TEXT, True, 60.0, False)
    return Answer(status, wait, _SITE, f"process {rank} on node{rank // RANKS_PER_NODE:05}")
