"""Checkpoints: what is saved, restored on another number of replicas, refused, and left on the disk."""

from __future__ import annotations

import json
import resource
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import Checkpoint
from mpidist.checkpoint import latest_checkpoint
from mpidist.core.errors import PeerError
from mpidist.metrics import Mean
from mpidist.optimizers import SGD, Adam
from tests.support.ranks.layouts import LAYOUTS, layouts, per_replica

SYNC, AGGREGATION = mpidist.VariableSynchronization, mpidist.VariableAggregation


def on_read(aggregation: mpidist.VariableAggregation, value: Any = 0.0, **more: Any) -> mpidist.Variable:
    return mpidist.Variable(value, synchronization=SYNC.ON_READ, aggregation=aggregation, **more)


def copies(variable: mpidist.Variable) -> list[Any]:
    return [np.asarray(copy).tolist() for copy in variable.values]


def variables(strategy: mpidist.Strategy, start: float = 0.0) -> dict[str, mpidist.Variable]:
    with strategy.scope():
        return {
            "plain": mpidist.Variable([start, start + 1]),
            "sum": on_read(AGGREGATION.SUM, start),
            "mean": on_read(AGGREGATION.MEAN, start),
            "first": on_read(AGGREGATION.ONLY_FIRST_REPLICA, start),
        }


@pytest.mark.parametrize("strategy", layouts("mirrored-2local"), indirect=True)
def test_example_20(strategy: mpidist.Strategy, tmp_path: Path) -> None:
    mine = variables(strategy)
    values = per_replica(strategy, [4.0, 3.0])
    for name in ("sum", "mean"):
        strategy.run(lambda x, v=mine[name]: v.assign(x), args=(values,))
    path = Checkpoint(sum=mine["sum"], mean=mine["mean"]).save(tmp_path / "ckpt")
    mine["sum"].assign(0.0)
    Checkpoint(sum=mine["sum"], mean=mine["mean"]).restore(path).assert_consumed()
    assert copies(mine["sum"]) == copies(mine["mean"]) == [3.5, 3.5]

    plain = Checkpoint(v=mpidist.Variable(2.0)).save(tmp_path / "plain")
    Checkpoint(v=mine["sum"]).restore(plain)
    assert copies(mine["sum"]) == [1.0, 1.0]

    with LAYOUTS[5].open() as four:
        assert four.num_replicas_in_sync == 4
        theirs = variables(four)["sum"]
        Checkpoint(sum=theirs).restore(path).expect_partial()
        assert copies(theirs) == [1.75] * 4


@pytest.mark.parametrize("other", LAYOUTS, ids=str)
def test_restored_in_any_layout(strategy: mpidist.Strategy, other: Any, tmp_path: Path) -> None:
    mine = variables(strategy)
    n = strategy.num_replicas_in_sync
    ids = per_replica(strategy, lambda i: float(i + 1))
    for name in ("sum", "mean", "first"):
        strategy.run(lambda x, v=mine[name]: v.assign(x), args=(ids,))
    path = Checkpoint(state=mine).save(tmp_path / "ckpt")
    with other.open() as another:
        theirs = variables(another, start=9.0)
        # Every rank reads what the first rank of its group wrote: groups may differ.
        Checkpoint(state=theirs).restore(path).assert_consumed()
        assert theirs["plain"].numpy().tolist() == [0.0, 1.0]
        assert theirs["sum"].numpy() == pytest.approx(n * (n + 1) / 2)
        assert theirs["mean"].numpy() == pytest.approx((n + 1) / 2)
        assert theirs["first"].numpy() == 1.0


def test_integer_sums_are_kept(strategy: mpidist.Strategy, tmp_path: Path) -> None:
    with strategy.scope():
        count = on_read(AGGREGATION.SUM, np.int64(0))
    strategy.run(lambda i: count.assign(i), args=(per_replica(strategy, lambda i: 10 * i + 7),))
    total = int(count.numpy())
    path = Checkpoint(count=count).save(tmp_path / "ckpt")
    count.assign(0)
    Checkpoint(count=count).restore(path)
    assert count.numpy() == total


def train(strategy: mpidist.Strategy, optimizer: Any, v: mpidist.Variable, steps: int) -> None:
    for _ in range(steps):
        strategy.run(lambda: optimizer.apply_gradients([(np.asarray(v) * 0.5, v)]))


