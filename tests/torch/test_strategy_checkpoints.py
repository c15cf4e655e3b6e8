"""Adopted modules, their optimizers and schedulers in checkpoints, which any number of replicas goes on from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

import mpidist
from mpidist.checkpoint import DamagedCheckpointError
from mpidist.checkpoint.format import Manifest
from mpidist.core.errors import PeerError
from tests.checkpoint.shared_folder import of_all_ranks
from tests.torch.strategy_training import epochs, losses_of, network, weights_of

torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")
nn = torch.nn

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


class Training:
    """A small training that can be saved.

    Args:
        replicas: Of each rank; the ranks are all.
        kind: Of the optimizer.
    """

    def __init__(self, replicas: int, kind: Any, **settings: Any) -> None:
        devices = [f"cpu:{number}" for number in range(replicas)]
        self.strategy = mpidist.MultiWorkerMirroredStrategy(devices=devices)
        with self.strategy.scope():
            self.model = mpidist.torch.adopt(lambda: network("float64"))
            self.optimizer = mpidist.torch.Optimizer(self.model, kind, **settings)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5], gamma=0.5)
        self.batches = iter(self.strategy.experimental_distribute_dataset(epochs("float64").repeat()))
        self.checkpoint = mpidist.Checkpoint(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, batches=self.batches, step=0
        )

    def train(self, steps: int) -> Any:
        for batch in islice(self.batches, steps):
            self.strategy.run(self.step, args=batch)
            self.scheduler.step()
        copies = [weights_of(copy) for copy in self.model.copies]
        assert all(copy.equal(copies[0]) for copy in copies)
        return copies[0]

    def step(self, images: Any, labels: Any) -> None:
        self.optimizer.zero_grad()
        losses_of(self.model, images, labels, mpidist.global_count(images)).backward()
        self.optimizer.step()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with of_all_ranks(tmp_path) as found:
        yield found


Make: TypeAlias = Callable[..., Training]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes trainings, whose strategies are closed at the end."""
    with ExitStack() as opened:

        def made(replicas: int, kind: Any, **settings: Any) -> Training:
            training = Training(replicas, kind, **settings)
            opened.enter_context(training.strategy)
            return training

        yield made


@pytest.mark.parametrize("name", ["SGD", "Adam", "NAdam", "Adagrad", "Adafactor"])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (1, 2), (3, 1)])
def test_training_goes_on(make: Make, folder: Path, name: str, before: int, after: int) -> None:
    kind, settings = getattr(torch.optim, name), {"momentum": 0.9} if name == "SGD" else {}
    whole = make(before, kind, lr=1e-2, **settings)
    # In the middle of an epoch of seven batches.
    whole.train(4)
    path = whole.checkpoint.save(str(folder / "ckpt"))
    expected = whole.train(6)
    resumed = make(after, kind, lr=0.5, **settings)
    resumed.checkpoint.restore(path).assert_consumed()
    found = resumed.train(6)
    if before == after:
        assert torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert resumed.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"] == 1e-2 / 4


def test_a_state_that_is_there_already_goes_back(make: Make, folder: Path) -> None:
    training = make(2, torch.optim.Adam, lr=1e-2)
    path = training.checkpoint.save(str(folder / "start"))
    expected = training.train(3)
    assert training.optimizer.state
    training.checkpoint.restore(path).expect_partial()
    assert not any(inner.state for inner in training.optimizer.inner)
    assert torch.equal(training.train(3), expected)


