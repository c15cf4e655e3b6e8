"""What a checkpoint holds: lists and dicts that grow, iterators, arrays that cannot be filled, names that clash."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import mpidist
from mpidist import Checkpoint
from mpidist.checkpoint import DamagedCheckpointError
from mpidist.checkpoint.format import Manifest
from mpidist.core.errors import PeerError
from tests.checkpoint.shared_folder import of_all_ranks
from tests.support.ranks.layouts import layouts


def test_lists_and_dicts_get_what_they_lack(strategy: mpidist.Strategy, tmp_path: Path) -> None:
    with strategy.scope():
        v = mpidist.Variable(1.0)
    history = [{"epoch": 1, "scores": [0.5, None]}, {"epoch": 2, "scores": [], "best": (["a"],)}]
    curves = {"loss": np.arange(3.0), 7: {"x/y": np.int64(4)}, "gone": 1}
    path = Checkpoint(v=v, history=history, curves=curves, flags=[True, False]).save(tmp_path / "ckpt")

    fresh = Checkpoint(v=v, history=[], curves={"gone": 2}, flags=[False])
    mine = fresh.history
    fresh.restore(path).assert_consumed()
    assert fresh.history is mine
    assert fresh.history == history
    assert fresh.curves[7] == {"x/y": 4}
    assert fresh.curves["loss"].tolist() == [0.0, 1.0, 2.0]
    assert (fresh.curves["gone"], fresh.flags) == (1, [True, False])

    # A list goes back to the length that it had; a dict keeps what it has beyond the checkpoint, which is told.
    fresh.history.append({"epoch": 3})
    fresh.flags.extend([True, True])
    fresh.curves["new"] = 5
    status = fresh.restore(path)
    assert (status.missing, status.unused) == (("curves/new",), ())
    assert (fresh.history, fresh.flags, fresh.curves["new"]) == (history, [True, False], 5)
    status.expect_partial()


@pytest.mark.one_rank
def test_a_matrix_comes_back_and_a_masked_array_is_refused(tmp_path: Path) -> None:
    matrix: Any = np.arange(6.0).reshape(2, 3).view(np.matrix)
    for is_async in (False, True):
        checkpoint = Checkpoint(a=[matrix.copy(), matrix.T * 1j])
        path = checkpoint.save(tmp_path / f"ckpt-{is_async}", async_save=is_async)
        checkpoint.a[0][:], checkpoint.a[1][:] = 0, 0
        checkpoint.restore(path).assert_consumed()
        assert isinstance(checkpoint.a[0], np.matrix)
        assert (checkpoint.a[0].tolist(), checkpoint.a[1].tolist()) == (matrix.tolist(), (matrix.T * 1j).tolist())
    with pytest.raises(TypeError, match="'a/0' is a masked array, whose mask would be lost"):
        Checkpoint(a=[np.ma.masked_array([1.0], [True])])


@pytest.mark.one_rank
def test_nests_without_end() -> None:
    nest: Any = {"deep": []}
    nest["deep"].append((nest,))
    with pytest.raises(ValueError, match="'nest/deep/0/0' is 'nest' itself, a dict, which so would have no end"):
        Checkpoint(nest=nest)
    # Twice in one checkpoint is not within itself.
    Checkpoint(nest=[nest.pop("deep"), [], *[[1]] * 2][1:])
    deep: Any = []
    for _ in range(400):
        deep = [deep]
    with pytest.raises(ValueError, match=r"'deep(/0)+' is nested more than 100 deep"):
        Checkpoint(deep=deep)
    reader = Reader()
    reader.position = deep
    with pytest.raises(TypeError, match=r"state\(\) of checkpoint object 'reader'.*nested more than 100 deep"):
        Checkpoint(reader=reader).save("nowhere")


def test_a_list_is_no_dict(tmp_path: Path) -> None:
    path = Checkpoint(nest={"inner": {}}).save(tmp_path / "ckpt")
    with pytest.raises(ValueError, match="'nest/inner' is a dict in the checkpoint and a list here"):
        Checkpoint(nest={"inner": []}).restore(path)


def test_what_only_the_program_can_make_stays_its_own(tmp_path: Path) -> None:
    def layer(value: float) -> mpidist.Variable:
        return mpidist.Variable(value)

    path = Checkpoint(layers=[layer(1), layer(2)], named={"a": layer(3), "b": [layer(4), 5]}).save(tmp_path / "ckpt")
    fewer = Checkpoint(layers=[layer(0)], named={"a": layer(0)})
    status = fewer.restore(path)
    assert status.unused == ("layers/1", "named/b/0", "named/b/1")
    assert (len(fewer.layers), list(fewer.named)) == (1, ["a"])
    status.expect_partial()
    more = Checkpoint(layers=[layer(0), layer(0), layer(7)], named={"a": layer(0), "b": [layer(0), 0]})
    status = more.restore(path)
    assert status.missing == ("layers/2",)
    assert [float(v.numpy()) for v in more.layers] == [1, 2, 7]
    status.expect_partial()
    arrays = Checkpoint(layers=[np.zeros((), int), np.zeros((), int), np.ones(())])
    assert arrays.restore(path).expect_partial().missing == ("layers/2",)
    assert len(arrays.layers) == 3


PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
ARRAYS = st.sampled_from([np.zeros((0, 2), np.int8), np.arange(3.0), np.array(True), np.array([1 + 2j])])
NESTS = st.recursive(
    PLAIN | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(-9, 9), inner, max_size=3)
    ),
    max_leaves=12,
)


def text_of(nest: Any) -> Any:
    if isinstance(nest, dict):
        return {key: text_of(value) for key, value in nest.items()}
    return [text_of(value) for value in nest] if isinstance(nest, list) else repr(nest)


def names_clash(nest: Any) -> bool:
    """Whether a dict has a number and its text, both as keys."""
    if isinstance(nest, dict):
        return len({str(key) for key in nest}) < len(nest) or any(map(names_clash, nest.values()))
    return isinstance(nest, list) and any(map(names_clash, nest))


@pytest.mark.one_rank
@given(st.lists(NESTS, max_size=4), st.lists(NESTS, max_size=4))
def test_any_nest_comes_back(tmp_path_factory: pytest.TempPathFactory, saved: list[Any], here: list[Any]) -> None:
    assume(not names_clash(saved) and not names_clash(here))
    path = Checkpoint(nest=saved, same=0).save(tmp_path_factory.mktemp("nest") / "ckpt")
    fresh = Checkpoint(nest=[], same=1)
    fresh.restore(path).assert_consumed()
    assert text_of(fresh.nest) == text_of(saved)
    # Over something else it either fits, or nothing is changed.
    before = text_of(here)
    other = Checkpoint(nest=here, same=1)
    try:
        other.restore(path).expect_partial()
    except ValueError:
        assert (text_of(other.nest), other.same) == (before, 1)
    else:
        assert other.same == 0


class Reader:
    """An iterator over numbers, as far as checkpoints know iterators."""

    def __init__(self, position: int = 0, fails: bool = False) -> None:
        self.position, self.fails = position, fails

    def state(self) -> Any:
        return {"position": self.position, "seeds": (1, 2)}

    def restore(self, state: Any) -> None:
        if self.fails:
            raise ValueError("the state is that of another dataset")
        assert state["seeds"] == [1, 2]
        self.position = state["position"]


def test_iterators_go_on_where_they_stood(strategy: mpidist.Strategy, tmp_path: Path) -> None:
    with strategy.scope():
        v = mpidist.Variable(1.0)
    path = Checkpoint(v=v, readers={"train": Reader(5), "test": Reader(6)}).save(tmp_path / "ckpt")
    readers = {"train": Reader(), "test": Reader()}
    Checkpoint(v=v, readers=readers).restore(path).assert_consumed()
    assert (readers["train"].position, readers["test"].position) == (5, 6)
    # Where there is none, none is made up.
    status = Checkpoint(v=v, readers={}).restore(path)
    assert status.unused == ("readers/train", "readers/test")
    status.expect_partial()
    plain = Checkpoint(v=v, readers={"train": 1, "test": 2})
    with pytest.raises(ValueError, match="'readers/test' is the state of an iterator in the checkpoint and a value"):
        plain.restore(path)
    with pytest.raises(ValueError, match="'readers/train' is no state of an iterator in the checkpoint"):
        Checkpoint(v=v, readers=readers).restore(plain.save(tmp_path / "plain"))


def test_a_distributed_iterator(strategy: mpidist.Strategy, tmp_path: Path) -> None:
    dataset = strategy.experimental_distribute_dataset(mpidist.Dataset.range(64).batch(8))
    iterator = iter(dataset)
    with strategy.scope():
        checkpoint = Checkpoint(v=mpidist.Variable(0.0), iterator=iterator)
    next(iterator)
    next(iterator)
    path = checkpoint.save(tmp_path / "ckpt")
    expected = strategy.experimental_local_results(next(iterator))
    again = iter(strategy.experimental_distribute_dataset(mpidist.Dataset.range(64).batch(8)))
    Checkpoint(v=checkpoint.v, iterator=again).restore(path).assert_consumed()
    found = strategy.experimental_local_results(next(again))
    assert [np.asarray(x).tolist() for x in found] == [np.asarray(x).tolist() for x in expected]
    iterator.close()
    again.close()


@pytest.mark.parametrize("state", [3, "", [], {}, {"format": "mpidist iterator", "version": 1}], ids=str)
def test_before_a_damaged_state_all_ranks_restore(strategy: mpidist.Strategy, state: Any, tmp_path: Path) -> None:
    batches = iter(strategy.experimental_distribute_dataset(mpidist.Dataset.range(8).batch(4)))
    with strategy.scope():
        manager = mpidist.CheckpointManager(Checkpoint(batches=batches, step=1), tmp_path, None)
        first, damaged = manager.save(), manager.save()
        if strategy.extended.should_checkpoint:
            file = Path(damaged) / "manifest.json"
            content = json.loads(file.read_text())
            content["values"]["batches"] = state
            file.write_text(Manifest.from_json(content, "").to_text())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert manager.restore_or_initialize() == first
    if strategy.extended.should_checkpoint:
        assert "manifest.json is damaged: 'batches': state" in str(caught[0].message)
    with strategy.scope(), pytest.raises((DamagedCheckpointError, PeerError), match="'batches': state"):
        Checkpoint(batches=batches, step=1).restore(damaged)


def test_a_state_that_json_cannot_hold(tmp_path: Path) -> None:
    reader = Reader()
    reader.position = object()  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"state\(\) of checkpoint object 'reader', a Reader, returned what JSON"):
        Checkpoint(reader=reader).save(tmp_path / "ckpt")
    assert os.listdir(tmp_path) == []


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)
@pytest.mark.parametrize("what", ["iterator", "read-only", "shape", "state"])
def test_an_error_of_one_rank_reaches_all_before_anything_is_changed(
    strategy: mpidist.Strategy, what: str, tmp_path: Path
) -> None:
    from mpi4py import MPI

    is_odd = MPI.COMM_WORLD.rank == 1
    with strategy.scope():
        v = mpidist.Variable([1.0, 2.0])
    objects: dict[str, Any] = {"v": v, "array": np.arange(3), "reader": Reader(1)}
    path = Checkpoint(**objects).save(tmp_path / "ckpt")
    v.assign([0.0, 0.0])
    if is_odd and what == "iterator":
        objects["reader"].fails = True
    if is_odd and what == "read-only":
        objects["array"].flags.writeable = False
    if is_odd and what == "shape":
        objects["array"] = np.arange(4)
    if is_odd and what == "state":
        objects["reader"].position = object()
    checkpoint = Checkpoint(**objects)
    expected = (TypeError if what == "state" else ValueError) if is_odd else PeerError
    match = {
        "iterator": "another dataset", "read-only": "'array' is a read-only array here",
        "shape": r"'array' has shape \(3,\)", "state": "returned what JSON",
    }[what]  # fmt: skip
    with pytest.raises(expected, match=match) as caught:
        checkpoint.save(tmp_path / "odd") if what == "state" else checkpoint.restore(path)
    assert is_odd or "rank 1" in str(caught.value)
    assert v.numpy().tolist() == [0.0, 0.0]
    objects.update(array=np.arange(3), reader=Reader(1))
    Checkpoint(**objects).restore(path).assert_consumed()
    assert v.numpy().tolist() == [1.0, 2.0]


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)
@pytest.mark.parametrize("call", ["save", "restore", "manage"])
def test_a_list_that_holds_something_wrong_on_one_rank(strategy: mpidist.Strategy, call: str, tmp_path: Path) -> None:
    from mpi4py import MPI

    is_odd = MPI.COMM_WORLD.rank == 1
    with strategy.scope():
        checkpoint = Checkpoint(v=mpidist.Variable(1.0), notes=[])
    path = checkpoint.save(tmp_path / "ckpt")
    if is_odd:
        checkpoint.notes.append(object())
    calls: dict[str, Any] = {
        "save": lambda: checkpoint.save(tmp_path / "ckpt"),
        "restore": lambda: checkpoint.restore(path),
        "manage": lambda: mpidist.CheckpointManager(checkpoint, tmp_path, 1),
    }
    with pytest.raises(TypeError if is_odd else PeerError, match="'notes/0' is a object; expected a variable"):
        calls[call]()
    checkpoint.notes.clear()
    assert checkpoint.save(tmp_path / "ckpt").endswith("ckpt-2")


class FailsAsArray:
    """Something that cannot say its value."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        raise RuntimeError("no value")

    def items(self) -> Any:
        raise RuntimeError("no value")