@pytest.mark.parametrize("built", [True, False])
def test_training_goes_on_as_if_never_interrupted(strategy: mpidist.Strategy, built: bool, tmp_path: Path) -> None:
    def fresh() -> tuple[mpidist.Variable, Adam, Checkpoint]:
        with strategy.scope():
            v = mpidist.Variable([1.0, -2.0])
        optimizer = Adam(0.1)
        return v, optimizer, Checkpoint(v=v, optimizer=optimizer, step=0)

    v, optimizer, checkpoint = fresh()
    train(strategy, optimizer, v, 3)
    checkpoint.step = 3
    path = checkpoint.save(tmp_path / "ckpt")
    train(strategy, optimizer, v, 3)

    w, resumed, checkpoint = fresh()
    if built:
        resumed.build([w])
    status = checkpoint.restore(path)
    assert checkpoint.step == 3
    assert checkpoint.save_counter == 1
    if not built:
        slots = {f"optimizer/slots_by_path/v/{slot}" for slot in "ms"}
        assert set(status.deferred) == {"optimizer/iterations", *slots}
        with pytest.raises(AssertionError, match="wait for variables of an optimizer"):
            status.assert_consumed()
        # What is waiting is not lost by saving again.
        again = checkpoint.save(tmp_path / "again")
        checkpoint.restore(again)
        assert resumed.learning_rate == 0.1
    train(strategy, resumed, w, 3)
    if built:
        status.assert_consumed()
    np.testing.assert_array_equal(w.numpy(), v.numpy())
    assert resumed.iterations.numpy() == 6


def test_slots_of_other_variables_are_refused(tmp_path: Path) -> None:
    v, w = mpidist.Variable([1.0, 2.0], name="v"), mpidist.Variable([1.0, 2.0, 3.0], name="v")
    optimizer = SGD(momentum=0.5)
    optimizer.build([v])
    path = Checkpoint(optimizer=optimizer).save(tmp_path / "ckpt")
    other = SGD(momentum=0.5)
    status = Checkpoint(optimizer=other).restore(path)
    with pytest.raises(ValueError, match=r"slots_by_name/v/momentum of shape \(2,\).*variables that were saved"):
        other.build([w])
    with pytest.raises(AssertionError):
        status.assert_consumed()


def test_nests_metrics_arrays_and_values(strategy: mpidist.Strategy, tmp_path: Path) -> None:
    with strategy.scope():
        loss = Mean()
        layers = [{"w": mpidist.Variable(1.0), 7: (mpidist.Variable(2.0),)}]
    strategy.run(lambda x: loss.update_state(x), args=(per_replica(strategy, float),))
    array, settings = np.arange(3), {"rate": 0.5, "name": "a/b", "a/b": None, "flags": [True, 2]}
    checkpoint = Checkpoint(layers=layers, loss=loss, array=array, settings=settings, epoch=np.int64(4))
    path = checkpoint.save(tmp_path / "ckpt")
    expected = loss.result()

    loss.reset_state()
    array[:] = 0
    layers[0]["w"].assign(0.0)
    layers[0][7][0].assign(0.0)
    settings.update({"rate": 0, "name": "", "a/b": 1})
    settings["flags"][:] = [False, 0]
    checkpoint.epoch = 0
    checkpoint.restore(path).assert_consumed()
    assert loss.result() == pytest.approx(expected)
    assert array.tolist() == [0, 1, 2]
    assert (layers[0]["w"].numpy(), layers[0][7][0].numpy()) == (1, 2)
    assert settings == {"rate": 0.5, "name": "a/b", "a/b": None, "flags": [True, 2]}
    assert checkpoint.epoch == 4


