"""A child process that reports, and ends this process, if it does not advance.

Only a process can: mpi4py holds Python's lock while MPI starts, so no thread of this process can run.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import warnings
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from mpidist.core.concurrency import POLL_SECONDS, Stopwatch

Output = tuple[str, str]
"""Texts for stdout and for stderr."""
NOTHING: Output = ("", "")


class Stage(NamedTuple):
    """An output at a time of a wait. After the output of the last stage, the process is killed."""

    seconds: float  # since the beginning of the wait
    output: Output


class Watchdog:
    """The child process. It watches nothing before :meth:`begin`.

    If the system allows no more children or descriptors, the process stays unwatched.
    """

    is_running = False
    """Whether this process has a watchdog."""

    def __init__(self) -> None:
        self._pipe: int | None = None
        with contextlib.suppress(OSError):
            reading, writing = os.pipe()
            try:
                _fork(reading, writing)
                self._pipe, Watchdog.is_running = writing, True
            finally:
                os.close(reading)
                if self._pipe is None:
                    os.close(writing)

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe, Watchdog.is_running = None, False

    def begin(self, stages: Sequence[Stage], ended: Output = NOTHING) -> None:
        """Watch another wait. If the process ends, or leaves the block, during the wait, print ``ended``."""
        if self._pipe is not None:
            message = json.dumps([stages, ended]).encode() + b"\n"
            with contextlib.suppress(BrokenPipeError):  # somebody killed the child
                while message:
                    message = message[os.write(self._pipe, message) :]


def _fork(reading: int, writing: int) -> None:
    watched = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns about threads, such as a BLAS's, and JAX about its own. The child does not use them.
        for category in (DeprecationWarning, RuntimeWarning):
            warnings.simplefilter("ignore", category)
        child = os.fork()
    if child:
        # Already reaped if the program ignores SIGCHLD.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
        return
    try:
        warnings.simplefilter("ignore")
        # A grandchild in its own process group, so that this process need not reap it, and a launcher that ends a rank
        # does not end its watchdog.
        if os.fork() == 0:
            os.setsid()
            os.close(writing)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(number, signal.SIG_IGN)
            _watch(reading, watched)
    finally:
        os._exit(0)


def _watch(reading: int, watched: int) -> NoReturn:
    orders = open(reading, "rb", buffering=0)  # noqa: SIM115 (until the end of this process)
    stages: list[Stage] = []
    ended = NOTHING
    stopwatch = Stopwatch()
    while True:
        left = stages[0].seconds - stopwatch.seconds if stages else POLL_SECONDS
        if left <= 0:
            _print(stages.pop(0).output)
            if not stages:
                os.kill(watched, signal.SIGKILL)
                os._exit(0)
        elif select.select([reading], [], [], min(left, POLL_SECONDS) if stages else None)[0]:
            line = orders.readline()
            if not line.endswith(b"\n"):
                _print(ended)
                os._exit(0)
            found, ended = json.loads(line)
            stages, stopwatch = [Stage(*each) for each in found], Stopwatch()


def _print(output: Output) -> None:
    for descriptor, text in zip((1, 2), output, strict=True):
        with contextlib.suppress(OSError):  # nobody reads it any more
            os.write(descriptor, text.encode())
