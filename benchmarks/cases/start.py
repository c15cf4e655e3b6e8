"""How long `import mpidist` takes in a fresh process, and what it brings along."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mpidist
from benchmarks.measuring.rows import Figure
from benchmarks.measuring.session import Session
from benchmarks.measuring.timing import LEAST_REPETITIONS

_PROGRAM = """
import sys, time
start = time.perf_counter()
import mpidist
print(time.perf_counter() - start, int("cupy" in sys.modules))
"""


def run(session: Session, advance: Callable[[str], None]) -> None:
    """Measure on rank 0, while the others wait (collective)."""
    advance("start")
    found = _imports() if session.rank == 0 else None
    seconds, cupy = session.bare.bcast(found)
    session.figures.append(Figure("start", "import", seconds, "s"))
    session.figures.append(Figure("start", "cupy_imported", cupy, ""))


def _imports() -> tuple[float, float]:
    """Return the median of the seconds, and 1 if CuPy was imported, else 0."""
    times, cupy = [], 0.0
    for _ in range(LEAST_REPETITIONS):
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            cwd=Path(mpidist.__file__).parents[1],
            capture_output=True,
            text=True,
            check=True,
        )
        seconds, imported = done.stdout.split()
        times.append(float(seconds))
        cupy = max(cupy, float(imported))
    return statistics.median(times), cupy
