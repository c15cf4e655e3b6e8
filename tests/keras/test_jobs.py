"""Programs of Keras as jobs of their own: the example, ranks that fail or are killed, and jobs that go on."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support.ranks.jobs import ROOT, run_script
from tests.support.ranks.programs import run_program

pytest.importorskip("keras", reason="Keras is missing: pip install '.[keras]' torch jax")
pytestmark = [pytest.mark.one_rank, pytest.mark.jobs]

SCRIPT = ROOT / "examples" / "keras_fit.py"


def example(out: Path, ranks: int, *arguments: str) -> tuple[float, float]:
    """Return the accuracy and the sum of weights that the example tells."""
    done = run_program(SCRIPT, ranks, "--out", str(out), *arguments, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = re.findall(r"([\d.]+) % of the test images are right; weights ([\d.]+)", done.stdout)
    assert done.stdout.count("Epoch 1/") <= 1
    return float(found[0]), float(found[1])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[float, float]]:
    """What the example tells on 1, 2 and 3 ranks."""
    out = tmp_path_factory.mktemp("whole")
    told = {ranks: example(out / str(ranks), ranks) for ranks in (1, 2, 3)}
    assert (out / "1" / "model.keras").exists()
    return told


def test_the_example_learns_the_same_on_any_number_of_ranks(whole: dict[int, tuple[float, float]]) -> None:
    assert all(accuracy > 93 for accuracy, _ in whole.values())
    weights = [weights for _, weights in whole.values()]
    assert max(weights) - min(weights) < 0.05 * weights[0] / 100


_PLACES = ["before mpidist", "before the strategy", "before the scope", "in the scope"]

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


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the example on 2 ranks, one of which was killed."""
    out = tmp_path_factory.mktemp("killed")
    done = run_script(KILLED, 2, "--out", str(out))
    assert done.returncode != 0
    assert "Epoch 3/5" in done.stdout
    return out


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_job_that_was_killed_goes_on_on_another_number_of_ranks(
    whole: dict[int, tuple[float, float]], killed: Path, tmp_path: Path, ranks: int
) -> None:
    out = tmp_path / "out"
    shutil.copytree(killed, out)
    found = example(out, ranks, "--resume")
    if ranks == 2:
        assert found == whole[2]
    assert found[1] == pytest.approx(whole[2][1], rel=1e-4)
    assert not (out / "backup").exists()


@pytest.mark.parametrize("place", _PLACES)
def test_keras_may_be_imported_at_any_time(place: str) -> None:
    imports = {each: "import keras" if each == place else "pass" for each in _PLACES}
    source = f"""
    import os
    os.environ.setdefault("KERAS_BACKEND", "torch")
    {imports["before mpidist"]}
    import mpidist, numpy as np
    {imports["before the strategy"]}
    strategy = mpidist.MultiWorkerMirroredStrategy()
    {imports["before the scope"]}
    with strategy.scope():
        {imports["in the scope"]}
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(loss="mse", optimizer="sgd")
    x = np.arange(16.0)[:, None] / 16
    model.fit(x, x, epochs=2, batch_size=4, verbose=0)
    values = [float(value.sum()) for value in model.get_weights()]
    assert len(set(strategy.extended.communicator.all_gather_object(str(values)))) == 1, values
    """
    done = run_script(source, 2)
    assert done.returncode == 0, done.stderr


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
