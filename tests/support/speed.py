"""How slow the machine is, and deadlines that grow with it.

``python -m tests.checks`` measures the machine once and passes the factor to all tests by an environment variable.
Without the variable, deadlines are those of the reference machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

VARIABLE = "TESTS_SUPPORT_SLOWNESS"
# Importing NumPy reads files, and the loop computes. Two processes, because most parts keep two cores busy.
_WORK, _PROCESSES = "import numpy\nfor _ in range(6_000_000):\n    pass\n", 2
# What the work takes on two idle cores of an Intel Xeon virtual machine.
_REFERENCE_SECONDS = 0.4
_MOST = 10.0


def measure() -> float:
    """Return how many times as long as the reference machine this machine takes, from 1 to 10."""
    # The first time, files may have to be read from the disk.
    return min(max(1.0, min(_seconds() for _ in range(3)) / _REFERENCE_SECONDS), _MOST)


def _seconds() -> float:
    began = time.monotonic()
    running = [subprocess.Popen([sys.executable, "-c", _WORK]) for _ in range(_PROCESSES)]
    for process in running:
        process.wait()
    return time.monotonic() - began


def slowness() -> float:
    """Return the factor that was measured for this run."""
    return float(os.environ.get(VARIABLE, "1"))


def scaled(seconds: float) -> float:
    """Return a deadline of the reference machine for this machine."""
    return seconds * slowness()


def deadlines(timeout: float, warn_after: float | None = None) -> dict[str, str]:
    """Return a job's environment variables: a scaled deadline, which covers the start of MPI, and when to warn."""
    found = {"MPIDIST_TIMEOUT": f"{scaled(timeout):g}"}
    return found if warn_after is None else {**found, "MPIDIST_WARN_AFTER": f"{warn_after:g}"}
