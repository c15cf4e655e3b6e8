"""Warm ranks: jobs that stay and take one function after the other, so that a test does not wait for a start.

A test process keeps one job for each (ranks, ranks per node) that was asked for. Its ranks wait on a socket, outside of
MPI, and take no core meanwhile. A job is ended, and the next call starts another, as soon as its ranks may not be as
they were: a rank died, hung or failed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.support.ranks.jobs import (
    JOB,
    ROOT,
    MpirunTimeoutError,
    check_mark,
    child_environment,
    end_all,
    gets_second_chance,
    mpirun_command,
    reference_to,
    stacks_and_end,
)
from tests.support.ranks.outcomes import Outcome, RankError, results_of
from tests.support.speed import scaled

_RANK = Path(__file__).with_name("pool_rank.py")
_START_SECONDS, _LOOK_SECONDS = scaled(60.0), 0.2
# How long the other ranks of one that failed may take to fail, too, before they count as waiting for it.
_GRACE_SECONDS = scaled(3.0)
_LEAVE_SECONDS = scaled(10.0)


class WarmJob:
    """A job of ``ranks`` ranks that carry out calls.

    Args:
        ranks: How many.
        ranks_per_node: Lets them count as several virtual nodes of this many ranks.

    Raises:
        RankError: The ranks did not start.
    """

    def __init__(self, ranks: int, ranks_per_node: int | None) -> None:
        self._ranks = ranks
        self._folder = tempfile.TemporaryDirectory(prefix="mpidist-pool-")
        self._files = [open(Path(self._folder.name, name), "w+b") for name in ("stdout", "stderr")]  # noqa: SIM115
        self._name = uuid.uuid4().hex
        self._connections: dict[int, Connection] = {}
        with socket.socket(socket.AF_UNIX) as listener:
            address = str(Path(self._folder.name, "socket"))
            listener.bind(address)
            listener.listen(ranks)
            listener.settimeout(_LOOK_SECONDS)
            # They come out of a folder of their own: a test that changes its own, or loses it, is not theirs.
            self._process = subprocess.Popen(
                [*mpirun_command(), "-n", str(ranks), sys.executable, str(_RANK), address],
                cwd=ROOT,
                env=child_environment({JOB: f"{os.environ.get(JOB, '')}{self._name}."}, ranks_per_node),
                stdin=subprocess.DEVNULL,
                stdout=self._files[0],
                stderr=self._files[1],
                start_new_session=True,
            )
            try:
                self._accept_all(listener)
            except (TimeoutError, EOFError, ConnectionError) as error:
                printed = self.printed()
                self.end()
                raise RankError(f"{ranks} ranks did not start\n{printed}") from error

    def _accept_all(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while len(self._connections) < self._ranks:
            try:
                connection = Connection(listener.accept()[0].detach())
            except TimeoutError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise
            else:
                if not connection.poll(max(deadline - time.monotonic(), 0.0)):
                    raise TimeoutError("a rank has come and does not say which it is")
                self._connections[connection.recv()] = connection

    def call(self, task: tuple[Any, ...], timeout: float) -> dict[int, Outcome]:
        """Carry out ``task`` on every rank; the outcomes by rank, without those of ranks that died.

        Raises:
            MpirunTimeoutError: Ranks did not come back in time, with the stacks of all.
        """
        for file in self._files:
            file.seek(0)
            file.truncate()
        waiting = {connection: rank for rank, connection in self._connections.items()}
        for connection in list(waiting):
            try:
                connection.send(task)
            except ConnectionError:
                # It died since the last call; it is among those without a result.
                del waiting[connection]
        outcomes: dict[int, Outcome] = {}
        deadline, hangs = time.monotonic() + scaled(timeout), True
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                rank = waiting.pop(connection)  # type: ignore[index]
                with contextlib.suppress(EOFError, ConnectionError):
                    outcomes[rank] = connection.recv()  # type: ignore[union-attr]
                if (rank not in outcomes or outcomes[rank].error is not None) and hangs:
                    hangs, deadline = False, min(deadline, time.monotonic() + _GRACE_SECONDS)
        if waiting and hangs:
            stdout, stderr = self._stacks(sorted(waiting.values()), outcomes)
            raise MpirunTimeoutError(scaled(timeout), stdout, stderr)
        return outcomes

    def _stacks(self, late: list[int], there: Mapping[int, Outcome]) -> tuple[str, str]:
        """Have the ranks dump their stacks, which ends them, and return what the job printed."""
        test = os.environ.get("PYTEST_CURRENT_TEST", "a call")
        stacks_and_end(self._process, self._name)
        stdout, stderr = (self._read(file) for file in self._files)
        others = "".join(f"rank {rank} came back with {outcome.value!r}\n" for rank, outcome in sorted(there.items()))
        return stdout, f"{test}: rank {late} of {self._ranks} did not come back\n{others}{stderr}"

    def _read(self, file: Any) -> str:
        file.seek(0)
        return str(file.read().decode(errors="replace"))

    def printed(self) -> str:
        """Return what the ranks have printed since the last call."""
        stdout, stderr = (self._read(file) for file in self._files)
        return f"--- stdout ---\n{stdout}\n--- stderr ---\n{stderr}"

    def leave(self) -> None:
        """Let the ranks leave MPI in order; end them where they do not."""
        for connection in self._connections.values():
            connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_SECONDS)
        self.end()

    def end(self) -> None:
        """End the job, whatever its ranks are doing."""
        end_all(self._process, self._name)
        self._process.wait(_LEAVE_SECONDS)
        for connection in self._connections.values():
            connection.close()
        for file in self._files:
            file.close()
        self._folder.cleanup()


_jobs: dict[tuple[int, int | None], WarmJob] = {}


def run(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    ranks_per_node: int | None = None,
) -> list[Any]:
    """Call ``fn(*args)`` on warm ranks and return the results by rank.

    The ranks carry out one function after the other, so ``fn`` closes what it opens and changes nothing for good. What
    it leaves open, and what it puts into modules of mpidist, is an error.

    Args:
        fn: A module-level function, which the ranks import, or a local one without closure, whose source
            they get.
        ranks: How many.
        args: Anything that pickles; the same on all ranks.
        env: Environment variables to add during the call; MPI has started long before.
        timeout: Seconds until the ranks are killed.
        ranks_per_node: Lets the ranks count as several virtual nodes of this many ranks.

    Raises:
        Exception: What ``fn`` raised, of the lowest rank that failed by itself; the tracebacks of all failing
            ranks are its cause.
        RankError: A rank died without a result, or left something behind.
        MpirunTimeoutError: Ranks did not come back; their stacks are in ``stderr``.
    """
    check_mark()
    task = (pickle.dumps((reference_to(fn), args)), dict(env or {}))
    job = _jobs.pop((ranks, ranks_per_node), None) or _started(ranks, ranks_per_node)
    try:
        outcomes = job.call(task, timeout)
    except BaseException:
        # Such as the time limit of the test: its ranks may be anywhere.
        job.end()
        raise
    whole = len(outcomes) == ranks and all(outcome.error is None for outcome in outcomes.values())
    printed = "" if whole else job.printed()
    if whole and not any(outcome.left_behind for outcome in outcomes.values()):
        _jobs[ranks, ranks_per_node] = job
    else:
        job.end()
    return results_of(outcomes, ranks, printed)


def _started(ranks: int, ranks_per_node: int | None) -> WarmJob:
    try:
        return WarmJob(ranks, ranks_per_node)
    except RankError as error:
        if gets_second_chance(None, str(error), f"{ranks} warm ranks"):
            return WarmJob(ranks, ranks_per_node)
        raise


@atexit.register
def leave_all() -> None:
    """Let all warm jobs go."""
    while _jobs:
        _jobs.popitem()[1].leave()
