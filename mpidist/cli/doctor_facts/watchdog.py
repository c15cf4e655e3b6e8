"""A watchdog process: it reports when MPI blocks for ever, or ends this process.

It is another process because mpi4py keeps the interpreter's lock while MPI starts, so that no thread could act.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

# Reads stages, one line each: how long it may take, and what to write on stdout and stderr if it takes longer, or if
# the process ends. Slurm sends SIGTERM to all processes of a job that it ends; this one ends with its process anyway.
_WATCHER = """
import json, os, select, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
pid, stage = int(sys.argv[1]), json.loads(sys.argv[2])
stages = open(0, "rb", buffering=0)
def say(texts):
    for number, text in zip((1, 2), texts):
        os.write(number, text.encode())
while True:
    if not select.select([0], [], [], stage["seconds"])[0]:
        say(stage["slow"])
        os.kill(pid, signal.SIGKILL)
        break
    line = stages.readline()
    if not line:
        say(stage["ended"])
        break
    stage = json.loads(line)
"""
_Texts = tuple[str, str]
_NOTHING: _Texts = ("", "")


class Ending(NamedTuple):
    """The reason of this process's early end, and the command to type then."""

    text: str
    command: str


class Watchdog:
    """A process that ends this one if a stage takes too long. To be made before MPI starts.

    Args:
        document: Makes the document of which this process owes one on stdout, of an end before :meth:`reports`; None
            where it owes none.
    """

    def __init__(self, document: Callable[[Ending], str] | None = None) -> None:
        self._document = document
        command = [sys.executable, "-I", "-S", "-c", _WATCHER, str(os.getpid()), json.dumps(self._unwatched())]
        # A launcher that ends a rank ends its whole group.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, *_: object) -> None:
        self.idle()
        self._process.communicate()

    def stage(self, seconds: float, slow: Ending, ended: Ending | None = None) -> None:
        """Begin a stage.

        Args:
            seconds: How long until :meth:`idle` or the next stage.
            slow: The text for stderr if it takes longer; then this process is killed.
            ended: The text if this process ends before.
        """
        unwatched = self._unwatched()
        ends = unwatched["ended"] if ended is None else self._texts(ended)
        self._tell({**unwatched, "seconds": seconds, "slow": self._texts(slow), "ended": ends})

    def idle(self) -> None:
        """Watch nothing."""
        self._tell(self._unwatched())

    def reports(self) -> None:
        """Stop the watch: this process is about to print its document."""
        self._document = None
        self.idle()

    def _unwatched(self) -> dict[str, object]:
        end = Ending(
            "the process of rank 0 was ended before it could report; what ended it may stand on stderr",
            "python -m mpidist doctor   # on one process of each host, then on two hosts at a time",
        )
        document = self._texts(end)[0]
        return {"seconds": None, "slow": _NOTHING, "ended": (document, "")}

    def _texts(self, ending: Ending) -> _Texts:
        """Return the texts for stdout and stderr."""
        document = "" if self._document is None else f"{self._document(ending)}\n"
        return document, f"mpidist doctor: {ending.text}. Type: {ending.command}\n"

    def _tell(self, stage: dict[str, object]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(stage).encode() + b"\n")
        self._process.stdin.flush()
