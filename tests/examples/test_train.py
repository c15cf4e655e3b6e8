"""examples/train.py as a user starts it: same numbers in every layout, resumed runs, files of one rank only."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.ranks.jobs import ROOT, child_environment, run_script
from tests.support.ranks.programs import run_program
from tests.support.speed import scaled

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

SCRIPT = ROOT / "examples" / "train.py"
# Starts a script in a process that has two pretended GPUs.
ON_GPUS = ROOT / "tests" / "support" / "fake_cupy" / "__main__.py"


def train(out: Path, *arguments: str, ranks: int | None = None, on_gpus: bool = False) -> str:
    """Run it on warm ranks, on GPUs in processes of its own; return what it printed. ``ranks`` is None for one."""
    options = ("--out", str(out), *arguments)
    if on_gpus and ranks is None:
        done = python(ON_GPUS, SCRIPT, *options)
    elif on_gpus:
        done = run_script(ON_GPUS, ranks or 1, str(SCRIPT), *options, timeout=60)
    else:
        done = run_program(SCRIPT, ranks or 1, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(script: Path, *options: object) -> subprocess.CompletedProcess[str]:
    """Run a script as a user does who has no launcher."""
    return subprocess.run(
        [sys.executable, str(script), *map(str, options)],
        env=child_environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )


def closing_line(output: str) -> str:
    [line] = [line for line in output.splitlines() if line.startswith("done after")]
    return line


def weights_digest(output: str) -> str:
    return closing_line(output).split("weights ")[1].split(";")[0]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    folder = tmp_path_factory.mktemp("reference")
    train(folder, "--strategy", "default", "--steps", "20", "--dump-weights", str(folder / "weights.npz"))
    with np.load(folder / "weights.npz") as file:
        return dict(file)


@pytest.mark.parametrize(
    ("strategy", "devices", "ranks"),
    [
        ("one_device", 1, None),
        *(("mirrored", devices, None) for devices in (2, 3)),
        *(pytest.param("mirrored", devices, None, marks=pytest.mark.long) for devices in (1, 4)),
        *(("multi_worker", 1, ranks) for ranks in (2, 4)),
        pytest.param("multi_worker", 1, 1, marks=pytest.mark.long),
        ("multi_worker", 2, 2),
        ("mirrored", 2, 2),
    ],
)
def test_all_layouts_agree_after_20_steps(
    strategy: str, devices: int, ranks: int | None, reference: dict[str, np.ndarray], tmp_path: Path
) -> None:
    options = ("--strategy", strategy, "--devices", str(devices), "--steps", "20")
    output = train(tmp_path, *options, "--dump-weights", str(tmp_path / "weights.npz"), ranks=ranks)
    count = 1 if strategy == "one_device" else devices * (ranks or 1)
    assert f"{strategy}: {count} replica(s) in sync, {ranks or 1} rank(s)" in output
    with np.load(tmp_path / "weights.npz") as weights:
        assert sorted(weights.files) == sorted(reference)
        assert weights["losses"].shape == (20,)
        for name in weights.files:
            np.testing.assert_allclose(weights[name], reference[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("strategy", "ranks", "replicas"),
    [
        pytest.param("one_device", None, 1, marks=pytest.mark.long),
        pytest.param("mirrored", None, 2, marks=pytest.mark.long),
        ("multi_worker", None, 2),
        ("multi_worker", 2, 2),
    ],
)
def test_gpus_agree_with_the_cpu(
    strategy: str, ranks: int | None, replicas: int, reference: dict[str, np.ndarray], tmp_path: Path
) -> None:
    dump = ("--dump-weights", str(tmp_path / "weights.npz"))
    output = train(
        tmp_path, "--device", "gpu", "--strategy", strategy, "--steps", "20", *dump, ranks=ranks, on_gpus=True
    )
    assert f"{strategy}: {replicas} replica(s) in sync, {ranks or 1} rank(s)" in output
    with np.load(tmp_path / "weights.npz") as weights:
        for name in weights.files:
            np.testing.assert_allclose(weights[name], reference[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize(("strategy", "ranks"), [("default", None), ("multi_worker", 2)])
def test_a_resumed_run_ends_like_one_that_was_not_interrupted(strategy: str, ranks: int | None, tmp_path: Path) -> None:
    options = ("--strategy", strategy, "--batch-size", "100")
    whole = train(tmp_path / "whole", *options, "--steps", "40", ranks=ranks)
    train(tmp_path / "parts", *options, "--steps", "20", ranks=ranks)  # in the middle of epoch 2
    resumed = train(tmp_path / "parts", *options, "--steps", "40", "--resume", ranks=ranks)
    assert "after step 20" in resumed
    assert weights_digest(resumed) == weights_digest(whole)
    of_whole, of_resumed = (re.findall(r"epoch  3 .*test acc \S+", output) for output in (whole, resumed))
    assert of_whole == of_resumed != []


def test_a_resumed_run_may_have_another_number_of_ranks(reference: dict[str, np.ndarray], tmp_path: Path) -> None:
    train(tmp_path, "--steps", "12", ranks=2)
    dump = ("--dump-weights", str(tmp_path / "weights.npz"))
    train(tmp_path, "--strategy", "mirrored", "--devices", "3", "--steps", "20", "--resume", *dump)
    with np.load(tmp_path / "weights.npz") as weights:
        assert weights["losses"].shape == (8,)
        np.testing.assert_allclose(weights["w1"], reference["w1"], rtol=0, atol=1e-10)


ENDED_BEFORE_THE_EVALUATION = """
import sys
import mpidist
sys.path.insert(0, "examples")
import train

