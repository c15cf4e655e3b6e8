"""Job: the example on several ranks, seen from outside: what it has noted, its processes, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.ranks.jobs import JOB, ROOT, child_environment, end_all, members, mpirun_command, stacks_and_end

WATCHED = Path(__file__).with_name("watched_train.py")
ULFM = ("--with-ft", "ulfm")
# What can wait in the package gives up long before the driver does, and says why. A job that shows no sign of life for
# so long, no further step and no end, hangs: on a machine that has much else to do a start alone can take a minute.
TIMEOUT, LONGEST_SILENCE = 60.0, 120.0
# After the launcher has ended its ranks may take so long to go.
_GONE_SECONDS = 5.0


class NotReachedError(Exception):
    """A job did not come to the point where it was to be harmed."""


@dataclass(frozen=True)
class Note:
    """A line of what a rank has noted; ``what`` is starts, begins or step."""

    time: float
    what: str
    step: int
    pid: int
    rank: int


@dataclass(frozen=True)
class Ended:
    """How a job has ended.

    Attributes:
        returncode: Of mpirun.
        stdout, stderr: What it printed; of one that hung with the stacks of its ranks.
        hung: Whether it hung, and was ended.
        left_behind: How many of its processes were still there a while after mpirun had ended.
        notes: Of all ranks, in the order of time.
    """

    returncode: int
    stdout: str
    stderr: str
    hung: bool
    left_behind: int
    notes: list[Note]


class Job:
    """A job that runs from the making of this object on; as a block it leaves no process.

    Args:
        folder: An empty one, for its notes and what it prints.
        options: Of the example.
        ranks: How many.
        flags: Of mpirun.
        env: Environment variables to add.
        within: Command that starts mpirun.

    Attributes:
        longest_silence: Seconds without a sign of life until it is taken for one that hangs.
    """

    longest_silence = LONGEST_SILENCE

    def __init__(
        self,
        folder: Path,
        options: Sequence[str],
        ranks: int,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> None:
        folder.mkdir(parents=True)
        self.folder, self.ranks = folder, ranks
        self.started = time.monotonic()
        self._notes: list[Note] = []
        self._offsets = dict.fromkeys(range(ranks), 0)
        self._mark = uuid.uuid4().hex
        command = [*within, *mpirun_command(), *flags, "-n", str(ranks), sys.executable, str(WATCHED), str(folder)]
        with open(folder / "stdout", "wb") as stdout, open(folder / "stderr", "wb") as stderr:
            self._process = subprocess.Popen(
                [*command, *options],
                cwd=ROOT,
                env=child_environment(
                    {
                        "MPIDIST_TIMEOUT": f"{TIMEOUT:g}",
                        **(env or {}),
                        JOB: f"{os.environ.get(JOB, '')}{self._mark}.",
                    }
                ),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        end_all(self._process, self._mark)
        self._process.wait()

    def notes(self) -> list[Note]:
        """Return what all ranks have noted so far, in the order of time."""
        for rank in range(self.ranks):
            path = self.folder / str(rank)
            if path.exists():
                with open(path) as file:
                    file.seek(self._offsets[rank])
                    new = file.read()
                whole = new[: new.rfind("\n") + 1]
                self._offsets[rank] += len(whole)
                for line in whole.splitlines():
                    moment, what, step, pid = line.split()
                    self._notes.append(Note(float(moment), what, int(step), int(pid), rank))
        return sorted(self._notes, key=lambda note: note.time)

    def until(self, has_come: Callable[[Note], bool]) -> Note:
        """Return the first note for which ``has_come`` is true, as soon as it is there.

        Raises:
            NotReachedError: The job ended, or hangs.
        """
        while True:
            is_over = self._is_over()
            for note in self.notes():
                if has_come(note):
                    return note
            if is_over:
                raise NotReachedError(f"the job never came to the point; it printed\n{self._read('stderr')}")
            time.sleep(0.002)

    def until_step(self, rank: int, step: int) -> int:
        """Return the process of ``rank`` as soon as it has noted ``step``."""
        return self.until(lambda note: note.rank == rank and note.what == "step" and note.step >= step).pid

    def until_printed(self, text: str) -> None:
        """Return as soon as the job has printed ``text`` on stderr.

        Raises:
            NotReachedError: The job ended, or hangs.
        """
        is_over = False
        while text not in self._read("stderr"):
            if is_over:
                raise NotReachedError(f"the job never said {text!r}; it printed\n{self._read('stderr')}")
            is_over = self._is_over()
            time.sleep(0.01)

    def end(self) -> Ended:
        """Return how the job has ended; one that hangs is ended."""
        while not self._is_over():
            time.sleep(0.02)
        hung = self._process.poll() is None
        if hung:
            stacks_and_end(self._process, self._mark)
        left = self._left_behind()
        end_all(self._process, self._mark)
        returncode = self._process.wait()
        return Ended(returncode, self._read("stdout"), self._read("stderr"), hung, left, self.notes())

    def _is_over(self) -> bool:
        """Whether the job has ended or hangs."""
        notes = self.notes()
        silence = time.monotonic() - (notes[-1].time if notes else self.started)
        return self._process.poll() is not None or silence > self.longest_silence

    def _left_behind(self) -> int:
        limit = time.monotonic() + _GONE_SECONDS
        while (left := len(members(self._mark))) and time.monotonic() < limit:
            time.sleep(0.02)
        return left

    def _read(self, name: str) -> str:
        return (self.folder / name).read_text(errors="replace")
