"""Parts of a training loop beside the strategy: losses, optimizers, metrics, random numbers."""

from mpidist.training.gradients import GradientAccumulator, aggregate_gradients, clip_by_global_norm
from mpidist.training.losses import compute_average_loss, global_count, scale_regularization_loss
from mpidist.training.metrics import Accuracy, Mean, Metric, SparseCategoricalAccuracy, Sum
from mpidist.training.optimizer import SGD, Adam, AdamW, Optimizer, RMSprop
from mpidist.training.random import common_rng, replica_rng, set_seed

__all__ = [
    "SGD",
    "Accuracy",
    "Adam",
    "AdamW",
    "GradientAccumulator",
    "Mean",
    "Metric",
    "Optimizer",
    "RMSprop",
    "SparseCategoricalAccuracy",
    "Sum",
    "aggregate_gradients",
    "clip_by_global_norm",
    "common_rng",
    "compute_average_loss",
    "global_count",
    "replica_rng",
    "scale_regularization_loss",
    "set_seed",
]
