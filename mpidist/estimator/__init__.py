"""Training and evaluating side by side, by the roles of the ranks: ``mpidist.train_and_evaluate``."""

from mpidist.estimator.launch import launch
from mpidist.estimator.specs import EvalResult, EvalSpec, TrainContext, TrainSpec
from mpidist.estimator.train_and_evaluate import train_and_evaluate

__all__ = ["EvalResult", "EvalSpec", "TrainContext", "TrainSpec", "launch", "train_and_evaluate"]
