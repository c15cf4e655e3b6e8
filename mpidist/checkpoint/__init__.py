"""Saving and restoring the state of a training run."""

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.format_rules import DamagedCheckpointError
from mpidist.checkpoint.manager import CheckpointManager
from mpidist.checkpoint.status import LoadStatus
from mpidist.checkpoint.storage import latest_checkpoint
from mpidist.checkpoint.worker_paths import (
    remove_temp_dir_with_filepath,
    remove_temp_dirpath,
    write_dirpath,
    write_filepath,
)

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