class FailingDict(FailsAsArray, dict[str, Any]):
    pass


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)
@pytest.mark.parametrize("what", ["number", "step", "dict"])
def test_whatever_one_rank_cannot_read_reaches_all(strategy: mpidist.Strategy, what: str, tmp_path: Path) -> None:
    from mpi4py import MPI

    is_odd = MPI.COMM_WORLD.rank == 1
    with strategy.scope():
        checkpoint = Checkpoint(v=mpidist.Variable(1.0), notes=[])
    step: list[Any] = [1]
    manager = mpidist.CheckpointManager(
        checkpoint, tmp_path, 1, step_counter=lambda: int(np.asarray(step[0])), checkpoint_interval=1
    )
    wrong = FailsAsArray() if is_odd else 1
    if what == "step":
        step[0] = wrong
    if what == "dict" and is_odd:
        checkpoint.notes.append(FailingDict())
    with pytest.raises(RuntimeError if is_odd else PeerError, match="no value"):
        manager.save(wrong if what == "number" else None)
    step[0], checkpoint.notes[:] = 1, []
    assert str(manager.save()).endswith("ckpt-1")


DIFFERING = r"different objects: 'a' only on rank 0; 'c' only on ranks? 1(-\d)?; expected the same on each of . ranks"


def differing(strategy: mpidist.Strategy) -> tuple[dict[str, mpidist.Variable], bool]:
    from mpi4py import MPI

    with strategy.scope():
        variables = {name: mpidist.Variable(np.full(3, float(i))) for i, name in enumerate("abc", 1)}
    return variables, MPI.COMM_WORLD.rank == 0


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)
def test_other_objects_on_one_rank_are_told_before_anything_is_changed(
    strategy: mpidist.Strategy, tmp_path: Path
) -> None:
    mine, is_first = differing(strategy)
    path = Checkpoint(**mine, step=1).save(tmp_path / "ckpt")
    for variable in mine.values():
        variable.assign(np.zeros(3))
    names = "ab" if is_first else "bc"
    checkpoint = Checkpoint(**{name: mine[name] for name in names}, step=0)
    with pytest.raises(ValueError, match=DIFFERING):
        checkpoint.restore(path)
    assert (checkpoint.step, [float(v.numpy().sum()) for v in mine.values()]) == (0, [0.0, 0.0, 0.0])
    with pytest.raises(ValueError, match=DIFFERING):
        checkpoint.save(tmp_path / "other")
    # Only the first rank's would be saved, and then not be restored by the others.
    own = {"best": np.zeros(3)} if is_first else {}
    with pytest.raises(ValueError, match="'best' only on rank 0"):
        Checkpoint(b=mine["b"], **own).save(tmp_path / "other")
    assert not (tmp_path / "other-1").exists()


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)
def test_lists_that_grew_on_one_rank_alone(strategy: mpidist.Strategy, tmp_path: Path) -> None:
    mine, is_first = differing(strategy)
    checkpoint = Checkpoint(a=mine["a"], history=[], best={}, readings=[])
    if is_first:
        checkpoint.history.extend([0.5, 0.25])
        checkpoint.best["weights"] = np.arange(3.0)
        checkpoint.readings.append({"x": (np.ones(2),)})
    path = checkpoint.save(tmp_path / "ckpt")
    checkpoint.restore(path).assert_consumed()
    assert checkpoint.history == [0.5, 0.25]
    assert checkpoint.best["weights"].tolist() == [0.0, 1.0, 2.0]
    assert checkpoint.readings[0]["x"][0].tolist() == [1.0, 1.0]


def test_names_that_are_one_as_text() -> None:
    for one, other in [(1, 2), ([], [5]), (1, [])]:
        with pytest.raises(ValueError, match=r"two checkpoint objects are called 'd/7'"):
            Checkpoint(d={7: one, "7": other})


@pytest.mark.min_ranks(2)
def test_ranks_that_no_strategy_joins_cannot_save_to_one_name(tmp_path: Path) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    with of_all_ranks(tmp_path) as folder:
        if world.rank == 0:
            Checkpoint(step=1).save(folder / "ckpt")
        world.Barrier()
        if world.rank == 1:
            with pytest.raises(
                FileExistsError, match=rf"process \d+ on host .* saves checkpoint {folder}.*on one rank"
            ):
                Checkpoint(step=1).save(folder / "ckpt")
            Checkpoint(step=1).save(folder / "of-rank-1")
        world.Barrier()
        # The writer itself may, and so may all ranks together.
        if world.rank == 0:
            Checkpoint(step=2).save(folder / "ckpt")
        with mpidist.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
            checkpoint = Checkpoint(step=3)
            path = checkpoint.save(folder / "ckpt")
            checkpoint.step = 0
            checkpoint.restore(path)
            assert checkpoint.step == 3
