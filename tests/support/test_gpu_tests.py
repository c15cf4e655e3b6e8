"""The tests for a real GPU, tried on the stand-in for CuPy: those that nobody can run may be wrong themselves."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from benchmarks.suite.gpu import JOBS
from tests.gpu.__main__ import PARTS
from tests.gpu.machine import STAND_IN
from tests.support.ranks.jobs import ROOT, child_environment

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank, pytest.mark.timeout(400)]


def run(*command: str, stand_in: bool) -> subprocess.CompletedProcess[str]:
    environment = child_environment()
    environment.pop(STAND_IN, None)
    if stand_in:
        environment[STAND_IN] = "0.0005"
    else:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=350
    )


def test_tests_and_benchmarks_take_half_an_hour_at_most() -> None:
    assert sum(PARTS.values()) + sum(job.seconds for job in JOBS) <= 1800


def test_without_a_gpu_it_says_so_and_fails(tmp_path: Path) -> None:
    done = run("-m", "tests.gpu", "--out", str(tmp_path), stand_in=False)
    assert done.returncode == 2
    assert "make test-gpu: nothing was run: needs a GPU" in done.stderr
    assert os.listdir(tmp_path) == []


def test_the_tests_are_skipped_with_the_reason(tmp_path: Path) -> None:
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/test_cupy_ops.py", stand_in=False)
    assert done.returncode == 0, done.stdout
    assert "needs a GPU" in done.stdout
    assert "passed" not in done.stdout


def test_a_part_that_passes(tmp_path: Path) -> None:
    done = run("-m", "tests.gpu", "--out", str(tmp_path), "cupy_ops", stand_in=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "make test-gpu: passed but for what was skipped, see above\nnext: make bench-gpu" in done.stdout
    written = json.loads((tmp_path / "tests.json").read_text())
    assert written["machine"]["stand_in"] is True
    [part] = written["parts"]
    assert (part["part"], part["outcome"], part["failed"]) == ("cupy_ops", "passed", 0)
    assert part["passed"] >= 8
    assert "needs two GPUs" in " ".join(part["reasons"])


def test_a_part_that_takes_too_long(tmp_path: Path) -> None:
    done = run("-m", "tests.gpu", "--out", str(tmp_path), "--seconds", "0.2", "cupy_ops", stand_in=True)
    assert done.returncode == 1
    [part] = json.loads((tmp_path / "tests.json").read_text())["parts"]
    assert part["outcome"] == "out of time"


@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("kernels", "alignment"),
        ("nccl", "movements and 2-names1"),
        pytest.param("kernels", "numpy", marks=pytest.mark.long),
        pytest.param("nccl", "not 4-", marks=pytest.mark.long),
        pytest.param("collectives", "2x1 or 1x2", marks=pytest.mark.long),
        pytest.param("training", "multi_worker-2", marks=pytest.mark.long),
        pytest.param("torch", "not 2x1", marks=pytest.mark.torch),
    ],
)
def test_on_stand_in(file: str, chosen: str) -> None:
    if file == "torch":
        pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")
    options = ["-q", "-p", "no:cacheprovider", "-k", chosen, f"tests/gpu/test_{file}.py"]
    done = run("-m", "pytest", *options, stand_in=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


# On a machine that has little ----------------------------------------------------------------------------------------


def bare(folder: Path, *packages: str) -> str:
    """Make an environment that has these packages of this one, and no pip; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for name in packages:
        path = Path(str(importlib.util.find_spec(name).origin))  # type: ignore[union-attr]
        path = path.parent if path.name == "__init__.py" else path
        for source in (path, path.with_name(f"{name}.libs")):
            if source.exists():
                (site / source.name).symlink_to(source)
    # The stand-in takes its place.
    (site / "cupy.py").touch()
    return str(folder / "bin" / "python")


PYTEST = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
PYTEST += ("exceptiongroup", "tomli") if sys.version_info < (3, 11) else ()


def make(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = child_environment() | {"PIP_NO_INDEX": "1"} | variables
    for name in ("PYTHON", "VENV", "MAKEFLAGS", "MAKELEVEL", "PYTHONPATH"):
        environment.pop(name, None)
    return subprocess.run(["make", *arguments], env=environment, cwd=cwd, capture_output=True, text=True, timeout=350)


def mpi_of_this_python() -> dict[str, str]:
    """The MPI library beside this Python, if mpi4py finds one there: an environment of symbolic links does not."""
    found = sorted(Path(sys.prefix, "lib").glob("libmpi.so.[0-9]*"))
    launcher = Path(sysconfig.get_path("scripts"), "mpirun")
    return {"MPI4PY_LIBMPI": str(found[0]), "MPIRUN": str(launcher)} if found and launcher.exists() else {}


def test_an_environment_with_little_runs_what_it_can(tmp_path: Path) -> None:
    python = bare(tmp_path / "bare", "numpy", "mpi4py", *PYTEST)
    words = [f"PYTHON={python}", f"GPU_OUT={tmp_path}", "TEST_ARGS=cupy_ops torch"]
    done = make("test-gpu", *words, **mpi_of_this_python(), **{STAND_IN: "0"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"make test-gpu: with {python}" in done.stdout
    assert "nothing was run of: torch\nnext: make bench-gpu" in done.stdout
    ops, torch = json.loads((tmp_path / "tests.json").read_text())["parts"]
    assert (ops["outcome"], torch["outcome"]) == ("passed", "skipped")
    assert "bfloat16 needs ml_dtypes" in ops["reasons"]
    assert torch["reasons"] == ["needs PyTorch with CUDA"]


def test_what_is_missing_is_named_with_what_to_type(tmp_path: Path) -> None:
    python = bare(tmp_path / "bare", "numpy", "mpi4py")
    done = make("test-gpu", f"PYTHON={python}", **mpi_of_this_python(), **{STAND_IN: "0"})
    assert done.returncode != 0
    assert f"{python}: pytest is not installed" in done.stderr
    assert f"type: {python} -m pip install pytest\n" in done.stderr
    assert "pip install --no-index --find-links wheels NAMES" in done.stderr


@pytest.mark.parametrize(
    "target", ["env", "test", "clean", "test-torch", "test-keras", "test-jax", "test-binding", "test-types"]
)
def test_nothing_is_made_or_removed_outside_of_the_tree(target: str, tmp_path: Path) -> None:
    outside = tmp_path / "usr"
    (outside / "bin").mkdir(parents=True)
    names = ("VENV", "TORCH_VENV", "KERAS_VENV", "JAX_VENV", "CUPY_VENV", "MPICH_VENV", "TYPES_VENV")
    done = make("--dry-run", target, *(f"{name}={outside}" for name in names), f"PYTHON={sys.executable}")
    assert f"-m venv {outside}" not in done.stdout
    if target == "clean":
        assert str(outside) not in done.stdout
    else:
        assert done.returncode != 0
        assert f"{outside}" in done.stderr
        assert "is no virtual environment, and not in this folder" in done.stderr
