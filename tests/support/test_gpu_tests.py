"""The tests for a real GPU, run on the stand-in for CuPy, and the targets of make that create environments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.suite.gpu import JOBS
from tests.gpu.__main__ import PARTS
from tests.gpu.machine import STAND_IN
from tests.support.ranks.jobs import ROOT, child_environment

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank, pytest.mark.timeout(400)]


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = child_environment()
    for name in (STAND_IN, "PYTHON", "VENV", "MAKEFLAGS", "MAKELEVEL"):
        environment.pop(name, None)
    return subprocess.run(command, env=environment | variables, cwd=ROOT, capture_output=True, text=True, timeout=350)


def test_tests_and_benchmarks_take_half_an_hour() -> None:
    assert sum(PARTS.values()) + sum(job.seconds for job in JOBS) <= 1800


def test_a_missing_gpu_fails_with_the_reason(tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "tests.gpu", "--out", str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "make test-gpu: nothing was run: needs a GPU" in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_part_that_passes(tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "tests.gpu", "--out", str(tmp_path), "cupy_ops", **{STAND_IN: "0.0005"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "make test-gpu: passed but for what was skipped, see above\nnext: make bench-gpu" in done.stdout
    [part] = json.loads((tmp_path / "tests.json").read_text())["parts"]
    assert (part["part"], part["outcome"], part["failed"]) == ("cupy_ops", "passed", 0)
    assert part["passed"] >= 8
    assert "needs two GPUs" in " ".join(part["reasons"])


@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("kernels", "alignment"),
        ("nccl", "movements and 2-names1"),
        pytest.param("kernels", "numpy", marks=pytest.mark.long),
        pytest.param("nccl", "not 4-", marks=pytest.mark.long),
        pytest.param("collectives", "2x1 or 1x2", marks=pytest.mark.long),
        pytest.param("training", "multi_worker-2", marks=pytest.mark.long),
        pytest.param("torch", "not 2x1", marks=pytest.mark.torch),
    ],
)
def test_on_stand_in(file: str, chosen: str) -> None:
    if file == "torch":
        pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")
    options = ["-q", "-p", "no:cacheprovider", "-k", chosen, f"tests/gpu/test_{file}.py"]
    done = run(sys.executable, "-m", "pytest", *options, **{STAND_IN: "0.0005"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_missing_packages_are_named_with_what_to_type(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    python = tmp_path / "bin" / "python"
    done = run("make", "test-gpu", f"PYTHON={python}", PYTHONPATH="", **{STAND_IN: "0"})
    assert done.returncode != 0
    assert f"type: {python} -m pip install " in done.stderr
    assert "pip install --no-index --find-links wheels NAMES" in done.stderr


@pytest.mark.parametrize("target", ["env", "test", "clean", "test-torch", "test-jax", "test-types"])
def test_make_changes_nothing_outside_of_the_tree(target: str, tmp_path: Path) -> None:
    outside = tmp_path / "usr"
    (outside / "bin").mkdir(parents=True)
    names = ("VENV", "TORCH_VENV", "KERAS_VENV", "JAX_VENV", "CUPY_VENV", "MPICH_VENV", "TYPES_VENV")
    done = run("make", "--dry-run", target, *(f"{name}={outside}" for name in names), f"PYTHON={sys.executable}")
    assert f"-m venv {outside}" not in done.stdout
    if target == "clean":
        assert str(outside) not in done.stdout
    else:
        assert done.returncode != 0
        assert f"{outside} is no virtual environment, and not in this folder" in done.stderr
