"""Trial: one fault tried on the example, and what has to be true of every end of a job."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.chaos.job import Ended, Job, Note
from tests.support.ranks.jobs import ROOT, child_environment

EPOCHS, STEPS_PER_EPOCH = 8, 45
STEPS = EPOCHS * STEPS_PER_EPOCH
LEAST_ACCURACY = 97.0
# Sums over another number of ranks are rounded otherwise; a step that is missing, or done twice, changes some weight by
# a thousand times this.
LARGEST_DIFFERENCE = 1e-7


class FailedError(Exception):
    """The package has not done what it promises."""


@dataclass(frozen=True)
class Found:
    """How a trial went.

    Attributes:
        outcome: "went on": the job itself came to the right end. "resumed": it ended with an error that says why, or
            because it was asked to, and the next run came to the right end. "refused": a run said why it cannot.
        detail: What was done, in a few words.
        lost: Steps that had been done and had to be done again; None where nothing went on.
        seconds: From the fault, or the start of the next run, to the first step that was done then.
    """

    outcome: str
    detail: str
    lost: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Reference:
    """The undisturbed run: where its checkpoints and its weights are."""

    out: Path
    dump: Path

    def difference(self, dump: Path) -> float:
        """Return by how much the weights in ``dump`` differ at most."""
        with np.load(self.dump) as expected, np.load(dump) as found:
            names = [name for name in expected.files if name != "losses"]
            return max(float(np.abs(expected[name] - found[name]).max()) for name in names)


def train_undisturbed(folder: Path) -> Reference:
    """Train in one process."""
    reference = Reference(folder / "out", folder / "weights.npz")
    options = ["--strategy", "default", "--epochs", str(EPOCHS), "--out", str(reference.out)]
    subprocess.run(
        [sys.executable, ROOT / "examples" / "train.py", *options, "--dump-weights", str(reference.dump)],
        cwd=ROOT, env=child_environment(), check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    return reference


class Trial:
    """One fault tried: where it may write, what is random in it, and the jobs that it starts.

    Args:
        folder: An empty one.
        seed: Of all that is random, with the name of the fault.
        name: Of the fault.
        reference: The undisturbed run.
        ranks: Of each job.
        is_short: Whether to take less time, where a fault lasts.
    """

    def __init__(self, folder: Path, seed: int, name: str, reference: Reference, ranks: int, is_short: bool) -> None:
        self.folder, self.reference, self.ranks, self.is_short = folder, reference, ranks, is_short
        self.out = folder / "out"
        self.random = random.Random(f"{name} {seed}")
        self.dump = folder / "weights.npz"
        self._jobs = 0

    def start(
        self, *options: str, flags: Sequence[str] = (), env: Mapping[str, str] | None = None, within: Sequence[str] = ()
    ) -> Job:
        """Start the example; it writes to ``out``."""
        self._jobs += 1
        own = ("--epochs", str(EPOCHS), "--out", str(self.out), "--dump-weights", str(self.dump))
        return Job(self.folder / f"job-{self._jobs}", [*own, *options], self.ranks, flags, env, within)

    def any_step(self) -> int:
        """Return a random step, so far from the end that there is time to do harm."""
        return self.random.randrange(1, STEPS - 10)

    def any_rank(self) -> int:
        """Return a random rank."""
        return self.random.randrange(self.ranks)

    def check_right(self, ended: Ended) -> None:
        """Insist that a job came to the end that the undisturbed run has."""
        _check_ended(ended)
        if ended.returncode != 0:
            raise FailedError(f"the job ended with code {ended.returncode}; expected 0\n{ended.stderr}")
        closing = re.search(rf"done after {STEPS} steps: .* test accuracy ([\d.]+)%", ended.stdout)
        if closing is None:
            raise FailedError(f"no closing line after {STEPS} steps\n{ended.stdout}\n{ended.stderr}")
        if float(closing[1]) < LEAST_ACCURACY:
            raise FailedError(f"test accuracy {closing[1]} %; expected {LEAST_ACCURACY} % at least")
        difference = self.reference.difference(self.dump)
        if difference > LARGEST_DIFFERENCE:
            raise FailedError(f"weights differ by {difference:.2g} from those of the undisturbed run: steps are lost")

    def check_clear_error(self, ended: Ended, says: str) -> None:
        """Insist that a job ended by itself, with an error that says why (a regular expression)."""
        _check_ended(ended)
        if ended.returncode == 0:
            raise FailedError(f"the job ended with code 0; expected an error that says {says!r}\n{ended.stderr}")
        if not re.search(says, ended.stderr):
            raise FailedError(f"the job ended with code {ended.returncode}, and no word of {says!r}\n{ended.stderr}")

    def resume(self, detail: str, before: Ended, within: Sequence[str] = ()) -> Found:
        """Start the job again, and insist that it comes to the right end."""
        with self.start("--resume", within=within) as job:
            ended = job.end()
        self.check_right(ended)
        begun = next(note for note in ended.notes if note.what == "begins")
        lost = max(0, last_step(before.notes) - begun.step)
        first = next((note.time for note in ended.notes if note.what == "step"), None)
        return Found("resumed", detail, lost, None if first is None else first - job.started)


def last_step(notes: Sequence[Note]) -> int:
    """Return the last step that any rank has noted."""
    return max((note.step for note in notes if note.what == "step"), default=0)


def _check_ended(ended: Ended) -> None:
    if ended.hung:
        raise FailedError(f"the job hung\n{ended.stdout}\n{ended.stderr}")
    if ended.left_behind:
        raise FailedError(f"{ended.left_behind} processes were still there after the end\n{ended.stderr}")
    for disaster in ("Segmentation fault", "Fatal Python error", "*** Process received signal ***"):
        if disaster in ended.stderr:
            raise FailedError(f"{disaster}\n{ended.stderr}")
