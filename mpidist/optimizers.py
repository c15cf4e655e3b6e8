"""Optimizers and gradient clipping: public names only."""

from mpidist.training import (
    SGD,
    Adam,
    AdamW,
    GradientAccumulator,
    Optimizer,
    RMSprop,
    aggregate_gradients,
    clip_by_global_norm,
)

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
