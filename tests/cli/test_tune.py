"""``python -m mpidist tune``, and what is typed wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mpidist.__main__ import main
from mpidist.cli import COMMANDS
from mpidist.cli.tune import report, time_text
from mpidist.collectives.reduce.registry import SHIPPED
from mpidist.collectives.reduce.tuning_file import Setup, read
from mpidist.collectives.tuning import SIZES, Timing, Tuned
from tests.support.ranks.jobs import child_environment, run_script
from tests.support.ranks.programs import Ended, run_program
from tests.support.speed import scaled

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

MODULE = """
import runpy, sys
from unittest.mock import patch
with patch("mpidist.collectives.tuning.SIZES", (1 << 10, 1 << 16)):
    runpy.run_module("mpidist", run_name="__main__", alter_sys=True)
"""
SETTING = "MPIDIST_TUNING_FILE"


def tune(ranks: int, *args: str, **options: object) -> Ended:
    return run_program(MODULE, ranks, "tune", *args, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks_per_node", [None, 1])
def test_it_measures_prints_and_keeps_the_table(tmp_path: Path, ranks_per_node: int | None) -> None:
    path = tmp_path / "tuning.json"
    done = tune(2, "--out", str(path), "--seconds", "0.1", ranks_per_node=ranks_per_node)
    assert done.returncode == 0, done.stderr
    (setup,) = read(path)
    lines = done.stdout.splitlines()
    assert setup.layout == ("1 node x 2 ranks" if ranks_per_node is None else "2 nodes x 1 rank")
    assert lines[0] == f"all-reduce on {setup.layout}, {setup.host}, {setup.mpi}"
    assert lines[2].split()[:2] == ["size", "mpi"]
    assert [line.split()[:2] for line in lines[3:5]] == [["1", "KiB"], ["64", "KiB"]]
    assert done.stdout.count("table: ") == 1
    assert ("costs between nodes: latency " in done.stdout) == (ranks_per_node == 1)
    assert lines[-1] == f"written to {path}; to use it type: export {SETTING}={path}"
    assert done.stderr.count("tune: first look at 1 KiB") == 1
    assert done.stderr.count("tune: round 1, ") == 1


def test_the_setting_names_the_file_too_and_it_need_not_be_there(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    done = tune(2, "--seconds", "0.1", env={SETTING: str(path)})
    assert done.returncode == 0, done.stderr
    assert len(read(path)) == 1


def test_without_a_file_it_says_how_to_keep_the_table() -> None:
    done = tune(2, "--seconds", "0.1")
    assert done.returncode == 0, done.stderr
    assert "not saved; to save it name a file: python -m mpidist tune --out FILE" in done.stdout


def test_a_wrong_file_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("a letter")
    done = tune(2, "--out", str(tmp_path / "t"))
    assert done.returncode == 2
    assert done.stderr.count("is not JSON") == 1
    assert "Traceback" not in done.stderr
    assert (tmp_path / "t").read_text() == "a letter"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"OMPI_COMM_WORLD_RANK": " 0", "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK=' 0': expected a whole"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI mpirun started 2 ranks"),
        ({"MPIDIST_ABORT_ON_EXCEPTION": "5"}, "MPIDIST_ABORT_ON_EXCEPTION='5': expected 0 or 1"),
        ({"MPIDIST_RANKS_PER_NODE": "0"}, "MPIDIST_RANKS_PER_NODE='0': expected a whole number of at least 1"),
        ({"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}, "mpi4py cannot load an MPI library"),
    ],
)
def test_wrong_environments_give_no_traceback(environ: dict[str, str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mpidist", "tune"],
        env=child_environment(environ),
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )
    assert done.stderr.startswith(f"python -m mpidist tune: {said}")
    assert "Traceback" not in done.stderr
    assert (done.returncode, done.stdout) == (2, "")


def test_a_setting_that_is_wrong_on_some_rank_ends_all() -> None:
    only_1 = """
import os
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    os.environ["MPIDIST_TIMEOUT"] = "soon"
"""
    done = run_script(only_1 + MODULE, 2, "tune", "--seconds", "0.1")
    assert done.returncode == 2
    assert done.stderr.count("python -m mpidist tune: MPIDIST_TIMEOUT='soon': expected seconds") == 1
    assert "Traceback" not in done.stderr


def test_wrong_arguments_are_said() -> None:
    done = tune(2, "--seconds", "0")
    assert done.returncode == 2
    assert done.stderr.count("'0' is not a time; expected a number of seconds, more than 0") in (1, 2)


def test_help_is_printed_once() -> None:
    done = tune(2, "--help")
    assert done.returncode == 0
    assert done.stdout.count("usage:") == 1


def test_one_rank_is_told_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune"]) == 2
    assert "mpirun -n 4 python -m mpidist tune" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["tun"], ["tune", "--seconds", "soon"], ["tune", "--seconds", "inf"]])
def test_what_is_typed_wrong(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "python -m mpidist" in capsys.readouterr().err


def test_help_shows_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, command in COMMANDS.items():
        assert f"{name} {command.HELP}" in shown


def test_a_report_that_is_not_complete() -> None:
    setup = Setup("some CPU, 4 cores", "some MPI 1.0", "1 node x 4 ranks")
    timings = [Timing(SIZES[0], {"mpi": 2e-6, "ring": 1e-6}), Timing(SIZES[1], {"mpi": 2e-3, "ring": 3.0})]
    assert report(Tuned(setup, "one_node", SHIPPED, timings, None)).splitlines() == [
        "all-reduce on 1 node x 4 ranks, some CPU, 4 cores, some MPI 1.0",
        "",
        "      size        mpi       ring",
        "     1 KiB      2 us       1 us*",
        "     2 KiB      2 ms*       3 s",
        "measured up to 2 KiB of 64 MiB; use a larger --seconds for more",
        "",
        "table: hierarchical at any size",
        "not saved; to save it name a file: python -m mpidist tune --out FILE",
    ]


def test_times() -> None:
    assert [time_text(seconds) for seconds in (9.99e-7, 1e-3, 0.0999, 12.0)] == ["0.999 us", "1 ms", "99.9 ms", "12 s"]
