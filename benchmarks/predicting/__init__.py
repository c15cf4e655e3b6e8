"""Predictions: how long reductions and training steps take on a cluster, and schedules for SimGrid to hold them against."""
