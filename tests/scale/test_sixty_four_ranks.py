"""What a training meets on 64 ranks, as 16 and as 32 virtual nodes of this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.jobs import results_in
from tests.elastic import test_run as elastic
from tests.scale.whole_job import PROGRAM, SETTINGS, STEPS, WholeJob, WholeJobTests, whole_job
from tests.support.ranks.jobs import run_script

pytestmark = [pytest.mark.jobs, pytest.mark.long, pytest.mark.one_rank, pytest.mark.timeout(400)]

RANKS, FEWER, DIES = 64, 24, 37
SECONDS = 240.0
# Each start takes half a minute.
NODES = {"16-nodes": 4, "32-nodes": 2}


@pytest.fixture(scope="module", params=NODES.values(), ids=NODES)
def job(request: pytest.FixtureRequest) -> Iterator[WholeJob]:
    with tempfile.TemporaryDirectory(prefix="mpidist-scale-") as name:
        env = {"RESULTS": name, **SETTINGS}
        run = partial(run_script, PROGRAM, RANKS, *STEPS, env=env, timeout=SECONDS, ranks_per_node=request.param)
        yield whole_job(RANKS, Path(name), run)


class TestSixtyFourRanks(WholeJobTests):
    """On virtual nodes."""


def test_fewer_ranks_restore_it(job: WholeJob) -> None:
    for file in job.folder.glob("*.json"):
        file.unlink()
    done = run_script(PROGRAM, FEWER, "restore", env={"RESULTS": str(job.folder)}, timeout=90.0, ranks_per_node=2)
    assert done.returncode == 0, done.stderr
    assert [found["restore"]["wrong"] for found in results_in(job.folder).values()] == [[]] * FEWER


@elastic.needs_ulfm
def test_a_training_goes_on_with_63() -> None:
    found = elastic.job(RANKS, {DIES: 20}, ranks_per_node=4, timeout=SECONDS)
    assert found.returncode == 0, found.stderr
    assert elastic.results(found) == [elastic.expected(RANKS - 1)] * (RANKS - 1)
    assert "go on from commit" in found.stderr
