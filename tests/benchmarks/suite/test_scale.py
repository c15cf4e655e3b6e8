"""The benchmark of what grows with the ranks: measured on two, drawn for several numbers, made up for 10,000."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.measuring.rows import MPI, OURS, Figure
from benchmarks.reports.files import load, save
from benchmarks.suite import scale
from tests.benchmarks.support import results, row
from tests.support.ranks.programs import run_program

pytestmark = pytest.mark.one_rank

MEASURE = """
import sys
from benchmarks.__main__ import main
sys.exit(main(["scale", "--sizes", "8,4K", "--seconds", "0.01", "--out", sys.argv[1]]))
"""


@pytest.mark.jobs
def test_on_two_virtual_nodes(tmp_path: Path) -> None:
    job = run_program(MEASURE, 2, str(tmp_path), ranks_per_node=1)
    assert job.returncode == 0, job.stdout + job.stderr
    found = load(tmp_path / "scale-2-ranks-2-nodes.json")
    assert {(row.size, row.by, row.wrong) for row in found.rows} == {
        (s, by, 0) for s in (8, 4096) for by in (OURS, MPI)
    }
    figures = {figure.name: figure.value for figure in found.figures}
    assert 10 < figures["most memory, after sums"] < 200
    assert figures["most descriptors, with a communicator"] >= 3
    assert figures["one more communicator: Python objects"] < 200
    assert figures["mismatch: lines"] == 5


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is missing: pip install '.[bench]'")
    paths = []
    for ranks in (4, 16):
        rows = [row("all_reduce", by, "out=", 4096, 10.0 * ranks, ranks=ranks) for by in (OURS, MPI)]
        figures = [
            Figure("scale", name, ranks, "MiB")
            for name in ("most memory, after MPI", "handshake", "/dev/shm for a rank, x")
        ]
        paths.append(save(results(rows, figures, ranks=ranks), tmp_path, str(ranks))[0])
    assert main(["scale", "--plot", *map(str, paths), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "scale.png").stat().st_size > 10_000


def test_made_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert scale.main(["--made-up", "10000"]) == 0
    lines = dict(line.rsplit(maxsplit=2)[:2] for line in capsys.readouterr().out.splitlines() if line[-1] in "Bs")
    assert float(lines["map of ranks and nodes"]) < 1024, "once for all communicators"
    assert float(lines["start of a communicator: from each rank"]) < 100
    assert float(lines["hang report, to the rank that asks: from each node"]) < 2500
