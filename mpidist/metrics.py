"""Metrics: public names only."""

from mpidist.training import Accuracy, Mean, Metric, Sum

__all__ = ["Accuracy", "Mean", "Metric", "Sum"]
