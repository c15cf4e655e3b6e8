"""Started by the chaos driver on each rank: examples/train.py, which notes each step in a file: FOLDER OPTIONS...

A line of FOLDER/RANK is ``time what step process``, the time of CLOCK_MONOTONIC, which all processes of a machine
share. A step is noted when it is done and, with --elastic, committed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

TRAIN = Path(__file__).resolve().parents[2] / "examples" / "train.py"


class Notes:
    """Where this rank notes what it has done; opened at once, so that it works without file descriptors, too."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, what: str, step: int) -> None:
        os.write(self._descriptor, f"{time.monotonic()} {what} {step} {os.getpid()}\n".encode())


def watched(kind: Any, notes: Notes) -> Any:
    """Return the class Training of the example with notes of its first step and of each step that is done."""

    class Watched(kind):  # type: ignore[misc]
        has_begun = False

        def train_step(self, *args: Any) -> Any:
            if not self.has_begun:
                self.has_begun = True
                notes.write("begins", self.progress["step"])
            return super().train_step(*args)

        def step_done(self, commits: Any) -> None:
            super().step_done(commits)
            notes.write("step", self.progress["step"])

    return Watched


def main() -> None:
    folder = Path(sys.argv[1])
    spec = importlib.util.spec_from_file_location("train", TRAIN)
    assert spec is not None
    assert spec.loader is not None
    train: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    from mpi4py import MPI  # after mpidist, which the training imports first

    notes = Notes(folder / str(MPI.COMM_WORLD.rank))
    notes.write("starts", 0)
    train.Training = watched(train.Training, notes)
    sys.argv = [str(TRAIN), *sys.argv[2:]]
    train.main()


if __name__ == "__main__":
    main()
