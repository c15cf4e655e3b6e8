"""``mpidist.launch_processes``: calls a function on the ranks of a new job."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
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
from mpidist.core.files import replacing
from mpidist.core.text import numbered_ranks, pip_install
from mpidist.parameter_server.pickling import HAS_CLOUDPICKLE, PickledError, pack, pack_error, unpack
from mpidist.topology.launchers import read_launcher

Result = TypeVar("Result")
_CALL, _PATH = "call.pickle", "path.pickle"
# The ranks import from the same places as this process. PYTHONPATH would reach other Pythons that they start, too.
_START = (
    f"import pathlib, pickle, sys; sys.path[:] = pickle.loads(pathlib.Path(sys.argv[1], '{_PATH}').read_bytes()); "
    "from mpidist.cli.notebook import call_on_this_rank; sys.exit(call_on_this_rank(sys.argv[1]))"
)
_POLL_SECONDS = 0.05
# Time for other ranks to end, or to raise errors of their own, after one has failed. Then, time for mpirun to end.
_GRACE_SECONDS, _END_SECONDS = 3.0, 3.0
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
    them. MPI is not started in this process. Their output appears in this process's output at once. Functions of a
    notebook or a script need cloudpickle (``pip install cloudpickle``). Without it, ``fn`` must be a function of a
    module that can be imported.

    Args:
        fn: Function to call. Each rank gets a copy of the variables around it.
        n: Number of ranks.
        args: Arguments of the function, the same on each rank. They must be picklable.
        kwargs: Keyword arguments of the function.
        deadline: Seconds until the job is ended. No limit by default.

    Returns:
        The results, in the order of the ranks.

    Raises:
        ValueError: ``n`` or ``deadline`` is out of range, or this process is itself a rank, or in a batch job of
            several hosts.
        TypeError: The function, an argument or a result cannot be pickled.
        LaunchError: The MPI library or its mpirun is missing.
        TimeoutError: The job did not end by the deadline, and was ended.
        RuntimeError: A rank ended without a result, for example because it was killed.
        OSError: The output of the ranks could not be written to this process's output.
        Exception: The error of a rank. Its cause has the rank and the traceback. The other ranks have been ended.

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
            f"fn {fn!r} is a function of this notebook or script, which the ranks cannot import. Use a function of a "
            f"module, or cloudpickle; type: {pip_install('coordinator')}"
        )
    call = pack((fn, tuple(args), dict(kwargs or {})), lambda _: None, "the function with its arguments")
    with tempfile.TemporaryDirectory(prefix="mpidist-launch-") as folder:
        Path(folder, _CALL).write_bytes(call)
        Path(folder, _PATH).write_bytes(pickle.dumps(sys.path))
        job = _Job(Path(folder), n)
        with job.running() as process:
            job.wait(process, deadline)
        return job.results(process.returncode)


def call_on_this_rank(place: str) -> int:
    """Make the call of a folder, save its outcome there, and return the exit status."""
    folder, launcher = Path(place), read_launcher()
    rank = 0 if launcher is None else launcher.rank
    outcome: bytes | PickledError
    try:
        fn, args, kwargs = pickle.loads((folder / _CALL).read_bytes())
        outcome = pack(fn(*args, **kwargs), lambda _: None, f"the result of rank {rank}")
    except BaseException as error:  # SystemExit, too, because the caller waits for an outcome
        outcome = pack_error(error, lambda _: None)
    with replacing(_path_of_outcome(folder, rank)) as descriptor, open(descriptor, "wb", closefd=False) as file:
        file.write(pickle.dumps(outcome))
    return int(isinstance(outcome, PickledError))


def _path_of_outcome(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.pickle"


class _Job:
    """The ``n`` ranks of one call. The folder has the call, and receives the outcomes."""

    def __init__(self, folder: Path, n: int) -> None:
        self._folder, self._n = folder, n
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._unwritten: Exception | None = None
        self._outcomes: dict[int, bytes | PickledError] = {}

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[str]]:
        """Start the ranks. At the end of the block, end all that are left."""
        program = [sys.executable, "-c", _START, str(self._folder)]
        variables, command = command_for_ranks(["-n", str(self._n)], program)
        hosts = count_hosts_of_job(os.environ)
        if hosts > 1:
            raise ValueError(
                f"this batch job has {hosts} hosts, and launch_processes starts ranks on one. Use a job of one host, "
                f"under Slurm: salloc -N 1; or for all hosts a program; type: python -m mpidist launch -n {self._n} "
                "train.py"
            )
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
        readers = [start_daemon("output", partial(self._copy_output, *pair)) for pair in streams]
        try:
            yield process
        finally:
            _end(process, str(self._folder))
            for reader in readers:
                reader.join(_GRACE_SECONDS)

    def _copy_output(self, source: IO[str], target: IO[str]) -> None:
        """Copy lines, with question marks for characters that the target's encoding lacks."""
        failed = False
        with source:
            for line in source:
                self._last_lines.append(line)
                encoding = getattr(target, "encoding", None) or "utf-8"
                try:
                    if not failed:
                        target.write(line.encode(encoding, errors="replace").decode(encoding))
                        target.flush()
                except Exception as error:  # of any object that replaces stdout; results() raises it
                    # Continue to read: a full pipe would block mpirun.
                    failed, self._unwritten = True, error

    def wait(self, process: subprocess.Popen[str], deadline: float | None) -> None:
        """Wait until the job ends, or until some time after a rank has failed. Raise TimeoutError at the deadline."""
        began, failed = time.monotonic(), None
        while process.poll() is None:
            now = time.monotonic()
            if failed is None and any(isinstance(each, PickledError) for each in self._read().values()):
                failed = now
            if failed is not None and now > failed + _GRACE_SECONDS:
                return
            if failed is None and deadline is not None and now > began + deadline:
                raise TimeoutError(
                    f"the job was not done after {deadline:g} s, and was ended; without a result: {self._missing()}"
                )
            time.sleep(_POLL_SECONDS)

    def _read(self) -> dict[int, bytes | PickledError]:
        """Return the outcomes so far."""
        for rank in range(self._n):
            path = _path_of_outcome(self._folder, rank)
            if rank not in self._outcomes and path.exists():
                self._outcomes[rank] = pickle.loads(path.read_bytes())
        return self._outcomes

    def _missing(self) -> str:
        ranks = sorted(set(range(self._n)) - self._outcomes.keys())
        return f"{numbered_ranks(ranks)} of {self._n}" if ranks else ""

    def results(self, status: int) -> list[Result]:
        """Return the results of all ranks, or raise the error of a rank."""
        outcomes = self._read()
        errors = {rank: each for rank, each in outcomes.items() if isinstance(each, PickledError)}
        unpacked = {rank: each.unpack(_find_nothing) for rank, each in errors.items()}
        # A PeerError comes from the error of another rank.
        first = min(unpacked, key=lambda rank: (isinstance(unpacked[rank], PeerError), rank), default=None)
        if first is not None:
            raise unpacked[first] from RuntimeError(f"rank {first} of {self._n}:\n{errors[first].trace}")
        missing = self._missing()
        if missing or status:
            # A copy, because a reader may still append lines.
            printed = "".join(self._last_lines.copy())
            who = f"{missing} ended without a result; " if missing else ""
            raise RuntimeError(f"{who}mpirun ended with status {status}. Last output:\n{printed}")
        if self._unwritten is not None:
            raise self._unwritten
        return [unpack(outcomes[rank], _find_nothing) for rank in range(self._n)]  # type: ignore[arg-type]


def _find_nothing(name: tuple[object, ...]) -> object:
    raise pickle.UnpicklingError(f"{name!r} is unknown here")


def _end(process: subprocess.Popen[str], mark: str) -> None:
    """End mpirun and the ranks, which have ``mark`` in their command lines."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            # mpirun of Open MPI 5.0.11 may end its ranks and hang.
            process.kill()
            process.wait()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process ends, or belongs to another user
            if mark.encode() in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