@pytest.mark.one_rank
@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "uint64", "float16", "float32", "bfloat16", "complex64", "complex128"]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_dtypes_and_shapes(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    kind = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype
    values = np.asarray(np.arange(np.prod(shape)).reshape(shape)).astype(kind)
    v, transposed = mpidist.Variable(values), values.T
    path = Checkpoint(v=v, array=transposed).save(tmp_path / "ckpt")
    w, array = mpidist.Variable(np.ones_like(values)), np.ones(transposed.shape, kind)
    Checkpoint(v=w, array=array).restore(path).assert_consumed()
    np.testing.assert_array_equal(w.numpy(), values)
    np.testing.assert_array_equal(array, transposed)


def test_the_format(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    v = mpidist.Variable(np.float32([1, 2]), aggregation=AGGREGATION.MEAN)
    arrays = {"a/b": np.array(2, np.float16), "d": np.zeros((0, 3), bool), "ü": np.int8([[1], [2]])}
    path = Path(Checkpoint(v=v, z=np.array([1 + 2j]), epoch=2, x=arrays).save(tmp_path / "deep" / "ckpt"))
    assert path == tmp_path / "deep" / "ckpt-1"
    assert sorted(p.name for p in path.iterdir()) == ["data.safetensors", "manifest.json"]
    assert [p.name for p in path.parent.iterdir()] == ["ckpt-1"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"], manifest["mpidist"]) == (
        "mpidist checkpoint", 4, mpidist.__version__,
    )  # fmt: skip
    assert (manifest["number"], manifest["sequence"], manifest["values"]) == (1, 1, {"epoch": 2})
    assert manifest["tensors"]["v"] == {
        "shape": [2], "dtype": "float32", "stored_as": "tensor",
        "parts": [{"file": "data.safetensors", "start": 0, "stop": 2}],
        "synchronization": "ON_WRITE", "aggregation": "MEAN",
    }  # fmt: skip
    assert manifest["tensors"]["z"]["stored_as"] == "bytes"
    content = (path / "data.safetensors").read_bytes()
    assert manifest["files"] == {"data.safetensors": {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}}
    data = safetensors.load_file(path / "data.safetensors")
    assert data["v"].tolist() == [1, 2]
    assert data["z"].view("complex128").tolist() == [1 + 2j]
    for name, array in arrays.items():
        other = data[f"x/{name.replace('/', '%2F')}"]
        assert (other.dtype, other.shape, other.tolist()) == (array.dtype, array.shape, array.tolist())


def test_numbers_go_on_and_the_latest_is_the_one_saved_last(tmp_path: Path) -> None:
    v = mpidist.Variable(1.0)
    checkpoint = Checkpoint(v=v)
    assert latest_checkpoint(tmp_path) is None
    paths = [checkpoint.save(tmp_path / "ckpt") for _ in range(11)]
    assert paths[-1] == str(tmp_path / "ckpt-11")
    assert latest_checkpoint(tmp_path) == paths[-1]
    resumed = Checkpoint(v=v)
    resumed.restore(paths[8]).assert_consumed()
    assert resumed.save(tmp_path / "ckpt") == paths[9]
    # A run that starts anew in the same directory replaces what it meets, and its checkpoints are the latest.
    assert latest_checkpoint(tmp_path) == paths[9]
    v.assign(5.0)
    assert Checkpoint(v=v).save(tmp_path / "ckpt") == paths[0]
    assert latest_checkpoint(tmp_path) == paths[0]
    assert len(list(tmp_path.iterdir())) == 11
    v.assign(0.0)
    Checkpoint(v=v).restore(paths[0])
    assert v.numpy() == 5.0


def test_the_latest_is_found_for_all_ranks(strategy: mpidist.Strategy, tmp_path: Path) -> None:
    with strategy.scope():
        v = mpidist.Variable(1.0)
    checkpoint = Checkpoint(v=v, epoch=1)
    assert checkpoint.restore_latest(tmp_path / "nothing") is None
    for value in (2.0, 3.0):
        v.assign(value)
        checkpoint.epoch += 1
        path = checkpoint.save(tmp_path / "ckpt")
    v.assign(0.0)
    status = checkpoint.restore_latest(tmp_path)
    assert status is not None
    assert status.assert_consumed().path == path
    assert (v.numpy(), checkpoint.epoch, checkpoint.save_counter) == (3.0, 3, 2)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """What a full disk does to a large file, without filling one."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_an_error_while_writing_is_raised_on_all_ranks(strategy: mpidist.Strategy, tmp_path: Path) -> None:
    with strategy.scope():
        v = mpidist.Variable(np.ones(1 << 16))
    checkpoint = Checkpoint(v=v)
    path = checkpoint.save(tmp_path / "ckpt")
    sys.stdout.flush()
    with files_of_at_most(1 << 15), pytest.raises(Exception) as caught:
        checkpoint.save(tmp_path / "ckpt")
    assert isinstance(caught.value, PeerError) != strategy.extended.should_checkpoint
    assert "too large" in str(caught.value)
    assert checkpoint.save_counter == 1
    if strategy.extended.should_checkpoint:
        assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt-1"]
    v.assign(np.zeros(1 << 16))
    checkpoint.restore(path)
    assert v.numpy()[0] == 1
    assert checkpoint.save(tmp_path / "ckpt").endswith("ckpt-2")


def test_an_error_while_reading_is_raised_on_all_ranks(strategy: mpidist.Strategy, tmp_path: Path) -> None:
    with strategy.scope():
        checkpoint = Checkpoint(v=mpidist.Variable(1.0))
    error = FileNotFoundError if strategy.extended.should_checkpoint else PeerError
    with pytest.raises(error, match=r"no manifest\.json"):
        checkpoint.restore(tmp_path)
    (tmp_path / "taken-1").mkdir()
    error = FileExistsError if strategy.extended.should_checkpoint else PeerError
    with pytest.raises(error, match="is no checkpoint"):
        checkpoint.save(tmp_path / "taken")


def test_what_does_not_match(strategy: mpidist.Strategy, tmp_path: Path) -> None:
    with strategy.scope():
        v, w = mpidist.Variable([1.0, 2.0]), mpidist.Variable([1.0, 2.0])
    path = Checkpoint(v=v, old=w, epoch=1).save(tmp_path / "ckpt")
    with pytest.warns(UserWarning, match=r"no value for \['new'\].*no object has: \['old', 'epoch'\]"):
        Checkpoint(v=v, new=w).restore(path)
    status = Checkpoint(v=v, new=w).restore(path)
    assert (status.missing, status.unused) == (("new",), ("old", "epoch"))
    with pytest.raises(AssertionError, match="'new'"):
        status.assert_consumed()
    with pytest.raises(AssertionError, match="'new'"):
        status.assert_existing_objects_matched()
    Checkpoint(v=v).restore(path).assert_existing_objects_matched()
    Checkpoint(v=v, new=w).restore(path).expect_partial()
    with strategy.scope():
        narrow, single = mpidist.Variable([1.0]), mpidist.Variable(np.float32([1, 2]))
    for wrong, match in [
        ({"v": narrow}, r"'v' has shape \(2,\) and dtype float64 in the checkpoint, and shape \(1,\)"),
        ({"v": single}, "and dtype float32 here"),
        ({"v": 1}, "array in the checkpoint and a value here"),
        ({"epoch": v}, "'epoch' is 1 in the checkpoint and an array here"),
        ({"other": v}, "nothing of what is asked for"),
    ]:
        with pytest.raises(ValueError, match=match):
            Checkpoint(**wrong).restore(path)


def test_an_optimizer_of_another_class(tmp_path: Path) -> None:
    path = Checkpoint(optimizer=SGD(0.5)).save(tmp_path / "ckpt")
    adam = Adam(0.001)
    with pytest.raises(ValueError, match="'optimizer' is of class SGD in the checkpoint and of class Adam here"):
        Checkpoint(optimizer=adam).restore(path)
    assert adam.learning_rate == 0.001
    again = SGD(0.1)
    Checkpoint(optimizer=again).restore(path).assert_consumed()
    assert again.learning_rate == 0.5
    # Checkpoints of before do not say.
    manifest = json.loads((Path(path) / "manifest.json").read_text())
    del manifest["classes"], manifest["checksum"]
    (Path(path) / "manifest.json").write_text(json.dumps({**manifest, "version": 1}))
    Checkpoint(optimizer=adam).restore(path).assert_consumed()


def test_wrong_objects() -> None:
    for wrong, match in [
        ({"x": object()}, "'x' is a object; expected a variable"),
        ({"x": {1.5: 1}}, "dict key 1.5"),
        ({"x": MappingProxyType({"a": 1})}, "put it in a dict or a list"),
        ({"x": np.array(["a"])}, "dtype"),
    ]:
        with pytest.raises(TypeError, match=match):
            Checkpoint(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be called 'save'"):
        Checkpoint(save=1)
    checkpoint = Checkpoint(epoch=1)
    with pytest.raises(AttributeError, match="no object 'step'"):
        checkpoint.step
    with pytest.raises(AttributeError, match=r"Checkpoint\(step=\.\.\.\)"):
        checkpoint.step = 1
    with pytest.raises(TypeError, match="expected a variable"):
        checkpoint.epoch = object()
    with pytest.raises(ValueError, match="path is None"):
        checkpoint.restore(None)  # type: ignore[arg-type]
    for path, better in [("o/.", "o/./ckpt"), ("..", "../ckpt"), ("o/.hidden", "o/hidden"), ("o/", "o/ckpt")]:
        with pytest.raises(ValueError, match=rf"does not begin with a dot, such as '{better}'"):
            checkpoint.save(path)
        with pytest.raises(ValueError, match=rf"does not begin with a dot, such as '{better}'"):
            checkpoint.write(path)
    with pytest.raises(ValueError, match="a name after the directory"):
        checkpoint.save("out/")


@pytest.mark.parametrize("strategy", layouts("mirrored-2local"), indirect=True)
def test_wrong_variables_and_contexts(strategy: mpidist.Strategy, tmp_path: Path) -> None:
    with strategy.scope():
        v, unreadable = mpidist.Variable(1.0), on_read(AGGREGATION.NONE)
    with pytest.raises(ValueError, match="'x'.*aggregation NONE"):
        Checkpoint(x=unreadable)
    with pytest.raises(RuntimeError, match=r"inside strategy\.run"):
        strategy.run(lambda: Checkpoint(v=v).save(tmp_path / "ckpt"))
    with mpidist.OneDeviceStrategy("cpu:0") as other:
        with other.scope():
            w = mpidist.Variable(1.0)
        with pytest.raises(ValueError, match="MirroredStrategy.*OneDeviceStrategy"):
            Checkpoint(v=v, w=w).save(tmp_path / "ckpt")
    with strategy.scope():
        Checkpoint(v=v).save(tmp_path / "ckpt")


@pytest.mark.one_rank
def test_safetensors_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    checkpoint = Checkpoint(epoch=1, array=np.arange(3))
    checkpoint.restore(checkpoint.save(tmp_path / "ckpt")).assert_consumed()
