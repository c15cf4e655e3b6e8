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
        train_fn: Called with a TrainContext on every rank that trains. It makes strategy, variables and dataset,
            restores the newest checkpoint if it is to go on from it, trains, and saves checkpoints to
            ``context.checkpoint_dir``, by a CheckpointManager most often.
        checkpoint_dir: Where ``train_fn`` saves and ``eval_fn`` finds checkpoints; all ranks see it, and it is the same
            on all.
        max_steps: ``context.max_steps``, for ``train_fn`` to end at; None where it ends by itself.
        train_jobs: The jobs whose ranks call ``train_fn``. With a coordinator ``("chief",)``: then the workers serve.
            Extension.

    Raises:
        TypeError: ``train_fn`` is no function, or ``checkpoint_dir`` no path.
        ValueError: ``max_steps`` below 1, or other jobs than chief and worker.

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
        eval_fn: Called with the path of a checkpoint on one rank alone: it restores it (``Checkpoint.restore``) and
            returns metrics by name: numbers, strings, None, arrays, and lists and dicts of them. It must not call
            collectives of the ranks that train; outside of any strategy it has none.
        steps: How many batches to evaluate: given to ``eval_fn`` as ``steps=``. With None it gets the path alone.
        throttle_secs: Seconds from the beginning of one evaluation to that of the next, at least. The final checkpoint
            does not wait for that.
        start_delay_secs: Seconds from the beginning of the training to that of the first evaluation, at least.
        on_result: Called with the EvalResult of each evaluation, where it took place.

    Raises:
        TypeError: Something is no function.
        ValueError: ``steps`` below 1, or seconds below 0.

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
        checkpoint_dir: Where to save checkpoints, as an absolute path.
        max_steps: When to end; None where the training ends by itself.
        cluster_resolver: Who is who: ``mpidist.MultiWorkerMirroredStrategy(context.cluster_resolver)``.
        task_type: The job of this rank, ``"chief"`` or ``"worker"``.
        task_id: Its index there.
        is_chief: Whether it is the one that prints.
    """

    checkpoint_dir: str
    max_steps: int | None
    cluster_resolver: ClusterResolver
    task_type: str
    task_id: int
    is_chief: bool
    _evaluate: Callable[[], EvalResult | None]

    def evaluate(self) -> EvalResult | None:
        """Evaluate the newest checkpoint in between, where no evaluator does.

        Call it on every rank, after a save. Without an evaluator the chief evaluates the newest checkpoint, if that is
        new and ``throttle_secs`` have passed; the others go on, and wait in their next collective. With an
        evaluator it does nothing.

        Returns:
            The result, on the rank that evaluated; otherwise None.

        Raises:
            RuntimeError: Called inside ``strategy.run``.
            Exception: That of ``eval_fn``.
        """
        if has_strategy() and get_replica_context() is not None:
            raise RuntimeError("context.evaluate() was called inside strategy.run(); call it outside, on every rank")
        return self._evaluate()


@dataclass(frozen=True)
class EvalResult:
    """The result of one evaluation.

    Args:
        checkpoint: The path of the checkpoint.
        metrics: The result of ``eval_fn``, in types that JSON has.
        saved_at: When the checkpoint was written, in seconds of the epoch.
        seconds: How long the evaluation took.

    >>> EvalResult("out/ckpt-3", {"loss": 0.5}, 1700000000.0, 1.25).to_json()
    '{"checkpoint": "out/ckpt-3", "metrics": {"loss": 0.5}, "saved_at": 1700000000.0, "seconds": 1.25}'
    """

    checkpoint: str
    metrics: dict[str, Any]
    saved_at: float
    seconds: float

    def to_json(self) -> str:
        """Return it as one line.

        NaN and infinities, which JSON does not have, are "NaN", "Infinity", "-Infinity".
        """
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
    """Raise ValueError unless ``value`` names jobs whose ranks can run a program."""
    if isinstance(value, str) or not value or not {"chief", "worker"}.issuperset(value):
        raise ValueError(f"{name} is {value!r}; expected ('chief', 'worker') or one of the two, such as ('chief',)")


def _check_steps(name: str, value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name} is {value!r}; expected a whole number of 1 or more, or None")
