"""The tests for a real GPU, tried on the stand-in for CuPy: those that nobody can run may be wrong themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.machine import STAND_IN
from tests.support.ranks.jobs import ROOT, child_environment

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank, pytest.mark.timeout(400)]


def run(*command: str, stand_in: bool) -> subprocess.CompletedProcess[str]:
    environment = child_environment()
    environment.pop(STAND_IN, None)
    if stand_in:
        environment[STAND_IN] = "0.0005"
    else:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=350
    )


def test_without_a_gpu_it_says_so_and_fails(tmp_path: Path) -> None:
    done = run("-m", "tests.gpu", "--out", str(tmp_path), stand_in=False)
    assert done.returncode == 2
    assert "make test-gpu: nothing was run: needs a GPU" in done.stderr
    assert os.listdir(tmp_path) == []


def test_the_tests_are_skipped_with_the_reason(tmp_path: Path) -> None:
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/test_cupy_ops.py", stand_in=False)
    assert done.returncode == 0, done.stdout
    assert "needs a GPU" in done.stdout
    assert "passed" not in done.stdout


def test_a_part_that_passes(tmp_path: Path) -> None:
    done = run("-m", "tests.gpu", "--out", str(tmp_path), "cupy_ops", stand_in=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "make test-gpu: everything passed" in done.stdout
    written = json.loads((tmp_path / "tests.json").read_text())
    assert written["machine"]["stand_in"] is True
    [part] = written["parts"]
    assert (part["part"], part["outcome"], part["failed"]) == ("cupy_ops", "passed", 0)
    assert part["passed"] >= 8
    assert "needs two GPUs" in " ".join(part["reasons"])


def test_a_part_that_takes_too_long(tmp_path: Path) -> None:
    done = run("-m", "tests.gpu", "--out", str(tmp_path), "--seconds", "0.2", "cupy_ops", stand_in=True)
    assert done.returncode == 1
    [part] = json.loads((tmp_path / "tests.json").read_text())["parts"]
    assert part["outcome"] == "out of time"


@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("kernels", "alignment"),
        ("nccl", "movements and 2"),
        pytest.param("kernels", "numpy", marks=pytest.mark.long),
        pytest.param("nccl", "not 4", marks=pytest.mark.long),
        pytest.param("collectives", "2x1 or 1x2", marks=pytest.mark.long),
        pytest.param("training", "multi_worker-2", marks=pytest.mark.long),
    ],
)
def test_on_stand_in(file: str, chosen: str) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-k", chosen, f"tests/gpu/test_{file}.py"]
    done = run("-m", "pytest", *options, stand_in=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
