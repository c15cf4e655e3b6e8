"""Result files come back as they were; reports, comparisons and plots of them."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.bars.one_node import verdicts
from benchmarks.measuring.models import resnet50, size_of
from benchmarks.measuring.rows import COLUMNS, Figure
from benchmarks.reports.files import Results, load, save
from benchmarks.reports.text import markdown_table, osu_text, results_text
from tests.benchmarks.support import results, row

pytestmark = pytest.mark.one_rank

MIB = 1 << 20


@pytest.fixture
def some() -> Results:
    rows = [
        row("all_reduce", "mpi", "private", 16 * MIB, 5_000.0, wrong=0),
        row("all_reduce", "mpidist", "out=", 16 * MIB, 7_500.0, wrong=0, algorithm="some"),
        row("all_reduce", "mpi", "private", MIB, 200.0, wrong=0),
        row("all_reduce", "copy", "private", MIB, 50.0),
        row("all_reduce", "mpidist", "out=", MIB, 100.0, wrong=0, algorithm="some"),
        row("all_reduce", "mpi", "Iallreduce", MIB, 150.0, wrong=0),
        row("all_reduce", "mpi", "in place", MIB, 80.0, wrong=0),
        row("all_reduce", "mpidist", "own", MIB, 25.0, wrong=3, algorithm="other"),
        row("all_reduce", "mpidist", "in place", MIB, 40.0, wrong=0, algorithm="other"),
        row("batch", "mpi", "one call per array", size_of(resnet50()), 30_000.0, wrong=0),
        row("batch", "mpidist", "own", size_of(resnet50()), 5_000.0, wrong=0),
    ]
    made = results(rows, [Figure("memory", "growth", 0.25, "MiB")])
    return replace(made, verdicts=verdicts(rows, made.figures, 2, True), skipped=["batch bert_base: no room"])


def test_a_file_comes_back_as_it_was(some: Results, tmp_path: Path) -> None:
    json_path, csv_path = save(some, tmp_path / "new folder", "2-ranks")
    loaded = load(json_path)
    assert [r.key for r in loaded.rows] == [r.key for r in some.rows]
    assert [r.busbw for r in loaded.rows] == pytest.approx([r.busbw for r in some.rows], rel=1e-4)
    assert [v.cells() for v in loaded.verdicts] == [v.cells() for v in some.verdicts]
    assert (loaded.machine, loaded.figures, loaded.skipped) == (some.machine, some.figures, some.skipped)
    # Five digits are kept, and stay.
    assert load(save(loaded, tmp_path, "again")[0]) == loaded
    with csv_path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert tuple(lines[0]) == COLUMNS
    assert [line["by"] for line in lines] == [r.by for r in some.rows]
    assert [float(line["median"]) for line in lines] == pytest.approx([r.median for r in some.rows])


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"format": 0}))
    with pytest.raises(ValueError, match="no result file"):
        load(path)


def test_the_report_shows_everything(some: Results) -> None:
    text = results_text(some)
    own = next(line for line in text.splitlines() if " own " in line and "all_reduce" in line)
    assert own.split()[-3:] == ["3", "8.00x", "other"]
    place = next(line for line in text.splitlines() if " mpidist " in line and " in place " in line)
    assert place.split()[-2:] == ["2.00x", "other"]
    assert "growth" in text
    assert "NOT MET" in text
    assert "skipped: batch bert_base: no room" in text


def test_the_markdown_table(some: Results) -> None:
    header, rule, *lines = markdown_table(some).splitlines()
    assert header.count("|") == rule.count("|") == lines[0].count("|")
    assert lines == [
        "| all_reduce 1 MiB | 200 us | 150 us (Iallreduce) | 80 us | - | 50 us"
        " | - | 100 us, 2.00x | 40 us, 2.00x | 25 us, 8.00x |",
        "| all_reduce 16 MiB | 5 ms | 5 ms (private) | - | - | - | - | 7.5 ms, 0.67x | - | - |",
        "| gradients of resnet50 | 30 ms | 30 ms (one call per array) | - | - | - | - | - | - | 5 ms, 6.00x |",
    ]


def test_table_and_comparison(some: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = [row for row in some.rows[:6] if row.by == "mpidist"]
    faster = [replace(r, median=r.median / 2, min=r.min / 2, max=r.max / 2) if r in ours else r for r in some.rows[:6]]
    first, _ = save(some, tmp_path, "first")
    second, _ = save(results(faster, list(some.figures), cpu="another CPU"), tmp_path, "second")
    assert main(["table", str(first)]) == 0
    assert main(["compare", str(first), str(second)]) == 0
    text = capsys.readouterr().out
    assert "# cpu differs: some CPU and another CPU" in text
    line = next(line for line in text.splitlines() if "out=  " in line and "1 MiB" in line)
    assert line.split()[-6:-2] == ["100.00", "50.00", "2.00", "faster"]
    same = next(line for line in text.splitlines() if " mpi " in line)
    assert same.split()[-4:-2] == ["1.00", "same"]
    assert "# only in the first: batch own mpidist" in text


def test_plots(some: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib; type: pip install '.[bench]'")
    path, _ = save(some, tmp_path, "2-ranks")
    assert main(["plot", str(path)]) == 0
    printed = capsys.readouterr().out
    for operation in ("all_reduce", "batch"):
        image = tmp_path / f"2-ranks-{operation}.png"
        assert image.read_bytes().startswith(b"\x89PNG")
        assert str(image) in printed


def test_comparing_several_runs_of_each_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def saved(name: str, microseconds: float) -> str:
        of_run = results([row("all_reduce", "mpidist", "out=", 4, microseconds)])
        return str(save(of_run, tmp_path, name)[0])

    before = ",".join(saved(f"before{time}", time) for time in (10, 11, 12))
    for times, verdict in (((11, 13, 14), "same"), ((7, 8, 9), "faster"), ((12.5, 13, 20), "slower")):
        after = ",".join(saved(f"after{time}", time) for time in times)
        assert main(["compare", before, after]) == 0
        assert f" {verdict} " in capsys.readouterr().out.splitlines()[1]


def test_the_two_columns_of_osu(some: Results) -> None:
    lines = osu_text(some).splitlines()
    at = lines.index("# all_reduce, mpidist, out=")
    assert lines[at + 1].split() == ["#", "Size", "Avg", "Latency(us)"]
    assert lines[at + 2].split() == [str(1 << 20), "100.00"]
