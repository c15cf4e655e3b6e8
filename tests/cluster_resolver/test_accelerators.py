"""How the processes of one node share out its devices."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from mpidist.cluster_resolver.accelerators import share_of_each, visible_devices
from tests.support.mpirun import child_environment


@pytest.mark.parametrize(
    ("seen", "shares"),
    [
        pytest.param([], [], id="no-process"),
        pytest.param([[], []], [0, 0], id="cpu-node"),
        pytest.param([["a", "b", "c", "d"]], [4], id="one-process"),
        pytest.param([["a", "b"]] * 2, [1, 1], id="shared-evenly"),
        pytest.param([["a", "b", "c"]] * 2, [2, 1], id="the-rest-to-the-first"),
        pytest.param([["a"]] * 4, [1] * 4, id="one-device-for-all"),
        pytest.param([["a", "b"], ["b", "a"]], [1, 1], id="the-order-does-not-matter"),
        pytest.param([["a", "b"], ["c", "d"]], [2, 2], id="the-launcher-gave-each-its-own"),
        pytest.param([["a"], []], [1, 0], id="one-process-without"),
    ],
)
def test_shares(seen: list[list[str]], shares: list[int]) -> None:
    assert share_of_each(seen) == shares


def test_a_machine_without_cupy_has_no_devices() -> None:
    if importlib.util.find_spec("cupy") is not None:
        pytest.skip("CuPy is installed here, so what a machine without it says cannot be asked")
    assert visible_devices() == ()


def test_a_cpu_job_does_not_import_cupy() -> None:
    script = (
        "import sys\n"
        "from mpidist.cluster_resolver import MPIClusterResolver\n"
        "MPIClusterResolver().cluster_spec()\n"
        "assert 'cupy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], env=child_environment(), check=True, timeout=60)
