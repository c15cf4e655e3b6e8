"""TrainContext: what a train_fn is told of its rank and of what it is to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpidist.cluster_resolver import ClusterResolver
from mpidist.core.context import get_replica_context, has_strategy
from mpidist.estimator.results import EvalResult


@dataclass(frozen=True)
class TrainContext:
    """What ``train_fn`` is told.

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
    _evaluate: Callable[[], Any]

    def evaluate(self) -> EvalResult | None:
        """Have the newest checkpoint evaluated in between, where there is no evaluator to do that meanwhile.

        Call it on every rank, after a save. Without an evaluator the chief evaluates the newest checkpoint, if that is
        new and ``throttle_secs`` have passed; the others go on, and wait in their next collective. With an
        evaluator it does nothing.

        Returns:
            The result, on the rank that evaluated; otherwise None.

        Raises:
            RuntimeError: Called inside ``strategy.run``.
            Exception: What ``eval_fn`` raises.
        """
        if has_strategy() and get_replica_context() is not None:
            raise RuntimeError("context.evaluate() was called inside strategy.run(); call it outside, on every rank")
        result: EvalResult | None = self._evaluate()
        return result
