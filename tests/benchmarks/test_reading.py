"""The benchmarks of input with small files: every case runs, and the bars are found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import reading_large
from benchmarks.__main__ import main
from benchmarks.reading_bars import verdicts
from benchmarks.results import load
from benchmarks.rows import OURS, Figure, make_row
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


def test_bars() -> None:
    def row(by: str, variant: str, seconds: float, size: int = 64 << 10):
        return make_row("read", variant, by, [seconds], ranks=1, size=size)

    rows = [
        *(row(OURS, "in order", 2.0), row("numpy", "in order", 1.7)),
        *(row("torch", "in order, by row", 9.0), row("torch", "in order, by batch", 3.0)),
        *(row(OURS, "shuffled", 2.0), row("numpy", "shuffled", 1.0), row("torch", "shuffled, by row", 1.0)),
        row(OURS, "in order", 2.0, size=4096),
    ]
    figures = [
        Figure("consumer", "waits with prefetch, 1 MiB", 3.0, "%"),
        Figure("consumer", "waits without prefetch, 1 MiB", 9.0, "%"),
        Figure("large", "own memory of a rank, shuffled", 120.0, "MB"),
    ]
    found = [(verdict.what, round(verdict.figure, 2), verdict.met) for verdict in verdicts(rows, figures)]
    assert found == [
        ("batches of 64 KiB, in order: as fast as NumPy's slice", 0.85, True),
        ("batches of 64 KiB, in order: as fast as torch's DataLoader", 1.5, True),
        ("batches of 64 KiB, shuffled: as fast as torch's DataLoader", 0.5, False),
        ("consumer: waits with prefetch, 1 MiB", 3.0, False),
        ("large: own memory of a rank, shuffled", 120.0, True),
    ]


LARGE = """
import sys
from pathlib import Path

from benchmarks import reading_large

sys.exit(reading_large.main(Path(sys.argv[1]), Path(sys.argv[2])))
"""


@pytest.mark.jobs
@pytest.mark.parametrize("ranks", [1, 3])
def test_an_epoch_over_a_file_on_several_ranks(ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.bin"
    reading_large.write(path, 10_000 * 4096)
    assert path.stat().st_size == 10_000 * 4096
    job = run_program(LARGE, ranks, str(path), str(tmp_path), timeout=110)
    assert job.returncode == 0, job.stdout + job.stderr
    figures = {figure.name: figure.value for figure in load(tmp_path / f"{reading_large.NAME}.json").figures}
    assert figures["file"] == pytest.approx(0.041, abs=0.001)
    for order in ("in order", "shuffled", "shuffled in windows"):
        assert figures[f"rows lost or seen twice, {order}"] == 0
        assert figures[f"own memory of a rank, {order}"] < 300


def test_rows_that_are_lost_are_seen() -> None:
    from mpi4py import MPI

    def step(*numbers: int) -> list[np.ndarray]:
        return [np.array([(number,) for number in numbers], [("number", np.int64)])]

    assert reading_large.epoch([step(0, 1), step(2)], MPI.COMM_SELF, 3)[2] == 0
    assert reading_large.epoch([step(0, 1), step(1)], MPI.COMM_SELF, 3)[2] == 2


def test_a_file_that_does_not_fit_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["input", "--large", "1e9", "--folder", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "MiB free, and the file takes" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
