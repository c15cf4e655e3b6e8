"""examples/train.py --device gpu: the numbers of the CPU, on one rank and on several."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.ranks.jobs import ROOT, child_environment, run_script

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.one_rank,
    pytest.mark.timeout(300),
]

SCRIPT = str(ROOT / "examples" / "train.py")
LAUNCHER = ROOT / "tests" / "gpu" / "shared_gpu_script.py"
LIMIT_SECONDS = 150.0


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    folder = tmp_path_factory.mktemp("cpu")
    files = ["--out", str(folder), "--dump-weights", f"{folder}/weights.npz"]
    command = [sys.executable, SCRIPT, "--strategy", "default", "--steps", "20", *files]
    subprocess.run(command, env=child_environment(), cwd=ROOT, check=True, timeout=60)
    with np.load(folder / "weights.npz") as file:
        return dict(file)


@pytest.mark.parametrize(
    ("strategy", "ranks", "per_node"),
    [("one_device", 1, None), ("mirrored", 1, None), ("multi_worker", 2, None), ("multi_worker", 4, 2)],
)
def test_the_same_weights(
    strategy: str, ranks: int, per_node: int | None, on_the_cpu: dict[str, np.ndarray], tmp_path: Path
) -> None:
    options = ["--device", "gpu", "--devices", "1", "--strategy", strategy, "--steps", "20", "--out", str(tmp_path)]
    weights = tmp_path / "weights.npz"
    done = run_script(
        LAUNCHER,
        ranks,
        *(SCRIPT, *options, "--dump-weights", str(weights)),
        timeout=LIMIT_SECONDS,
        ranks_per_node=per_node,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(weights) as found:
        for name, wanted in on_the_cpu.items():
            np.testing.assert_allclose(found[name], wanted, rtol=0, atol=1e-8, err_msg=name)
