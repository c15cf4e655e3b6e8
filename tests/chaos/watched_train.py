"""Started by the chaos driver on each rank: examples/train.py, which notes each step in a file: FOLDER OPTIONS...

A line of FOLDER/RANK is ``time what step process``, the time of CLOCK_MONOTONIC, which all processes of a machine
share. The example tells its progress bar of each step that is done (and, with --elastic, committed).
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

TRAIN = Path(__file__).resolve().parents[2] / "examples" / "train.py"


class Notes:
    """Where this rank notes what it has done; opened at once, so that it works without file descriptors, too."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, what: str, step: int) -> None:
        os.write(self._descriptor, f"{time.monotonic()} {what} {step} {os.getpid()}\n".encode())


class Bar:
    """What stands for tqdm in the example."""

    notes: Notes

    def __init__(self, *, total: int, initial: int, unit: str, disable: bool) -> None:
        self._step = initial
        self.notes.write("begins", initial)

    def update(self) -> None:
        self._step += 1
        self.notes.write("step", self._step)

    def write(self, text: str, file: TextIO) -> None:
        print(text, file=file, flush=True)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.notes.write("ends", self._step)


def main() -> None:
    folder = Path(sys.argv[1])
    spec = importlib.util.spec_from_file_location("train", TRAIN)
    assert spec is not None
    assert spec.loader is not None
    train: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    from mpi4py import MPI  # after mpidist, which the training imports first

    Bar.notes = Notes(folder / str(MPI.COMM_WORLD.rank))
    Bar.notes.write("starts", 0)
    train.tqdm = Bar
    sys.argv = [str(TRAIN), *sys.argv[2:]]
    train.main()


if __name__ == "__main__":
    main()
