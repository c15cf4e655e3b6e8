"""The benchmarks of input with small files: every case runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.measuring.rows import OURS
from benchmarks.reports.files import load
from benchmarks.suite import large_file
from tests.support.ranks.programs import run_program

pytestmark = pytest.mark.one_rank


def test_every_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["input", "--sizes", "64K,128K", "--file", "4M", "--seconds", "0.01", "--batches", "11"]
    assert main([*arguments, "--out", str(tmp_path), "--folder", str(tmp_path)]) == 0
    results = load(tmp_path / "input.json")
    assert {(row.by, row.variant, row.size, row.wrong) for row in results.rows} >= {
        (by, variant, size, 0)
        for by in (OURS, "numpy")
        for variant in ("in order", "shuffled")
        for size in (64 << 10, 128 << 10)
    }
    assert {figure.operation for figure in results.figures} == {"consumer", "prefetch"}
    assert "batches of 64 KiB, in order: as fast as NumPy's slice" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["input.csv", "input.json"]


LARGE = """
import sys
from pathlib import Path

from benchmarks.suite import large_file

sys.exit(large_file.main(Path(sys.argv[1]), Path(sys.argv[2])))
"""


@pytest.mark.jobs
@pytest.mark.parametrize("ranks", [1, 3])
def test_an_epoch_over_a_file_on_several_ranks(ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.bin"
    large_file.write(path, 10_000 * 4096)
    assert path.stat().st_size == 10_000 * 4096
    job = run_program(LARGE, ranks, str(path), str(tmp_path), timeout=110)
    assert job.returncode == 0, job.stdout + job.stderr
    figures = {figure.name: figure.value for figure in load(tmp_path / f"{large_file.NAME}.json").figures}
    assert figures["file"] == pytest.approx(0.041, abs=0.001)
    for order in ("in order", "shuffled", "shuffled in windows"):
        assert figures[f"rows lost or seen twice, {order}"] == 0
        assert figures[f"own memory of a rank, {order}"] < 300


def test_rows_that_are_lost_are_seen() -> None:
    from mpi4py import MPI

    def step(*numbers: int) -> list[np.ndarray]:
        return [np.array([(number,) for number in numbers], [("number", np.int64)])]

    assert large_file.epoch([step(0, 1), step(2)], MPI.COMM_SELF, 3)[2] == 0
    assert large_file.epoch([step(0, 1), step(1)], MPI.COMM_SELF, 3)[2] == 2


def test_a_file_that_does_not_fit_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["input", "--large", "1e9", "--folder", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "MiB free, and the file takes" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
