"""Training and evaluating side by side, by the roles of the ranks: ``mpidist.train_and_evaluate``."""

from mpidist.estimator.by_role import launch, train_and_evaluate
from mpidist.estimator.specs import EvalResult, EvalSpec, TrainContext, TrainSpec

__all__ = ["EvalResult", "EvalSpec", "TrainContext", "TrainSpec", "launch", "train_and_evaluate"]
