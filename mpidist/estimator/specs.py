"""TrainSpec and EvalSpec: what train_and_evaluate trains and how it evaluates."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpidist.estimator.context import TrainContext
    from mpidist.estimator.results import EvalResult


@dataclass(frozen=True)
class TrainSpec:
    """What is trained (tf.estimator.TrainSpec).

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

    train_fn: Callable[[TrainContext], Any]
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
    """How checkpoints are evaluated (tf.estimator.EvalSpec).

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

    eval_fn: Callable[..., Mapping[str, Any]]
    steps: int | None = None
    throttle_secs: float = 30.0
    start_delay_secs: float = 0.0
    on_result: Callable[[EvalResult], Any] | None = None

    def __post_init__(self) -> None:
        check_function("eval_fn", self.eval_fn, "def evaluate(checkpoint_path): ...")
        if self.on_result is not None:
            check_function("on_result", self.on_result, "def on_result(result): ..., or None")
        _check_steps("steps", self.steps)
        for name in ("throttle_secs", "start_delay_secs"):
            seconds = getattr(self, name)
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
                raise ValueError(f"{name} is {seconds!r}; expected seconds, 0 or more")


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
