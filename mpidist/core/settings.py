"""The ``MPIDIST_*`` environment variables: names, defaults, meanings, and the code that reads them.

The build reads ``MPIDIST_BUILD_NATIVE`` as well, before this file can be imported.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from mpidist.core.text import decimal_number, whole_number

Value = TypeVar("Value", covariant=True)
Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class Setting(Generic[Value]):
    """An environment variable."""

    name: str
    default: Value
    parse: Callable[[str], Value]
    expected: str
    meaning: str
    same_on_all: bool = False
    """Whether every rank must have the same value."""

    def read(self) -> Value:
        """Return the value of the variable. Raise ValueError if it does not parse."""
        text = os.environ.get(self.name)
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise ValueError(f"{self.name}={text!r}: expected {self.expected}") from None


def _positive_int(text: str) -> int:
    number = whole_number(text)
    if number < 1:
        raise ValueError
    return number


def _power_of_two(text: str) -> int:
    number = whole_number(text)
    if not 1 << 16 <= number <= 1 << 30 or number & (number - 1):
        raise ValueError
    return number


def _positive_float(text: str) -> float:
    number = decimal_number(text)
    if number == 0:
        raise ValueError
    return number


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError
    return text == "1"


def _jobs(text: str) -> dict[str, int]:
    jobs: dict[str, int] = {}
    for part in text.split(","):
        job, _, count = part.strip().partition(":")
        if not job.isidentifier() or job in jobs:
            raise ValueError
        jobs[job] = _positive_int(count)
    return jobs


SETTINGS: dict[str, Setting[object]] = {}
"""All settings, by name."""


def _setting(
    name: str, default: Parsed, parse: Callable[[str], Parsed], expected: str, meaning: str, same_on_all: bool = False
) -> Setting[Parsed]:
    SETTINGS[name] = setting = Setting(name, default, parse, expected, meaning, same_on_all)
    return setting


def _switch(name: str, default: bool, meaning: str) -> Setting[bool]:
    return _setting(name, default, _flag, "0 or 1", meaning)


ABORT_ON_EXCEPTION = _switch(
    "MPIDIST_ABORT_ON_EXCEPTION",
    True,
    "1: an uncaught exception on one rank prints its traceback with the rank and ends the whole job",
)
BUILD_NATIVE = _switch(
    "MPIDIST_BUILD_NATIVE",
    True,
    "0: pip and make build mpidist without its native core, for machines without a compiler (docs/install.md)",
)
CHECK_NAN = _setting(
    "MPIDIST_CHECK_NAN",
    False,
    _flag,
    "0 or 1",
    "1: a reduction whose result has NaN or infinity raises NonFiniteError, which names the ranks that contributed "
    "them (docs/stragglers.md)",
    same_on_all=True,
)
FLIGHT_RECORD: Setting[str | None] = _setting(
    "MPIDIST_FLIGHT_RECORD",
    None,
    str,
    "a folder",
    "every rank keeps its last 1,000 collectives there, also after kill -9; python -m mpidist flight shows them",
)
FULL_TRACEBACK = _switch(
    "MPIDIST_FULL_TRACEBACK",
    False,
    "1: every rank prints the whole traceback of an uncaught exception, with mpidist's frames (docs/hangs.md)",
)
GPU_AWARE_MPI: Setting[bool | None] = _setting(
    "MPIDIST_GPU_AWARE_MPI",
    None,
    _flag,
    "0 or 1",
    "whether to pass pointers to GPU memory to MPI (docs/gpu.md); detected automatically, and off if unsure",
)
GUARD = _switch(
    "MPIDIST_GUARD",
    True,
    "1: a thread answers ranks that wait for this one, so that they can say what keeps them (docs/hangs.md)",
)
JOBS: Setting[dict[str, int] | None] = _setting(
    "MPIDIST_JOBS",
    None,
    _jobs,
    "jobs with their numbers of tasks, such as ps:1,worker:3",
    "the tasks of the ranks, in rank order, for the resolvers of MPI and Slurm; all are workers by default",
    same_on_all=True,
)
METRICS: Setting[str | None] = _setting(
    "MPIDIST_METRICS",
    None,
    str,
    "a folder",
    "every rank writes its metrics there as OpenMetrics text, for node_exporter's textfile collector "
    "(docs/stragglers.md)",
)
NATIVE = _switch(
    "MPIDIST_NATIVE", True, "0: collectives do not use the native core, as if it was not built (docs/install.md)"
)
PROGRESS_THREAD = _switch(
    "MPIDIST_PROGRESS_THREAD", True, "1: a thread advances collectives that were started and not yet waited for"
)
RANKS_PER_NODE: Setting[int | None] = _setting(
    "MPIDIST_RANKS_PER_NODE",
    None,
    _positive_int,
    "a whole number of at least 1",
    "ranks on one machine count as several virtual nodes of this many ranks each (for tests)",
    same_on_all=True,
)
PUSH_FROM: Setting[int | None] = _setting(
    "MPIDIST_PUSH_FROM",
    None,
    _positive_int,
    "a number of bytes of at least 1",
    "from this size on, all-reduces write results directly into the memory of the other ranks of a node. The default "
    "is 262144, for private arrays only if neighbouring ranks have no common cache, and never if ranks share a core",
)
READ_NEIGHBOURS = _switch(
    "MPIDIST_READ_NEIGHBOURS",
    True,
    "0: ranks of a node never read or write each other's private memory (process_vm_readv, process_vm_writev)",
)
REPORT = _switch(
    "MPIDIST_REPORT",
    False,
    "1: at the end rank 0 prints the totals of all collectives on stderr (docs/tracing.md)",
)
STAGING_BYTES: Setting[int | None] = _setting(
    "MPIDIST_STAGING_BYTES",
    None,
    _power_of_two,
    "a power of two from 65536 to 1073741824",
    "size of the pieces in which arrays on a GPU pass through host memory to other nodes; by default 4 MiB, 8 MiB if "
    "all ranks have an RDMA network of 100 Gb/s, 16 MiB with 200 Gb/s",
)
STATUS: Setting[str | None] = _setting(
    "MPIDIST_STATUS",
    None,
    str,
    "a folder of your own",
    "every rank writes its position there about once a second; python -m mpidist top shows it (docs/top.md)",
)
TIMEOUT = _setting(
    "MPIDIST_TIMEOUT",
    1800.0,
    _positive_float,
    "seconds, more than 0",
    "how long a rank waits in one collective before CollectiveTimeoutError",
)
TRACE: Setting[str | None] = _setting(
    "MPIDIST_TRACE",
    None,
    str,
    "a folder",
    "every rank writes a trace of its collectives there, for Perfetto or chrome://tracing (docs/tracing.md)",
)
TUNING_FILE: Setting[str | None] = _setting(
    "MPIDIST_TUNING_FILE",
    None,
    str,
    "a file that python -m mpidist tune wrote",
    "algorithms of collectives by size; the value of rank 0 counts; the shipped table by default",
)
WARN_AFTER = _setting(
    "MPIDIST_WARN_AFTER",
    60.0,
    _positive_float,
    "seconds, more than 0",
    "how long a rank waits in one collective before it reports that on stderr",
)


def warn_about_unknown() -> None:
    """Warn about unknown ``MPIDIST_*`` variables, which are most often misspelt."""
    unknown = sorted(name for name in os.environ if name.startswith("MPIDIST_") and name not in SETTINGS)
    if unknown:
        warnings.warn(
            f"unknown environment variable {', '.join(unknown)}; mpidist knows {', '.join(sorted(SETTINGS))}",
            stacklevel=2,
        )
