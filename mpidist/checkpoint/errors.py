"""What only checkpoints can suffer."""

from __future__ import annotations


class DamagedCheckpointError(ValueError):
    """A checkpoint is not what was written: truncated, altered, or with files missing; restore another one."""
