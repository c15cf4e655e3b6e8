"""The benchmarks on a GPU, once on the stand-in for CuPy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.reports.files import load
from tests.support.ranks.jobs import ROOT, child_environment, mpirun_command

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

MIB = 1 << 20


def suite(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    launcher = " ".join(mpirun_command())
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", "gpu", *options],
        env=child_environment({"MPIRUN": launcher, **environment}),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_the_whole_suite_on_the_stand_in(tmp_path: Path) -> None:
    sizes = ["--staged", "5M", "--sizes", "64K,1M", "--seconds", "0.01"]
    done = suite("--stand-in", *sizes, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    results = load(tmp_path / "gpu.json")
    assert results.machine["gpu"] == "Pretended GPU"
    assert {one.operation for one in results.rows} == {"gpu_staging", "gpu_nccl_call", "gpu_all_reduce"}
    assert sum(one.wrong or 0 for one in results.rows) == 0
    whole = [one for one in results.rows if one.variant == "whole"]
    assert [(one.size, one.ranks, one.algorithm) for one in whole] == [
        (64 << 10, 2, "hierarchical"),
        (MIB, 2, "hierarchical"),
    ]
    assert "a call of NCCL: over CuPy's own" in done.stdout


def test_without_a_gpu_it_says_so_and_fails(tmp_path: Path) -> None:
    done = suite("--out", str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "make bench-gpu: nothing was measured: needs a GPU" in done.stderr
