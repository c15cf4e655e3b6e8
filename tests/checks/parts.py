"""The parts of the checks, with their commands, numbers of ranks and time limits."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.ranks.jobs import ROOT, mpirun_command

# A limit for hangs. On two quiet cores each part takes less than a third of it, on half of their time less than two.
LIMIT_SECONDS = 1800.0


@dataclass(frozen=True)
class Part:
    """A command that must succeed, run in the project's root.

    Attributes:
        takes_all_cores: Runs alone.
        keeps_to_one_core: Has ranks that wait for one another. They yield a shared core, and would use up a second.
        is_pytest: Accepts ``--results FILE``.
    """

    name: str
    command: Sequence[str]
    takes_all_cores: bool = False
    keeps_to_one_core: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    is_pytest: bool = True
    seconds: float = LIMIT_SECONDS


def lint() -> list[Part]:
    """Return the static checks of the code."""
    scripts = Path(sys.executable).parent
    return [
        Part("ruff", [str(scripts / "ruff"), "check", "--output-format=concise", "."], is_pytest=False),
        Part("format", [str(scripts / "ruff"), "format", "--check", "--quiet", "."], is_pytest=False),
        Part("codespell", [str(scripts / "codespell")], is_pytest=False),
        Part("mypy", [str(scripts / "mypy")], is_pytest=False),
        Part("imports", [str(scripts / "lint-imports"), "--no-cache"], is_pytest=False),
    ]


def one_rank(name: str, paths: Iterable[str], *options: str, seconds: float = LIMIT_SECONDS, **more: bool) -> Part:
    """Return a session of one process."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *paths]
    return Part(name, command, seconds=seconds, **more)


def session(
    name: str,
    ranks: int,
    mark: str | None = None,
    paths: Sequence[str] = ("tests",),
    but: str | None = None,
    **environment: str,
) -> Part:
    """Return a session of several ranks, with the tests of one mark if given, without those that have ``but`` in names.

    MPIDIST_RANKS_PER_NODE in ``environment`` makes virtual nodes of the ranks.
    """
    # Ranks must not share a cache folder. Open MPI gives them a terminal, which would turn colours on.
    command = [*mpirun_command(), "-n", str(ranks), sys.executable, "-m", "pytest", "-q", "--color=no", "--with-mpi"]
    command += ["-p", "no:cacheprovider", "--ranks", str(ranks)]
    command += [] if but is None else ["-k", f"not {but}"]
    command += paths if mark is None else ["-m", mark, *files_with(mark, paths)]
    return Part(name, command, environment=environment, keeps_to_one_core=True)


def files_with(mark: str, folders: Iterable[str]) -> list[str]:
    """Return the test files that use a mark, so that ranks need not import the others."""
    pattern = re.compile(rf"\bmark\.{mark}\b")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("test_*.py"))]
    found = [path for path in files if pattern.search(path.read_text())]
    if not found:
        raise ValueError(f"no file in {', '.join(folders)} uses the mark {mark}")
    return [str(path.relative_to(ROOT)) for path in found]


# Tests that one process runs, the slowest group first. A last part has the tests of no group.
GROUPS = {
    "collectives and launching": [
        "tests/collectives", "tests/topology", "tests/cli", "tests/cluster_resolver", "tests/slurm",
    ],
    "servers and programs": [
        "tests/parameter_server", "tests/examples", "tests/estimator", "tests/elastic", "tests/benchmarks",
        "tests/test_readme.py",
    ],
    "strategies and support": [
        "tests/checkpoint", "tests/strategies", "tests/values", "tests/training", "tests/cross_device_ops",
        "tests/support", "tests/mutations", "tests/checks", "tests/test_packaging.py",
    ],
    # Without a compiler all of these are skipped, and the summary says so.
    "core in C": ["tests/native/test_programs.py", "tests/native/test_sources.py"],
}  # fmt: skip


def groups() -> list[Part]:
    """Return the sessions of one process, over all tests and the examples of docstrings."""
    grouped = [path for paths in GROUPS.values() for path in paths]
    rest = one_rank("rest", ["tests", "mpidist"], *(f"--ignore={path}" for path in grouped))
    return [*(one_rank(name, paths) for name, paths in GROUPS.items()), rest]


def ordinary() -> list[Part]:
    """Return the parts of ``make test``."""
    return [
        session("2 ranks", 2),
        session("2 nodes x 2 ranks", 4, "nodes", MPIDIST_RANKS_PER_NODE="2"),
        session("3 ranks", 3, "counts"),
        # Arrays on GPUs then move as between nodes, which another part tests.
        session("2 ranks, no native core", 2, "nodes", ["tests/collectives"], "fake_gpus", MPIDIST_NATIVE="0"),
        # Only algorithms depend on powers of two.
        session("4 ranks", 4, "powers"),
        *groups(),
        *lint(),
    ]


def quick() -> list[Part]:
    """Return the parts of ``make quick``: tests without jobs, and those that depend on the number of ranks."""
    first = [f"tests/{room}" for room in _FIRST_HALF]
    return [
        one_rank("one rank, first", first, "-m", "not jobs"),
        one_rank("one rank, second", ["tests", "mpidist"], "-m", "not jobs", *(f"--ignore={path}" for path in first)),
        session("2 ranks", 2, "counts", ["tests/collectives"]),
        *lint(),
    ]


# Half of the tests that start no jobs, by time.
_FIRST_HALF = ["acceptance", "arrays", "checkpoint", "cross_device_ops"]
_FIRST_HALF += ["parameter_server", "strategies", "training", "values"]
