"""The native core by programs in C: kernels, ranks as threads and as processes, also under sanitizers and on aarch64.

A failure names the seed of its world, and the call: ``check_threads 1 SEED BYTES reads|no`` repeats one call.
TESTS_NATIVE_SEED=12345 chooses other worlds.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.native.building import AARCH64, ADDRESSES, BASE, CLANG, GCC, PLAIN, THREADS, Variant, compiled, run

pytestmark = [pytest.mark.one_rank, pytest.mark.jobs, pytest.mark.timeout(1200)]

SEED = os.environ.get("TESTS_NATIVE_SEED", "1")
# Bytes in a call of one rank. LARGE: results exceed the cache, and memory is read in parts.
SMALL, LARGE = 40_000, 34_000_000
ALL = (GCC, CLANG, ADDRESSES, THREADS)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs, each built once in a session."""
    return tmp_path_factory.mktemp("built")


def long(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("variant", "times"),
    [*((variant, 1) for variant in (GCC, CLANG, BASE, ADDRESSES)), long(AARCH64, 1), long(GCC, 20), long(CLANG, 20)],
    ids=str,
)
def test_every_dtype_and_operation(variant: Variant, times: int, built: Path) -> None:
    printed = run([*compiled("check_kernels", variant, built), str(times)])
    assert printed == "base: right\n" if variant in (BASE, AARCH64) else printed.endswith(": right\n")


def test_overlapping_arrays(built: Path) -> None:
    assert run(compiled("check_overlap", PLAIN, built)) == "right\n"


@pytest.mark.all_cores
@pytest.mark.parametrize(
    ("variant", "worlds", "most_bytes", "reads"),
    [
        *((variant, 16, SMALL, "no") for variant in ALL),
        (PLAIN, 16, SMALL, "reads"),
        (PLAIN, 6, LARGE, "no"),
        (PLAIN, 6, LARGE, "reads"),
        *(long(variant, 100, SMALL, "no") for variant in ALL),
        long(PLAIN, 100, SMALL, "reads"),
        long(PLAIN, 40, LARGE, "reads"),
        long(AARCH64, 30, 10_000, "no"),
    ],
    ids=str,
)
def test_random_calls(variant: Variant, worlds: int, most_bytes: int, reads: str, built: Path) -> None:
    command = [*compiled("check_threads", variant, built), str(worlds), SEED, str(most_bytes), reads]
    assert run(command) == f"{worlds} worlds: right\n"


@pytest.mark.all_cores
@pytest.mark.parametrize("variant", ALL, ids=str)
def test_random_calls_over_nodes(variant: Variant, built: Path) -> None:
    """Over an MPI of the program's own."""
    assert run([*compiled("check_leaders", variant, built), "12", "1"]) == "12 worlds: right\n"


@pytest.mark.all_cores
@pytest.mark.parametrize("jobs", [40, long(1000)])
def test_killed_ranks_hang_nobody(jobs: int, built: Path) -> None:
    assert run([*compiled("check_kills", PLAIN, built), str(jobs), SEED]).startswith(f"{jobs} jobs: right")
