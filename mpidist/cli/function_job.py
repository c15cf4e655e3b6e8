"""``mpidist.launch_processes``: calls a function on the ranks of a new job."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

from mpidist.cli.doctor.machine import count_hosts_of_job
from mpidist.cli.launch import command_for_ranks
from mpidist.core.concurrency import start_daemon
from mpidist.core.errors import PeerError
from mpidist.core.text import numbered_ranks, pip_install
from mpidist.parameter_server.pickling import HAS_CLOUDPICKLE, PickledError, pack, unpack

Result = TypeVar("Result")
CALL = "call.pickle"
_PATH = "path.pickle"
# The ranks import what this process can, mpidist too. By PYTHONPATH it would reach other Pythons that they start.
_START = (
    f"import pathlib, pickle, sys; sys.path[:] = pickle.loads(pathlib.Path(sys.argv[1], '{_PATH}').read_bytes()); "
    "from mpidist.cli.function_rank import main; sys.exit(main(sys.argv[1]))"
)
_NAP_SECONDS = 0.05
# How long other ranks may take to come to their end, or to an error of their own, once one has failed.
_GRACE_SECONDS = 3.0
_END_SECONDS = 3.0
_LAST_LINES = 20


def launch_processes(
    fn: Callable[..., Result],
    n: int,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    deadline: float | None = None,
) -> list[Result]:
    """Call a function on the ranks of a new job, and return its results.

    The ranks are new processes of this Python on this machine, started as ``python -m mpidist launch -n N`` starts
    them; MPI is not started in this process. Their output appears in this process's, as it comes. Functions of a
    notebook or a script need cloudpickle (``pip install cloudpickle``); without it ``fn`` is one of a
    module that can be imported.

    Args:
        fn: The function. Of variables around it each rank gets a copy.
        n: How many ranks.
        args: Its arguments, the same on each rank; anything that can be pickled.
        kwargs: Its keyword arguments, likewise.
        deadline: Seconds until the job is ended; as long as it takes by default.

    Returns:
        The results, in the order of the ranks.

    Raises:
        ValueError: ``n`` or ``deadline`` is out of range, or this process is itself a rank, or in a batch job of
            several hosts.
        TypeError: The function, an argument or a result cannot be sent.
        LaunchError: There is no MPI library, or no mpirun that belongs to it.
        TimeoutError: The job was not done by the deadline, and was ended.
        RuntimeError: A rank ended without a result, as one that was killed.
        OSError: The output of the ranks could not be written to this process's.
        Exception: The error of a rank; its cause has the rank and its traceback. The others have been ended.

    >>> import mpidist
    >>> mpidist.launch_processes(max, 2, ([3, 4],))  # doctest: +SKIP
    [4, 4]
    """
    if not callable(fn):
        raise TypeError(f"fn is {fn!r}; expected a function, as in mpidist.launch_processes(train, 2)")
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"n is {n!r}; expected a whole number of ranks of at least 1")
    if deadline is not None and not deadline > 0:
        raise ValueError(f"deadline is {deadline!r}; expected seconds, more than 0, or None")
    if not HAS_CLOUDPICKLE and getattr(fn, "__module__", None) == "__main__":
        raise TypeError(
            f"fn {fn!r} is a function of this notebook or script, which the ranks cannot import. Expected: a function "
            f"of a module, or cloudpickle; type: {pip_install('coordinator')}"
        )
    call = pack((fn, tuple(args), dict(kwargs or {})), lambda _: None, "the function with its arguments")
    with tempfile.TemporaryDirectory(prefix="mpidist-launch-") as folder:
        Path(folder, CALL).write_bytes(call)
        Path(folder, _PATH).write_bytes(pickle.dumps(sys.path))
        job = _Job(Path(folder), n)
        with job.running() as process:
            job.wait(process, deadline)
        return job.results(process.returncode)


def path_of_outcome(folder: Path, rank: int) -> Path:
    """Return the file for the result of a rank, or its error."""
    return folder / f"{rank}.pickle"


class _Job:
    """The ranks of one call.

    Args:
        folder: With the call and the places of modules, and later the outcomes.
        n: How many ranks.
    """

    def __init__(self, folder: Path, n: int) -> None:
        self._folder, self._n = folder, n
        # Guards the lines: a reader that is not done in time goes on while they are read.
        self._lock = threading.Lock()
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._unwritten: Exception | None = None
        self._outcomes: dict[int, bytes | PickledError] = {}

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[str]]:
        """Start the ranks; at the end of the block, none is left."""
        program = [sys.executable, "-c", _START, str(self._folder)]
        variables, command = command_for_ranks(["-n", str(self._n)], program)
        _check_hosts(self._n)
        process = subprocess.Popen(
            command,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # Ctrl-C is for this process, which then ends the job.
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        streams = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        readers = [start_daemon("output", partial(self._pass_on, *pair)) for pair in streams]
        try:
            yield process
        finally:
            _end(process, str(self._folder))
            for reader in readers:
                reader.join(_GRACE_SECONDS)

    def _pass_on(self, source: IO[str], target: IO[str]) -> None:
        failed: Exception | None = None
        with source:
            for line in source:
                with self._lock:
                    self._last_lines.append(line)
                if failed is None:
                    try:
                        _write(line, target)
                    except Exception as error:  # of whatever stands for stdout; results() raises it
                        # Reading goes on: a pipe that nobody reads would end mpirun.
                        failed = self._unwritten = error

    def wait(self, process: subprocess.Popen[str], deadline: float | None) -> None:
        """Wait until the job ends, or until it is to be ended.

        That is a while after a rank has failed, or at the deadline.

        Raises:
            TimeoutError: It was the deadline.
        """
        began, failed = time.monotonic(), None
        while process.poll() is None:
            now = time.monotonic()
            if failed is None and any(isinstance(each, PickledError) for each in self._read().values()):
                failed = now
            if failed is not None and now > failed + _GRACE_SECONDS:
                return
            if failed is None and deadline is not None and now > began + deadline:
                missing = numbered_ranks(sorted(set(range(self._n)) - self._outcomes.keys()))
                raise TimeoutError(
                    f"the job was not done after {deadline:g} s, and was ended; without a result: {missing} of "
                    f"{self._n}"
                )
            time.sleep(_NAP_SECONDS)

    def _read(self) -> dict[int, bytes | PickledError]:
        """Return the outcomes so far."""
        for rank in range(self._n):
            path = path_of_outcome(self._folder, rank)
            if rank not in self._outcomes and path.exists():
                self._outcomes[rank] = pickle.loads(path.read_bytes())
        return self._outcomes

    def results(self, status: int) -> list[Result]:
        """Return the results of all ranks.

        Args:
            status: That of mpirun.

        Raises:
            Exception: The error of the first rank that has one of its own.
            RuntimeError: A rank has neither.
            OSError: The output could not be written.
        """
        outcomes = self._read()
        errors = {rank: each for rank, each in outcomes.items() if isinstance(each, PickledError)}
        unpacked = {rank: each.unpack(_find_nothing) for rank, each in errors.items()}
        # One that an error of another rank has reached leaves it to that one.
        first = min(unpacked, key=lambda rank: (isinstance(unpacked[rank], PeerError), rank), default=None)
        if first is not None:
            raise unpacked[first] from RuntimeError(f"rank {first} of {self._n}:\n{errors[first].trace}")
        missing = sorted(set(range(self._n)) - outcomes.keys())
        if missing or status:
            who = f"{numbered_ranks(missing)} of {self._n} ended without a result; "
            with self._lock:
                printed = "".join(self._last_lines)
            raise RuntimeError(f"{who if missing else ''}mpirun ended with status {status}. Last output:\n{printed}")
        if self._unwritten is not None:
            raise self._unwritten
        return [unpack(outcomes[rank], _find_nothing) for rank in range(self._n)]  # type: ignore[arg-type]


def _find_nothing(name: tuple[object, ...]) -> object:
    raise pickle.UnpicklingError(f"{name!r} stands for nothing here")


def _check_hosts(n: int) -> None:
    """Check that mpirun can place ranks on this host only, where the call is."""
    count = count_hosts_of_job(os.environ)
    if count > 1:
        raise ValueError(
            f"this batch job has {count} hosts, and launch_processes is for ranks on one. Expected: a job of one host, "
            f"under Slurm: salloc -N 1; or for all hosts a program; type: python -m mpidist launch -n {n} train.py"
        )


def _write(line: str, target: IO[str]) -> None:
    """Write a line, with question marks for characters that the target's encoding lacks."""
    encoding = getattr(target, "encoding", None) or "utf-8"
    target.write(line.encode(encoding, errors="replace").decode(encoding))
    target.flush()


def _end(process: subprocess.Popen[str], mark: str) -> None:
    """End mpirun and the ranks, which have ``mark`` in their command lines."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            # That of Open MPI 5.0.11 may end its ranks and hang then.
            process.kill()
            process.wait()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # one that ends meanwhile, or is another user's
            if mark.encode() in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
