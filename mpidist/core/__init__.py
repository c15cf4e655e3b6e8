"""Ground floor: enums, errors, nests, devices, settings, the context stack; no MPI, no arrays."""

import sys

# This is the first module that `import mpidist` runs. Later ones import fcntl, which Windows lacks.
if sys.platform == "win32":
    raise ImportError("mpidist needs Linux or macOS. On Windows, use WSL2.")