def read_safetensors(path: Path) -> dict[str, Any]:
    """Read a file as its format says: a length, a header of JSON, and the tensors."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    dtypes = {"F64": torch.float64, "F32": torch.float32}
    return {
        key: torch.frombuffer(bytearray(data[start + first : start + end]), dtype=dtypes[one["dtype"]]).reshape(
            one["shape"]
        )
        for key, one in header.items()
        if key != "__metadata__"
        for first, end in [one["data_offsets"]]
    }


def test_the_file_is_read_by_others(make: Make, folder: Path) -> None:
    training = make(2, torch.optim.Adam, lr=1e-2)
    training.train(2)
    path = training.checkpoint.save(str(folder / "ckpt"))
    if mpidist.rank() == 0:
        tensors = read_safetensors(Path(path) / "data.safetensors")
        plain = network("float64")
        plain.load_state_dict(
            {key.removeprefix("model/"): tensor for key, tensor in tensors.items() if key.startswith("model/")}
        )
        assert torch.equal(weights_of(plain), weights_of(training.model))
        state = training.optimizer.state[training.model[0].weight]
        assert torch.equal(tensors["optimizer/state/0.weight/exp_avg"], state["exp_avg"])
    # A module that was never adopted takes the same names.
    plain = network("float64", seed=5)
    mpidist.Checkpoint(model=plain).restore(path).expect_partial()
    assert torch.equal(weights_of(plain), weights_of(training.model))


def test_names_with_slashes(folder: Path) -> None:
    """As Keras gives them to the parameters of its models."""

    def make_module() -> Any:
        return nn.ParameterDict({"dense/kernel": torch.zeros(2)})

    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            model, restored = mpidist.torch.adopt(make_module), mpidist.torch.adopt(make_module)
            optimizers = [mpidist.torch.Optimizer(module, torch.optim.Adam) for module in (model, restored)]

        def step() -> None:
            model["dense/kernel"].sum().backward()
            optimizers[0].step()

        strategy.run(step)
        path = mpidist.Checkpoint(model=model, optimizer=optimizers[0]).save(str(folder / "ckpt"))
        mpidist.Checkpoint(model=restored, optimizer=optimizers[1]).restore(path).assert_consumed()
        assert torch.equal(*(next(module.parameters()) for module in (model, restored)))
        states = [optimizer.state[next(iter(optimizer.state))]["exp_avg"] for optimizer in optimizers]
        assert torch.equal(*states)
    plain = make_module()
    mpidist.Checkpoint(model=plain).restore(path).expect_partial()
    assert torch.equal(plain["dense/kernel"], next(model.parameters()))


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("optimizer/settings", 3),
        ("optimizer/settings", {"class": "SGD", "groups": [1], "values": {}, "tensors": []}),
        ("optimizer/settings", {"class": "SGD", "groups": [{"betas": {"(tuple)": 5}}], "values": {}, "tensors": []}),
        ("scheduler", []),
        ("scheduler", {"(items)": [[[], 1]]}),
    ],
)
def test_a_state_of_another_format_is_damage(make: Make, name: str, state: Any, folder: Path) -> None:
    training = make(1, torch.optim.SGD, lr=1e-2)
    path = training.checkpoint.save(str(folder / "ckpt"))
    if training.strategy.extended.should_checkpoint:
        file = Path(path) / "manifest.json"
        content = json.loads(file.read_text())
        content["values"][name] = state
        file.write_text(Manifest.from_json(content, "").to_text())
    with pytest.raises((DamagedCheckpointError, PeerError), match=f"manifest.json is damaged: '{name}'"):
        training.checkpoint.restore(path)


def test_another_optimizer_is_named(make: Make, folder: Path) -> None:
    training = make(1, torch.optim.Adam, lr=1e-2)
    training.train(1)
    path = training.checkpoint.save(str(folder / "ckpt"))
    other = make(1, torch.optim.SGD, lr=1e-2)
    with pytest.raises(ValueError, match="has Adam with 1 groups of parameters; expected SGD"):
        other.checkpoint.restore(path)


def test_other_shapes_are_named(tmp_path: Path) -> None:
    model = mpidist.torch.adopt(nn.Linear(2, 2))
    path = mpidist.Checkpoint(model=model).save(str(tmp_path / "ckpt"))
    with pytest.raises(ValueError, match="does not fit the objects"):
        mpidist.Checkpoint(model=mpidist.torch.adopt(nn.Linear(3, 2))).restore(path)


def test_buffers_and_settings_come_back(folder: Path) -> None:
    with mpidist.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = mpidist.torch.adopt(nn.BatchNorm1d(2))
        model.copies[0].running_mean.fill_(3.0)
        model.copies[0].num_batches_tracked.fill_(7)
        path = mpidist.Checkpoint(model=model).save(str(folder / "ckpt"))
        with strategy.scope():
            other = mpidist.torch.adopt(nn.BatchNorm1d(2))
        mpidist.Checkpoint(model=other).restore(path).assert_consumed()
    for copy in other.copies:
        np.testing.assert_array_equal(copy.running_mean, [3.0, 3.0])
        assert int(copy.num_batches_tracked) == 7


PROGRAM = """
import os, signal, sys
import torch, mpidist
from tests.torch.test_strategy_checkpoints import Training

folder, replicas, end, killed_at = sys.argv[1], *map(int, sys.argv[2:])
training = Training(replicas, torch.optim.Adam, lr=1e-2)
checkpoint = training.checkpoint
manager = mpidist.CheckpointManager(checkpoint, folder, 3, step_counter=lambda: checkpoint.step, checkpoint_interval=3)
manager.restore_or_initialize()
while checkpoint.step < end:
    weights = training.train(1)
    checkpoint.step += 1
    manager.save()
    if checkpoint.step == killed_at and mpidist.rank() == mpidist.size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
if mpidist.rank() == 0:
    print(weights.numpy().tobytes().hex())
"""


@pytest.mark.one_rank
@pytest.mark.jobs
@pytest.mark.parametrize(("before", "after"), [((2, 1), (2, 1)), ((2, 1), (3, 1)), ((3, 1), (1, 2))])
def test_a_job_that_was_killed_goes_on(tmp_path: Path, before: tuple[int, int], after: tuple[int, int]) -> None:
    from tests.support.ranks import jobs

    def weights(folder: str, layout: tuple[int, int], killed_at: int) -> Any:
        done = jobs.run_script(PROGRAM, layout[0], str(tmp_path / folder), str(layout[1]), "12", str(killed_at))
        assert (done.returncode == 0) is (killed_at == 0), done.stderr
        return np.frombuffer(bytes.fromhex(done.stdout.strip())) if killed_at == 0 else None

    expected = weights("whole", before, 0)
    weights("killed", before, 10)
    found = weights("killed", after, 0)
    if before == after:
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
