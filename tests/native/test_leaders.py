"""Calls over nodes by the native core, with ranks as threads, over an MPI of the test's own, also under sanitizers.

A failure names the seed of its world.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.building import ADDRESSES, CLANG, GCC, THREADS, Variant, compiled, run

pytestmark = [pytest.mark.one_rank, pytest.mark.jobs, pytest.mark.all_cores, pytest.mark.timeout(300)]

WORLDS = 12


@pytest.mark.parametrize("variant", [GCC, CLANG, ADDRESSES, THREADS], ids=str)
def test_random_calls_over_nodes(variant: Variant, built: Path) -> None:
    assert run([*compiled("check_leaders", variant, built), str(WORLDS), "1"]) == f"{WORLDS} worlds: right\n"
