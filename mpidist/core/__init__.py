"""Errors, options, nests, settings, texts and the current strategy. No MPI, no arrays."""

import sys

# setup.cfg reads it without importing this file.
__version__ = "0.1.0"

# `import mpidist` runs this module first. Later modules import fcntl, which Windows lacks.
if sys.platform == "win32":
    raise ImportError("mpidist needs Linux or macOS. On Windows, use WSL2.")
