"""Programs of Keras as jobs of their own: the example, ranks that fail or are killed, and jobs that go on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.ranks.jobs import ROOT, run_script

pytest.importorskip("keras", reason="Keras is missing: pip install 'mpidist[keras]' torch jax")
pytestmark = [pytest.mark.one_rank, pytest.mark.jobs]

SCRIPT = ROOT / "examples" / "keras_fit.py"


def example(out: Path, ranks: int, *arguments: str) -> tuple[float, float]:
    """Return the accuracy and the sum of weights that the example tells."""
    done = run_script(SCRIPT, ranks, "--out", str(out), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = re.findall(r"([\d.]+) % of the test images are right; weights ([\d.]+)", done.stdout)
    assert done.stdout.count("Epoch 1/") <= 1
    return float(found[0]), float(found[1])


def test_the_example_learns_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    told = [example(tmp_path / str(ranks), ranks) for ranks in (1, 2, 3)]
    assert all(accuracy > 93 for accuracy, _ in told)
    assert max(weights for _, weights in told) - min(weights for _, weights in told) < 0.05 * told[0][1] / 100
    assert (tmp_path / "1" / "model.keras").exists()


# Adds to the example a rank that is killed in the middle of epoch 2.
KILLED = f"""
import os, signal, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
os.environ.setdefault("KERAS_BACKEND", "torch")
import keras, mpidist, keras_fit

mpidist.keras.adopt  # before the class that it looks for has another name
made = keras.callbacks.BackupAndRestore


class Kill(keras.callbacks.Callback):
    epoch = 0
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_end(self, batch, logs=None):
        if self.epoch == 2 and batch == 5 and mpidist.rank() == mpidist.size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)

keras.callbacks.BackupAndRestore = lambda folder: [made(folder), Kill()]
keras_fit.main()
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_job_that_was_killed_goes_on_on_another_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    expected = example(tmp_path / "whole", 2, "--epochs", "4")
    done = run_script(KILLED, 2, "--out", str(tmp_path / "out"), "--epochs", "4")
    assert done.returncode != 0
    assert "Epoch 3/4" in done.stdout
    found = example(tmp_path / "out", ranks, "--epochs", "4", "--resume")
    if ranks == 2:
        assert found == expected
    assert found[1] == pytest.approx(expected[1], rel=1e-4)
    assert not (tmp_path / "out" / "backup").exists()


def test_a_rank_that_fails_ends_all_with_its_error() -> None:
    source = """
    import os
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras, mpidist, mpidist.keras, numpy as np
    class Batches(keras.utils.PyDataset):
        num_batches = 10
        def __getitem__(self, index):
            if index == 4 and mpidist.rank() == 1:
                raise OSError("no such file: part-4")
            return np.ones((8, 3)), np.ones((8, 1))
    with mpidist.MultiWorkerMirroredStrategy().scope():
        model = mpidist.keras.adopt(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
        model.compile("sgd", "mse")
    model.fit(Batches(), shuffle=False, verbose=0)
    """
    done = run_script(source, 3)
    assert done.returncode != 0
    assert done.stderr.count("no such file: part-4") >= 2


def test_a_rank_that_leaves_ends_the_others() -> None:
    source = """
    import os
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras, mpidist, mpidist.keras, numpy as np
    with mpidist.MultiWorkerMirroredStrategy().scope():
        model = mpidist.keras.adopt(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
        model.compile("sgd", "mse")
    model.fit(np.ones((40, 3)), np.ones((40, 1)), batch_size=8, verbose=0)
    if mpidist.rank() == 1:
        raise SystemExit(0)
    model.fit(np.ones((40, 3)), np.ones((40, 1)), batch_size=8, verbose=0)
    """
    done = run_script(source, 2)
    assert done.returncode != 0
    assert "PeerError" in done.stderr
