"""Which checkpoints are evaluated when, and what happens to those that vanish meanwhile."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.estimator import EvalSpec, evaluations
from mpidist.estimator.evaluations import FILE, Evaluations

# Its directories are those of one process.
pytestmark = pytest.mark.one_rank

Evaluate = Callable[[str], dict[str, Any]]


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluations, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(evaluations, "_MOST_OF_THE_TIME", float("inf"))


class Training:
    """Saves checkpoints of a step."""

    def __init__(self, directory: Path, max_to_keep: int | None = None) -> None:
        self.checkpoint = mpidist.Checkpoint(step=0, weights=np.zeros(1000))
        self.manager = mpidist.CheckpointManager(self.checkpoint, directory, max_to_keep)

    def save(self) -> Path:
        self.checkpoint.step += 1
        path = self.manager.save()
        assert path is not None
        return Path(path)


def read(path: str) -> dict[str, Any]:
    checkpoint = mpidist.Checkpoint(step=0, weights=np.zeros(1000))
    checkpoint.restore(path).assert_consumed()
    return {"step": checkpoint.step}


def steps_of(found: Evaluations) -> list[int]:
    return [result.metrics["step"] for result in found.results]


def test_each_newest_checkpoint_once(tmp_path: Path) -> None:
    seen = []
    found = Evaluations(EvalSpec(read, throttle_secs=0, on_result=seen.append), tmp_path)
    assert found.evaluate_if_due() is None
    training = Training(tmp_path)
    for _ in range(3):
        training.save()
    result = found.evaluate_if_due()
    assert result is not None
    assert result.checkpoint == str(tmp_path / "ckpt-3")
    assert found.evaluate_if_due() is None
    training.save()
    found.evaluate_if_due()
    found.evaluate_last(("ckpt-4", 4))
    assert steps_of(found) == [3, 4]
    assert seen == found.results
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [line["metrics"] for line in lines] == [{"step": 3}, {"step": 4}]


def test_steps_are_handed_on(tmp_path: Path) -> None:
    Training(tmp_path).save()
    found = Evaluations(EvalSpec(lambda _, steps: {"step": steps}, steps=7), tmp_path)
    found.evaluate_last(None)
    assert steps_of(found) == [7]


def test_no_strategy_is_active_where_it_evaluates(tmp_path: Path) -> None:
    Training(tmp_path).save()
    found = Evaluations(EvalSpec(lambda _: {"step": mpidist.has_strategy()}), tmp_path)
    with mpidist.OneDeviceStrategy("cpu:0").scope():
        found.evaluate_last(None)
    assert steps_of(found) == [False]


def test_throttle_and_delay_hold_back_all_but_the_last(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.save()
    slow = Evaluations(EvalSpec(read, throttle_secs=3600), tmp_path)
    late = Evaluations(EvalSpec(read, start_delay_secs=3600), tmp_path)
    assert slow.evaluate_if_due() is not None
    training.save()
    for found, expected in ((slow, [1, 2]), (late, [2])):
        assert found.evaluate_if_due() is None
        found.evaluate_last(None)
        assert steps_of(found) == expected


def vanishing(vanish: Callable[[str], object], evaluate: Evaluate = read) -> Evaluate:
    """Return an evaluation whose first checkpoint vanishes before it is read."""
    calls = []

    def fn(path: str) -> dict[str, Any]:
        calls.append(path)
        if len(calls) == 1:
            vanish(path)
        return evaluate(path)

    return fn


def test_a_checkpoint_that_retention_removes_is_given_up_for_the_next_newest(tmp_path: Path) -> None:
    training = Training(tmp_path, max_to_keep=1)
    training.save()
    # A throttle does not count: there was no evaluation.
    spec = EvalSpec(vanishing(lambda _: training.save()), throttle_secs=3600)
    found = Evaluations(spec, tmp_path)
    assert found.evaluate_if_due() is None
    assert found.evaluate_if_due() is not None
    assert steps_of(found) == [2]


def test_so_it_is_at_the_end(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.save()
    training.save()
    found = Evaluations(EvalSpec(vanishing(shutil.rmtree)), tmp_path)
    found.evaluate_last(None)
    assert steps_of(found) == [1]


def test_data_that_vanish_alone_while_they_are_read(tmp_path: Path) -> None:
    """Removal renames the directory first; its data may be gone when the manifest has been read."""
    training = Training(tmp_path)
    training.save()

    def damaged(path: str) -> dict[str, Any]:
        Path(path, "data.safetensors").unlink()
        try:
            return read(path)
        finally:
            shutil.rmtree(path)
            training.save()

    calls: list[Evaluate] = [damaged, read]
    found = Evaluations(EvalSpec(lambda path: calls.pop(0)(path)), tmp_path)
    found.evaluate_last(None)
    assert steps_of(found) == [2]


def test_one_that_is_replaced_under_its_name_is_a_new_one(tmp_path: Path) -> None:
    checkpoint = mpidist.Checkpoint(step=1, weights=np.zeros(1000))
    path = tmp_path / "best"
    checkpoint.write(path)
    found = Evaluations(EvalSpec(read, throttle_secs=0), tmp_path)
    assert found.evaluate_if_due() is not None
    checkpoint.step = 2
    checkpoint.write(path)
    assert found.evaluate_if_due() is not None
    assert steps_of(found) == [1, 2]


@pytest.mark.parametrize("error", [FileNotFoundError("no test data"), ZeroDivisionError("division by zero")])
def test_other_errors_go_through(error: Exception, tmp_path: Path) -> None:
    Training(tmp_path).save()

    def fail(_: str) -> dict[str, Any]:
        raise error

    with pytest.raises(type(error), match=str(error)):
        Evaluations(EvalSpec(fail), tmp_path).evaluate_if_due()


def test_a_damaged_checkpoint_that_stays_is_an_error(tmp_path: Path) -> None:
    data = Training(tmp_path).save() / "data.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    with pytest.raises(mpidist.checkpoint.DamagedCheckpointError):
        Evaluations(EvalSpec(read), tmp_path).evaluate_last(None)


def test_one_that_was_cut_off_is_passed_over_and_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(tmp_path)
    training.save()
    cut = training.save() / "data.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    found = Evaluations(EvalSpec(read, throttle_secs=0), tmp_path)
    found.evaluate_if_due()
    found.evaluate_last(None)
    assert steps_of(found) == [1]
    assert [record.message.split(":")[1] for record in caplog.records] == [f" checkpoint {cut.parent} is not evaluated"]


def test_a_training_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint in .* to evaluate; expected train_fn to save"):
        Evaluations(EvalSpec(read), tmp_path).evaluate_last(None)


def test_a_directory_that_is_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MPIDIST_TIMEOUT", "0.3")
    monkeypatch.setenv("MPIDIST_WARN_AFTER", "0.1")
    Training(tmp_path).save()
    said = r"ckpt-2, which the chief saved last, is not seen on host .*; expected a checkpoint_dir that all nodes share"
    with pytest.raises(FileNotFoundError, match=said):
        Evaluations(EvalSpec(read), tmp_path).evaluate_last(("ckpt-2", 2))
    assert capsys.readouterr().err.count("s to see") == 1


def test_a_first_checkpoint_that_does_not_come_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MPIDIST_WARN_AFTER", "0.01")
    found = Evaluations(EvalSpec(read), tmp_path)
    said = ""
    while "for a first checkpoint in" not in said:
        found.evaluate_if_due()
        said += capsys.readouterr().err
    found.evaluate_if_due()
    assert capsys.readouterr().err == ""
