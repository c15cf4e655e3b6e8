"""``python -m mpidist example``: examples are listed, and written with the files that they need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpidist.__main__ import main
from tests.support.ranks.jobs import ROOT, run_script

pytestmark = pytest.mark.one_rank
PROGRAMS = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_they_are_listed_with_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["example"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-2]] == PROGRAMS
    assert "train " in lines[PROGRAMS.index("train")]
    assert "Trains a two-layer network on handwritten digits" in lines[PROGRAMS.index("train")]
    assert main(["example", "--json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)["examples"]] == PROGRAMS


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("train", ["digits.npz", "train.py"]),
        ("parameter_server.py", ["digits.npz", "parameter_server.py", "train.py"]),
        ("reframe_checks", ["digits.npz", "reframe_checks.py", "train.py"]),
    ],
)
def test_one_comes_with_what_it_needs(name: str, files: list[str], here: Path) -> None:
    assert main(["example", name]) == 0
    assert names(here) == files
    assert all((here / file).read_bytes() == (ROOT / "examples" / file).read_bytes() for file in files)


def test_nothing_is_written_over_without_being_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "train.py").write_text("mine")
    assert main(["example", "train"]) == 2
    assert "train.py is here already and differs. Use another folder, or --force" in capsys.readouterr().err
    assert names(here) == ["train.py"]
    assert (here / "train.py").read_text() == "mine"
    assert main(["example", "train", "--force"]) == 0
    assert (here / "train.py").read_bytes() == (ROOT / "examples/train.py").read_bytes()
    assert main(["example", "parameter_server"]) == 0, "files that are there and equal are left"


def test_no_link_is_written_through(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "train.py").symlink_to("/dev/null")
    assert main(["example", "train", "--force"]) == 2
    assert "symbolic link" in capsys.readouterr().err


def test_a_name_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["example", "trian"]) == 2
    assert "Choose one of factorization, jax_optax, " in capsys.readouterr().err


@pytest.mark.jobs
def test_it_runs_where_it_was_written(here: Path) -> None:
    assert main(["example", "train"]) == 0
    job = run_script(here / "train.py", 2, "--epochs", "1", "--out", str(here / "out"))
    assert job.returncode == 0, job.stderr
    assert "epoch  1" in job.stdout
