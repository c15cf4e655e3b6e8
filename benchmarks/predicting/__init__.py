"""Predictions: how long reductions and training steps take on a cluster, and schedules of them for SimGrid."""
