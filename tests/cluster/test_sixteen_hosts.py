"""What a training meets on sixteen hosts with limited links, two ranks on each."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.jobs import start
from tests.cluster.lab import Lab, Settings
from tests.scale.whole_job import SETTINGS, STEPS, WholeJob, WholeJobTests, whole_job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

HOSTS, PER_HOST = 16, 2
SECONDS = 240.0


@pytest.fixture(scope="module")
def job(can_have_labs: None) -> Iterator[WholeJob]:
    hosts = Settings(name="sixteen", hosts=HOSTS, rate="100mbit", burst="8k")
    with Lab(hosts) as lab, tempfile.TemporaryDirectory(dir=lab.scratch) as name:
        run = partial(start, lab, Path(name), "whole", *STEPS, env=SETTINGS, timeout=SECONDS)
        yield whole_job(HOSTS * PER_HOST, Path(name), run)


class TestSixteenHosts(WholeJobTests):
    """On hosts."""
