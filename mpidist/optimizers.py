"""Optimizers and what prepares gradients for them: public names only."""

from mpidist.training import (
    SGD,
    Adam,
    GradientAccumulator,
    Optimizer,
    aggregate_gradients,
    clip_by_global_norm,
)

__all__ = ["SGD", "Adam", "GradientAccumulator", "Optimizer", "aggregate_gradients", "clip_by_global_norm"]
