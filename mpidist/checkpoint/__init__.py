"""Saving and restoring the state of a training run."""

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.directory import (
    latest_checkpoint,
    remove_temp_dir_with_filepath,
    remove_temp_dirpath,
    write_dirpath,
    write_filepath,
)
from mpidist.checkpoint.format import DamagedCheckpointError
from mpidist.checkpoint.manager import CheckpointManager
from mpidist.checkpoint.restoring import LoadStatus

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "DamagedCheckpointError",
    "LoadStatus",
    "latest_checkpoint",
    "remove_temp_dir_with_filepath",
    "remove_temp_dirpath",
    "write_dirpath",
    "write_filepath",
]
