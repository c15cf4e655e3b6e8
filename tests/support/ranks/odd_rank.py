"""Kinds of mismatch: what one rank does otherwise than the others, and how that ends on every rank of a job."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import mpidist
from tests.support.ranks.jobs import run_alone
from tests.support.speed import scaled

# Within this time after the odd rank has begun with its call every rank has its error.
LIMIT_SECONDS = scaled(2.0)
# A hang becomes a CollectiveTimeoutError, and one outside of collectives ends the job.
_DEADLINE_SECONDS = scaled(8.0)
_END_SECONDS = scaled(25.0)

Call = Callable[[Any], Any]


@dataclass(frozen=True)
class Kind:
    """One kind of mismatch.

    Attributes:
        usual: What the ranks but one do with what ``make`` returned.
        odd: What that one does.
        make: Collective; its result is closed afterwards.
        goes_on: Whether the ranks can use it afterwards.
        own_error: The error of the odd rank where it has one of its own; the others then get PeerError.
        shows_lines: Whether errors show the lines of both sides; those of whole data sets show their steps.
    """

    usual: Call
    odd: Call
    make: Callable[[], Any] = mpidist.Communicator
    goes_on: bool = True
    own_error: type[Exception] | None = None
    shows_lines: bool = True


@dataclass
class Outcome:
    """How a kind ended on one rank."""

    error: str
    text: str
    began: float
    ended: float
    after: str = field(default="")


class _Ranks:
    """Where ranks meet apart from what is tested; one that does not come ends the job."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD.Dup()

    def meet(self, where: str) -> None:
        request, give_up = self.comm.Ibarrier(), time.monotonic() + _END_SECONDS
        while not request.Test():
            if time.monotonic() > give_up:
                print(f"rank {self.comm.rank} waits for others after {where}", file=sys.stderr, flush=True)
                self.comm.Abort(9)
            time.sleep(1e-4)


def try_kinds(module: str, odd_rank: int) -> dict[str, Outcome]:
    """Go through all ``KINDS`` of a test module on this rank; returns how each ended."""
    kinds: Mapping[str, Kind] = importlib.import_module(module).KINDS
    ranks = _Ranks()
    outcomes = {}
    for name, kind in kinds.items():
        subject = kind.make()
        ranks.meet(f"making the subject of {name!r}")
        call = kind.odd if ranks.comm.rank == odd_rank % ranks.comm.size else kind.usual
        began = time.monotonic()
        try:
            outcome = Outcome("none", repr(call(subject)), began, 0.0)
        except Exception as error:
            outcome = Outcome(type(error).__name__, str(error), began, 0.0)
        outcome.ended = time.monotonic()
        ranks.meet(f"{name!r}, which ended with {outcome.error}: {outcome.text}")
        outcome.after = _after(subject)
        outcomes[name] = outcome
        ranks.meet(f"the end of {name!r}")
    ranks.comm.Free()
    return outcomes


def _after(subject: Any) -> str:
    try:
        if isinstance(subject, mpidist.Strategy):
            result = subject.reduce("SUM", subject.run(lambda: 1), axis=None) / subject.num_replicas_in_sync
        else:
            result = subject.all_reduce("SUM", 1) / subject.size
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    subject.close()
    return str(result)


def run_kinds(
    module: str, ranks: int, ranks_per_node: int | None = None, odd_rank: int = -1
) -> dict[str, list[Outcome]]:
    """Go through all ``KINDS`` of a test module in one job; returns how each ended, by rank."""
    env = {"MPIDIST_TIMEOUT": str(_DEADLINE_SECONDS)}
    told = run_alone(try_kinds, ranks, module, odd_rank, env=env, timeout=110, ranks_per_node=ranks_per_node)
    return {name: [outcomes[name] for outcomes in told] for name in told[0]}


JOBS = [
    pytest.param((2, None, 0), id="2-ranks"),
    pytest.param((3, None, -1), id="3-ranks", marks=pytest.mark.long),
    pytest.param((2, 1, 1), id="2-nodes-of-1", marks=pytest.mark.long),
    pytest.param((4, 2, 1), id="2-nodes-of-2"),
]


def check(kind: Kind, outcomes: list[Outcome], odd_rank: int) -> None:
    """Assert that every rank had the error in time, and that it shows both sides."""
    odd_rank %= len(outcomes)
    told = "\n".join(f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes))
    for rank, outcome in enumerate(outcomes):
        expected = "MismatchError"
        if kind.own_error is not None:
            expected = kind.own_error.__name__ if rank == odd_rank else "PeerError"
        assert outcome.error == expected, told
        assert outcome.ended - max(each.began for each in outcomes) < LIMIT_SECONDS, told
        if kind.goes_on:
            assert outcome.after == "1.0", told
        else:
            assert "can no longer be used: its ranks waited for one another" in outcome.after, told
        if kind.shows_lines and outcome.error in ("MismatchError", "PeerError"):
            for side in (kind.usual, kind.odd):
                assert any(line in outcome.text for line in lines_of(side)), (lines_of(side), told)
    if kind.own_error is None:
        assert len({outcome.text for outcome in outcomes}) == 1, told


def lines_of(call: Call) -> list[str]:
    """Return the lines of a function, of those inside it, and of those in its file that it calls, as errors show."""
    codes: list[Any] = [call.__code__]
    seen: set[Any] = set()
    while codes:
        code = codes.pop()
        if code not in seen:
            seen.add(code)
            codes += [constant for constant in code.co_consts if hasattr(constant, "co_lines")]
            called = [getattr(call.__globals__.get(name), "__code__", None) for name in code.co_names]
            codes += [other for other in called if other is not None and other.co_filename == code.co_filename]
    lines = {(code.co_filename, line) for code in seen for _, _, line in code.co_lines() if line}
    return [f"{Path(file).name}:{line} (" for file, line in sorted(lines)]
