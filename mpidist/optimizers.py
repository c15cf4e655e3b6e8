"""Optimizers and gradient clipping: public names only."""

from mpidist.training.gradients import GradientAccumulator, aggregate_gradients, clip_by_global_norm
from mpidist.training.optimizer import Optimizer
from mpidist.training.update_rules import SGD, Adam, AdamW, RMSprop

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "GradientAccumulator",
    "Optimizer",
    "RMSprop",
    "aggregate_gradients",
    "clip_by_global_norm",
]
