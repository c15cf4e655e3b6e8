"""The arguments of train_and_evaluate, and those of its functions."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpidist.cluster_resolver import ClusterResolver
from mpidist.core.context import get_replica_context, has_strategy


@dataclass(frozen=True)
class TrainSpec:
    """The training (tf.estimator.TrainSpec).

    Args:
        train_fn: Function of a TrainContext that every training rank calls. It creates strategy, variables and dataset,
            restores the newest checkpoint if wanted, trains, and saves checkpoints to ``context.checkpoint_dir``,
            usually by a CheckpointManager.
        checkpoint_dir: Directory of the checkpoints, which all ranks share. It must be the same on all ranks.
        max_steps: Value of ``context.max_steps``, the last step. None if ``train_fn`` decides.
        train_jobs: Jobs whose ranks call ``train_fn``. With a coordinator use ``("chief",)``, so that the workers
            serve. Extension.

    Raises:
        TypeError: ``train_fn`` is no function, or ``checkpoint_dir`` no path.
        ValueError: ``max_steps`` is below 1, or ``train_jobs`` has other jobs than chief and worker.

    >>> TrainSpec(lambda context: None, "out", max_steps=100).max_steps
    100
    """

    train_fn: Callable[[TrainContext], object]
    checkpoint_dir: str | os.PathLike[str]
    max_steps: int | None = None
    train_jobs: Sequence[str] = ("chief", "worker")

    def __post_init__(self) -> None:
        check_function("train_fn", self.train_fn, "def train(context): ...")
        if not isinstance(self.checkpoint_dir, str | os.PathLike) or not os.fspath(self.checkpoint_dir):
            raise TypeError(f"checkpoint_dir is {self.checkpoint_dir!r}; expected the path of a directory: 'out'")
        _check_steps("max_steps", self.max_steps)
        check_train_jobs("train_jobs", self.train_jobs)


@dataclass(frozen=True)
class EvalSpec:
    """The evaluation of checkpoints (tf.estimator.EvalSpec).

    Args:
        eval_fn: Function of the path of a checkpoint that one rank calls. It restores the checkpoint
            (``Checkpoint.restore``) and returns metrics by name: numbers, strings, None, arrays, and lists and dicts of
            them. It must not call collectives of the training ranks, and runs outside of any strategy.
        steps: Number of batches to evaluate, passed to ``eval_fn`` as ``steps=``. With None it gets the path alone.
        throttle_secs: Least seconds between the starts of two evaluations. The final checkpoint does not wait.
        start_delay_secs: Least seconds before the first evaluation.
        on_result: Function of the EvalResult of each evaluation, called on the rank that evaluated.

    Raises:
        TypeError: ``eval_fn`` or ``on_result`` is no function.
        ValueError: ``steps`` is below 1, or seconds are below 0.

    >>> EvalSpec(lambda path: {"loss": 0.5}).throttle_secs
    30.0
    """

    eval_fn: Callable[..., Mapping[str, object]]
    steps: int | None = None
    throttle_secs: float = 30.0
    start_delay_secs: float = 0.0
    on_result: Callable[[EvalResult], object] | None = None

    def __post_init__(self) -> None:
        check_function("eval_fn", self.eval_fn, "def evaluate(checkpoint_path): ...")
        if self.on_result is not None:
            check_function("on_result", self.on_result, "def on_result(result): ..., or None")
        _check_steps("steps", self.steps)
        for name in ("throttle_secs", "start_delay_secs"):
            seconds = getattr(self, name)
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
                raise ValueError(f"{name} is {seconds!r}; expected seconds, 0 or more")


@dataclass(frozen=True)
class TrainContext:
    """The argument of ``train_fn``.

    Attributes:
        checkpoint_dir: Absolute path of the directory for checkpoints.
        max_steps: The last step, or None.
        cluster_resolver: Resolver of the training ranks, for
            ``mpidist.MultiWorkerMirroredStrategy(context.cluster_resolver)``.
        task_type: The job of this rank, ``"chief"`` or ``"worker"``.
        task_id: Its index in the job.
        is_chief: Whether this rank should print.
    """

    checkpoint_dir: str
    max_steps: int | None
    cluster_resolver: ClusterResolver
    task_type: str
    task_id: int
    is_chief: bool
    _evaluate: Callable[[], EvalResult | None]

    def evaluate(self) -> EvalResult | None:
        """Evaluate the newest checkpoint during the training, if there is no evaluator.

        Call it on every rank, after a save. Without an evaluator the chief evaluates the newest checkpoint, if it is
        new and ``throttle_secs`` have passed. The others continue, and wait in their next collective. With an evaluator
        it does nothing.

        Returns:
            The result on the rank that evaluated, None on others.

        Raises:
            RuntimeError: The call is inside ``strategy.run``.
            Exception: The error of ``eval_fn``.
        """
        if has_strategy() and get_replica_context() is not None:
            raise RuntimeError("context.evaluate() was called inside strategy.run(); call it outside, on every rank")
        return self._evaluate()


@dataclass(frozen=True)
class EvalResult:
    """The result of one evaluation.

    Args:
        checkpoint: The path of the checkpoint.
        metrics: The result of ``eval_fn``, in JSON types.
        saved_at: Time of the save, in seconds of the epoch.
        seconds: Duration of the evaluation.

    >>> EvalResult("out/ckpt-3", {"loss": 0.5}, 1700000000.0, 1.25).to_json()
    '{"checkpoint": "out/ckpt-3", "metrics": {"loss": 0.5}, "saved_at": 1700000000.0, "seconds": 1.25}'
    """

    checkpoint: str
    metrics: dict[str, Any]
    saved_at: float
    seconds: float

    def to_json(self) -> str:
        """Return one line of JSON, in which NaN and infinities are "NaN", "Infinity" and "-Infinity"."""
        return json.dumps({**self.__dict__, "metrics": _without_nan(self.metrics)}, allow_nan=False)


def _without_nan(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def check_function(name: str, value: object, expected: str) -> None:
    """Raise TypeError unless ``value`` is a function."""
    if not callable(value):
        raise TypeError(f"{name} is {value!r} of type {type(value).__name__}; expected a function: {expected}")


def check_train_jobs(name: str, value: Sequence[str]) -> None:
    """Raise ValueError unless the ranks of the jobs can run a program."""
    if isinstance(value, str) or not value or not {"chief", "worker"}.issuperset(value):
        raise ValueError(f"{name} is {value!r}; expected ('chief', 'worker') or one of the two, such as ('chief',)")


def _check_steps(name: str, value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name} is {value!r}; expected a whole number of 1 or more, or None")
