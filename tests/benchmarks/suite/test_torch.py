"""The benchmarks of torch.distributed under mpirun, with small sizes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.measuring.rows import COMMUNICATOR, DDP, GLOO, MPI, OURS, TORCH, TORCH_WITH_LOCAL
from benchmarks.reports.files import load
from tests.support.ranks.programs import run_program

pytestmark = pytest.mark.one_rank
QUICK = ("--sizes", "4,100K", "--other-sizes", "1K", "--networks", "small", "--seconds", "0.01")


@pytest.mark.jobs
@pytest.mark.torch
def test_every_case(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    job = run_program("benchmarks", 2, "torch", *QUICK, "--out", str(tmp_path), timeout=110)
    assert job.returncode == 0, job.stdout + job.stderr
    found = load(tmp_path / "torch-2-ranks.json")
    assert not [row.key for row in found.rows if row.wrong]
    ways = {(row.by, row.variant) for row in found.rows if row.operation == "all_reduce"}
    assert ways == {(MPI, "in place"), *((OURS, way) for way in (COMMUNICATOR, TORCH))} | {
        (GLOO, way) for way in (TORCH, TORCH_WITH_LOCAL)
    }
    assert {row.operation for row in found.rows} == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", DDP}
    steps = [row for row in found.rows if row.operation == DDP]
    assert len(steps) == 6
    assert min(row.repetitions for row in steps) >= 30
    assert {row.wrong for row in steps if "with communication" in row.variant} == {0}
    assert len([figure for figure in found.figures if figure.operation == DDP]) == 5
    assert "all_reduce of 10 KiB to 100 KiB" in job.stdout


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is installed")
def test_without_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["torch"]) == 2
    assert "needs PyTorch; type: pip install" in capsys.readouterr().err