sys.argv[1:] = ["--out", sys.argv[1]]
training = train.Training(mpidist.get_strategy(), train.parse_arguments())
training.progress["step"] = 45
mpidist.Checkpoint(**training.state).save(sys.argv[2] + "/ckpt")
"""


def test_a_run_that_was_ended_after_the_last_step_of_an_epoch_evaluates_it(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", ENDED_BEFORE_THE_EVALUATION, str(tmp_path)],
        env=child_environment(), cwd=ROOT, capture_output=True, timeout=scaled(60), check=True,
    )  # fmt: skip
    done = python(SCRIPT, "--out", tmp_path, "--strategy", "default", "--epochs", "1", "--resume")
    assert done.returncode == 0, done.stderr
    output = done.stdout
    assert "after step 45" in output
    assert len(re.findall(r"^epoch  1 ", output, re.MULTILINE)) == 1


def test_elastic_is_the_same_as_long_as_no_rank_is_lost(reference: dict[str, np.ndarray], tmp_path: Path) -> None:
    train(tmp_path, "--elastic", "--steps", "20", "--dump-weights", str(tmp_path / "weights.npz"), ranks=2)
    with np.load(tmp_path / "weights.npz") as weights:
        for name in weights.files:
            np.testing.assert_allclose(weights[name], reference[name], rtol=0, atol=1e-10)


def test_two_ranks_reach_97_percent(tmp_path: Path) -> None:
    done = run_script(SCRIPT, 2, "--out", str(tmp_path), timeout=60)
    assert done.returncode == 0, done.stderr
    output = done.stdout
    accuracy = float(re.search(r"test accuracy ([\d.]+)%", closing_line(output)).group(1))  # type: ignore[union-attr]
    assert accuracy >= 97
    assert len(re.findall(r"^epoch ", output, re.MULTILINE)) == 20
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "ckpt-20" / "manifest.json").is_file()


@pytest.mark.parametrize("strategy", ["default", "one_device"])
def test_only_rank_0_writes_where_ranks_train_alone(strategy: str, tmp_path: Path) -> None:
    output = train(tmp_path, "--strategy", strategy, "--epochs", "2", ranks=2)
    assert "each of which trains by itself" in output
    assert len(re.findall(r"^epoch ", output, re.MULTILINE)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt-1", "ckpt-2", "learning_curve.png"]
    closing_line(output)


def test_wrong_options(tmp_path: Path) -> None:
    for options, message in [
        (("--strategy", "default", "--devices", "2"), "needs --strategy mirrored or multi_worker"),
        (("--epochs", "0"), "expected 1 or more"),
        (("--device", "gpu", "--strategy", "default"), "needs a strategy that places things"),
        (("--elastic", "--strategy", "mirrored"), "--elastic goes on with the ranks that are left"),
        (("--deterministic", "--strategy", "mirrored"), "--deterministic is about sums over ranks"),
    ]:
        done = run_program(SCRIPT, 1, *options)
        assert done.returncode == 2
        assert message in done.stderr


# Each rank has a folder of its own, as on nodes that share none.
IN_OWN_FOLDERS = """
import os, runpy, sys

import mpidist

del sys.argv[0]
os.makedirs(folder := sys.argv.pop(1) + str(mpidist.rank()))
os.chdir(folder)
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("name", ["train", "train_and_evaluate"])
def test_out_must_be_shared_by_all_ranks(name: str, tmp_path: Path) -> None:
    script = ROOT / "examples" / f"{name}.py"
    done = run_script(IN_OWN_FOLDERS, 2, str(script), f"{tmp_path}/", "--epochs", "1", timeout=60)
    assert done.returncode != 0
    assert f"--out out is another folder on {os.uname().nodename}. Pass a folder that all nodes share." in done.stderr
    assert (done.stdout, "Traceback" in done.stderr) == ("", False)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["0", "1", "out"]


def test_without_matplotlib_the_closing_line_says_so(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError")
    environment = child_environment()
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--steps", "3", "--out", str(tmp_path / "out")],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=scaled(60), check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(f"; checkpoint in {tmp_path}/out (no learning_curve.png: pip install matplotlib)\n")


def test_the_log_has_a_line_per_epoch(tmp_path: Path) -> None:
    done = run_program(SCRIPT, 1, "--epochs", "2", "--out", str(tmp_path))
    assert done.stderr == ""
    assert len(re.findall(r"^epoch", done.stdout, re.M)) == 2
    assert len(done.stdout.splitlines()) == 4
