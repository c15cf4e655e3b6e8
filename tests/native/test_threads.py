"""The native core with ranks as threads: random calls, bit for bit like a reference, also under sanitizers.

A failure names the seed of its world, and the call: ``check_threads 1 SEED BYTES reads|no`` repeats that one.
TESTS_NATIVE_SEED=12345 takes other worlds.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.native.building import ADDRESSES, CLANG, GCC, PLAIN, THREADS, Variant, compiled, run

pytestmark = [pytest.mark.one_rank, pytest.mark.jobs, pytest.mark.all_cores, pytest.mark.timeout(900)]

SEED = int(os.environ.get("TESTS_NATIVE_SEED", "1"))
# In a call of one rank. LARGE: results go past the cache, and memory is read in parts.
SMALL, LARGE = 40_000, 34_000_000


def check(built: Path, variant: Variant, worlds: int, most_bytes: int = SMALL, reads: str = "no") -> None:
    command = [*compiled("check_threads", variant, built), str(worlds), str(SEED), str(most_bytes), reads]
    assert run(command) == f"{worlds} worlds: right\n"


@pytest.mark.parametrize("variant", [GCC, CLANG, ADDRESSES, THREADS], ids=str)
def test_random_calls(variant: Variant, built: Path) -> None:
    check(built, variant, 16)


def test_ranks_that_read_private_memory(built: Path) -> None:
    check(built, PLAIN, 16, reads="reads")


@pytest.mark.parametrize("reads", ["no", "reads"])
def test_large_arrays(reads: str, built: Path) -> None:
    check(built, PLAIN, 6, LARGE, reads)


@pytest.mark.long
@pytest.mark.parametrize("variant", [GCC, CLANG, ADDRESSES, THREADS], ids=str)
def test_more_random_calls(variant: Variant, built: Path) -> None:
    check(built, variant, 100)


@pytest.mark.long
def test_more_ranks_that_read_private_memory(built: Path) -> None:
    check(built, PLAIN, 100, reads="reads")
    check(built, PLAIN, 40, LARGE, "reads")
