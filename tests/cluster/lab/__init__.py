"""A real Slurm cluster of several virtual hosts on one machine; see README.md beside this file."""

from tests.cluster.lab.lab import Lab, LabError
from tests.cluster.lab.requirements import missing
from tests.cluster.lab.settings import Settings

__all__ = ["Lab", "LabError", "Settings", "missing"]
