"""What a training meets on sixteen hosts with limited links, two ranks on each."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.jobs import start
from tests.cluster.lab import Lab, Settings
from tests.scale.whole_job import SETTINGS, STEPS, WholeJob, whole_job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

HOSTS, PER_HOST = 16, 2
SECONDS = 240.0


@pytest.fixture(scope="module")
def job(can_have_labs: None) -> Iterator[WholeJob]:
    hosts = Settings(name="sixteen", hosts=HOSTS, rate="100mbit", burst="8k")
    with Lab(hosts) as lab, tempfile.TemporaryDirectory(dir=lab.scratch) as name:
        run = partial(start, lab, Path(name), "whole", *STEPS, env=SETTINGS, timeout=SECONDS)
        yield whole_job(HOSTS * PER_HOST, Path(name), run)


def test_sums_are_right_on_all_ranks(job: WholeJob) -> None:
    job.check_sums()


def test_the_odd_rank_is_named_by_the_error_of_all(job: WholeJob) -> None:
    job.check_mismatch()


def test_each_row_is_dealt_to_one_rank(job: WholeJob) -> None:
    job.check_rows()


def test_all_ranks_write_a_part_and_read_it_again(job: WholeJob) -> None:
    job.check_checkpoint()


def test_a_rank_that_is_asleep_is_named_with_its_line(job: WholeJob) -> None:
    job.check_report()


def test_all_end_when_one_is_killed(job: WholeJob) -> None:
    job.check_end()
