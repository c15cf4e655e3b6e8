"""Trainings on virtual hosts that lose a rank by kill -9 and go on with the others."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from tests.cluster.jobs import PLACEMENTS, start
from tests.cluster.lab import Lab
from tests.elastic import test_run as elastic

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(150)]

RANKS = len(PLACEMENTS["block"].hosts)


@elastic.needs_ulfm
@pytest.mark.parametrize("dies", [3, 0], ids=["a rank", "the first"])
def test_a_training_goes_on_with_seven_of_eight(lab: Lab, dies: int) -> None:
    with tempfile.TemporaryDirectory(dir=lab.scratch) as name:
        program = Path(name, "train.py")
        program.write_text(elastic.TRAIN)
        arguments = (elastic.STEPS, "step", json.dumps({dies: 20}), 1)
        found = start(lab, Path(name), program, *arguments, flags=("--with-ft", "ulfm"), timeout=120.0)
    assert found.returncode == 0, found.stderr
    assert elastic.results(found) == [elastic.expected(RANKS - 1)] * (RANKS - 1)
    assert "go on from commit" in found.stderr
