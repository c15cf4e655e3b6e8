"""Metrics: public names only."""

from mpidist.training.metrics import Accuracy, Mean, Metric, SparseCategoricalAccuracy, Sum

__all__ = ["Accuracy", "Mean", "Metric", "SparseCategoricalAccuracy", "Sum"]
