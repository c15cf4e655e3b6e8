"""Saving and restoring the state of a training run."""

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.naming import latest_checkpoint
from mpidist.checkpoint.status import LoadStatus

__all__ = ["Checkpoint", "LoadStatus", "latest_checkpoint"]
