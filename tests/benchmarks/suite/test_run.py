"""The whole suite under mpirun, with small sizes: every operation runs, and every result is right."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main, parser
from benchmarks.measuring.components import NAMES
from benchmarks.measuring.timing import LEAST_OF_STATE, UNKNOWN, Case, Measured, Sample
from benchmarks.reports.files import load
from benchmarks.suite import run
from benchmarks.suite.run import OPERATIONS
from mpidist.collectives.node import native
from tests.support.ranks.jobs import ROOT, run_script
from tests.support.ranks.programs import run_program

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

QUICK = ("--sizes", "4,1000,256K", "--models", "small_cnn", "--seconds", "0.01", "--steps", "30")


def run_suite(ranks: int, folder: Path, *arguments: str) -> str:
    job = run_program("benchmarks", ranks, *QUICK, "--out", str(folder), *arguments, timeout=110)
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 3])
def test_every_operation(ranks: int, tmp_path: Path) -> None:
    text = run_suite(ranks, tmp_path, "--no-gloo")
    results = load(tmp_path / f"{ranks}-ranks.json")
    measured = {row.operation for row in results.rows} | {figure.operation for figure in results.figures}
    expected = {*OPERATIONS, "run", "context_all_reduce", "apply_gradients", "strategy.reduce", "assign"} - {"latency"}
    assert measured == expected
    assert [row.key for row in results.rows if row.wrong] == []
    checked = {row.by for row in results.rows if row.wrong == 0}
    assert {"mpidist", "mpi"} <= checked
    assert all(row.repetitions >= LEAST_OF_STATE for row in results.rows)
    assert [len(results.times[row.key]) for row in results.rows] == [row.repetitions for row in results.rows]
    assert {row.size for row in results.rows if row.operation == "all_reduce"} == {4, 1000, 256 << 10}
    assert results.machine["ranks"] == len(results.machine["binding"]) == ranks
    assert results.machine["native_core"] is (native.why_not() is None)
    assert results.machine["command"].startswith("python -m benchmarks --sizes")
    assert "strategy.run of an empty function" in text


def test_without_native_core_nothing_is_measured(tmp_path: Path) -> None:
    for name in ("mpidist", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "results"))
    (tmp_path / "run.py").write_text("from benchmarks.__main__ import main; main([])")
    done = run_script(tmp_path / "run.py", 2, env={"PYTHONPATH": str(tmp_path)}, timeout=60)
    assert done.returncode != 0
    assert "python -m benchmarks: mpidist has no native core: " in done.stderr
    assert f"{tmp_path}/mpidist/native/build_library.py" in done.stderr
    assert not (tmp_path / "out").exists()


def test_results_go_to_a_folder_that_git_ignores() -> None:
    default = parser().parse_args(["run"]).out
    done = subprocess.run(["git", "check-ignore", "--quiet", f"{default}/2-ranks.json"], cwd=ROOT, check=False)
    if not (ROOT / ".git").exists():
        pytest.skip("this folder is no checkout of git")
    assert done.returncode == 0


def test_kinds_of_buffers_and_ways_of_mpi(tmp_path: Path) -> None:
    run_suite(2, tmp_path, "--no-gloo", "--operations", "all_reduce,all_gather,broadcast,batch", "--name", "some")
    results = load(tmp_path / "some.json")

    def variants(operation: str, by: str) -> set[str]:
        return {row.variant for row in results.rows if (row.operation, row.by) == (operation, by)}

    assert variants("all_reduce", "mpidist") == {"out=", "new", "own", "in place"}
    assert variants("all_gather", "mpidist") == {"out=", "new"}
    assert variants("broadcast", "mpidist") == {"in place", "new"}
    assert variants("batch", "mpidist") == {"out=", "new", "own"}
    absent = {name for name in NAMES if f"mpi, {name}: this MPI has no such component" in results.skipped}
    assert variants("all_reduce", "mpi") == {"private", "Iallreduce", "in place", *NAMES} - absent
    # Short calls are on inputs of their own, and those of a group are small enough for a cache.
    small = {(row.size, row.calls) for row in results.rows if row.by == "copy" and row.operation == "all_reduce"}
    assert small == {(4, 20), (1000, 20), (256 << 10, 1)}
    assert (tmp_path / "some.csv").exists()


def test_a_forced_algorithm_is_named(tmp_path: Path) -> None:
    run_suite(2, tmp_path, "--no-gloo", "--operations", "all_reduce", "--algorithm", "mpi", "--sizes", "256K")
    document: dict[str, Any] = json.loads((tmp_path / "2-ranks.json").read_text())
    ours = [row for row in document["rows"] if row["by"] == "mpidist"]
    assert {row["algorithm"] for row in ours} == {"mpi"}


@pytest.mark.torch
def test_gloo_beside_us(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="gloo comes with PyTorch, which is not installed")
    operations = "all_reduce,reduce_scatter,all_gather,broadcast,batch"
    run_suite(2, tmp_path, "--operations", operations)
    rows = [row for row in load(tmp_path / "2-ranks.json").rows if row.by == "gloo"]
    assert {row.operation for row in rows} == set(operations.split(","))
    assert all(row.wrong == 0 for row in rows)


def test_a_wrong_result_is_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up = Measured(Case("mpidist", "own", print), [Sample(1e-6, UNKNOWN)], wrong=2)
    monkeypatch.setattr(
        run, "measure", lambda session, _: session.add_row("all_reduce", "own", made_up, size=4, count=1, op="sum")
    )
    assert main(["--no-gloo", "--no-progress", "--out", str(tmp_path)]) == 1
    assert "WRONG RESULTS in all_reduce own mpidist" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "4,big"], "size is 'big'; expected a number of bytes such as 4, 256K or 64M"),
        (["--operations", "all_reduce,sort"], "sort is unknown; expected some of memory,start"),
        (["--models", "gpt"], "gpt is unknown"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err
