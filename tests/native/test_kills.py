"""The native core with ranks as processes: results are right, and a rank that is killed hangs nobody."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.native.building import PLAIN, compiled, run

pytestmark = [pytest.mark.one_rank, pytest.mark.jobs, pytest.mark.all_cores, pytest.mark.timeout(600)]

SEED = os.environ.get("TESTS_NATIVE_SEED", "1")


@pytest.mark.parametrize("jobs", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_one_is_killed(jobs: int, built: Path) -> None:
    assert run([*compiled("check_kills", PLAIN, built), str(jobs), SEED]).startswith(f"{jobs} jobs: right")
