"""Put faults into the library one by one and check that the tests see each: ``python -m tests.mutations``.

The faults of ``tests.mutations.faults`` are put into a temporary worktree of a commit, so none stays in the checkout.
Uncommitted changes have no effect. A fault is seen if its tests fail, hang or crash, and if the test that saw it passes
without the fault. Prints a line for each fault. The status is 1 if a fault was not seen, 2 if tests could not be run.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import cache_from_source
from pathlib import Path

from tests.mutations.faults import FAULTS, Fault
from tests.mutations.judging import PASSED, RunError, Sighting, judge
from tests.support.ranks.jobs import JOB, ROOT, child_environment, end_all, mpirun_command

LIMIT_SECONDS = 120.0
# Of one test: a hang is then a failure that names it, within the limit.
_TEST_SECONDS = 45
_PYTEST = (sys.executable, "-m", "pytest", *f"-q -x -p no:cacheprovider --color=no --timeout={_TEST_SECONDS}".split())


@dataclass(frozen=True)
class Trial:
    """One fault that was tried. The sighting is None if its tests could not be run."""

    fault: Fault
    sighting: Sighting | None
    seconds: float
    error: str = ""

    @property
    def is_seen(self) -> bool:
        """Whether the tests saw the fault."""
        return self.sighting is not None and self.sighting.seen

    @property
    def verdict(self) -> str:
        """The outcome, in one line."""
        if self.sighting is None:
            return f"ERROR: {self.error}"
        if not self.sighting.seen:
            return f"NOT SEEN by {' '.join(self.fault.tests)}"
        how = "" if self.sighting.how == "failed" else f" ({self.sighting.how})"
        return f"seen by {self.sighting.test}{how}"

    @property
    def line(self) -> str:
        """Fault, verdict and seconds."""
        return f"{self.fault.name}: {self.verdict}, {self.seconds:.1f} s"


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """Provide a detached worktree of a commit, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="mpidist-mutations-") as folder:
        tree = Path(folder, "tree").resolve()
        _git("worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


@contextmanager
def injected(fault: Fault, tree: Path) -> Iterator[None]:
    """Provide a block in which a fault is in the library in ``tree``.

    Raises:
        ValueError: The text that it replaces is not in its file, or more than once.
    """
    file = tree / fault.file
    healthy = file.read_text(encoding="utf-8")
    _write(file, fault.put_into(healthy))
    try:
        yield
    finally:
        _write(file, healthy)


def run_tests(fault: Fault, tree: Path) -> tuple[int | None, str]:
    """Return the exit status of a fault's tests, None at the time limit, and their output; ends all they started."""
    command = [*_PYTEST, *(["-m", fault.mark] if fault.mark else []), *fault.tests]
    if fault.ranks > 1:
        ranks = str(fault.ranks)
        command = [*mpirun_command(), "-n", ranks, *command, "--with-mpi", "--ranks", ranks]
    job = uuid.uuid4().hex
    given = {"PYTHONPATH": str(tree), "COLUMNS": "250", JOB: f"{os.environ.get(JOB, '')}{job}."}
    environment = child_environment(given, fault.ranks_per_node)
    # In a file: a pipe would stay open as long as anything that the tests have started.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        status: int | None = None
        try:
            status = process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            pass  # the status stays None
        finally:
            end_all(process, job)
        output.seek(0)
        return status, output.read()


def try_fault(fault: Fault, tree: Path) -> Trial:
    """Put a fault into the library in ``tree``, run its tests, and take it out again."""
    start = time.monotonic()
    sighting, error = None, ""
    try:
        with injected(fault, tree):
            sighting = judge(*run_tests(fault, tree))
        if sighting.seen:
            check_without(fault, sighting.test, tree)
    except (RunError, ValueError, OSError) as problem:
        error = str(problem)
    return Trial(fault, None if error else sighting, time.monotonic() - start, error)


def check_without(fault: Fault, test: str, tree: Path) -> None:
    """Raise RunError where the test that has seen a fault does not pass without it."""
    status, output = run_tests(replace(fault, tests=(test,)), tree)
    if status != PASSED:
        raise RunError(f"{test} does not pass without the fault either (status {status}):\n{output[-2000:]}")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--at", metavar="COMMIT", default="HEAD", help="whose library and tests are taken (HEAD)")
    parser.add_argument("--only", metavar="TEXT", default="", help="the faults that have this in their name or file")
    given = parser.parse_args(arguments)
    commit = _git("rev-parse", "--verify", f"{given.at}^{{commit}}").strip()
    chosen = [fault for fault in FAULTS if given.only in fault.name or given.only in fault.file]
    # A time limit around all of it must not leave ranks or a worktree behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    trials: list[Trial] = []
    with worktree(commit) as tree:
        _check_what_is_imported(tree)
        _build_native_core(tree / "mpidist" / "native")
        for number, fault in enumerate(chosen, 1):
            trials.append(try_fault(fault, tree))
            print(f"[{number}/{len(chosen)}] {trials[-1].line}", flush=True)
    seen = sum(trial.is_seen for trial in trials)
    print(f"\n{seen} of {len(trials)} faults were seen at {commit[:10]}")
    for trial in trials:
        if not trial.is_seen:
            print(trial.line)
    if any(trial.sighting is None for trial in trials):
        return 2
    return int(seen < len(trials) or not trials)


def _check_what_is_imported(tree: Path) -> None:
    """Raise RuntimeError unless Python finds the library in ``tree``, and not one that is installed."""
    program = "import importlib.util; print(importlib.util.find_spec('mpidist').origin)"
    environment = child_environment({"PYTHONPATH": str(tree)})
    done = subprocess.run([sys.executable, "-c", program], cwd="/", env=environment, capture_output=True, text=True)
    if Path(done.stdout.strip()) != tree / "mpidist" / "__init__.py":
        raise RuntimeError(f"Python imports {done.stdout.strip() or done.stderr}; expected the library in {tree}")


def _build_native_core(folder: Path) -> None:
    program = str(folder / "build_library.py")
    done = subprocess.run([sys.executable, program], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise RunError(f"the native core cannot be built: {done.stderr[-2000:]}")


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    # Python tells bytecode apart by size and whole seconds of its source, which may be those of the text before.
    if file.suffix == ".py":
        Path(cache_from_source(str(file))).unlink(missing_ok=True)
    else:
        _build_native_core(file.parent)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
