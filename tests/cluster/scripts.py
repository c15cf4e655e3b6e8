"""Submits the scripts of slurm/ to a lab as a user does, and watches their jobs."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.cluster.lab import Lab
from tests.support.ranks.jobs import ROOT, child_environment

SCRIPTS = ROOT / "slurm"
_GOING_ON = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED"}
_NAP_SECONDS = 0.1
# The hosts' virtual CPUs are the same few real ones, which their ranks cannot see.
_OF_THE_LAB = {"OMPI_MCA_mpi_yield_when_idle": "1"}
# What a user does not set; without it Open MPI takes only the slots that Slurm gave it.
_NOT_A_USERS = (
    "PRTE_MCA_rmaps_default_mapping_policy",
    "OMPI_MCA_rmaps_base_oversubscribe",
    "VIRTUAL_ENV",
    "VENV",
    "MODULES",
)


def user_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a user who has not activated the virtual environment of this process."""
    kept = child_environment(_OF_THE_LAB)
    for name in _NOT_A_USERS:
        kept.pop(name, None)
    own = str(Path(sys.prefix, "bin"))
    kept["PATH"] = os.pathsep.join(folder for folder in kept["PATH"].split(os.pathsep) if folder != own)
    return {**kept, **(env or {})}


def workplace(folder: Path, venv: Path = Path(sys.prefix)) -> Path:
    """Make a folder that looks like a checkout with its ``.venv``, so that nothing is written to the real one."""
    folder.mkdir()
    for name in ("examples", "benchmarks", "tests"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(venv)
    return folder


class Job:
    """A job of a script.

    Attributes:
        number: Its number in Slurm.
        folder: Where it was submitted.
    """

    def __init__(self, lab: Lab, number: str, folder: Path) -> None:
        self.lab, self.number, self.folder = lab, number, folder

    def files(self, suffix: str) -> list[Path]:
        """Return its own files of a kind, such as NAME-JOB.out, and not those of other jobs of the folder.

        Those of an array are one for each task, NAME-JOB_TASK.out.
        """
        mine = re.compile(rf".*-{self.number}(_\d+)?\.{suffix}")
        return sorted(path for path in self.folder.iterdir() if mine.fullmatch(path.name))

    @property
    def output(self) -> str:
        """All that the job has printed so far; of an array the tasks one after the other."""
        return "\n".join(path.read_text(errors="replace") for path in self.files("out"))

    @property
    def markers(self) -> list[str]:
        """The completion markers that it has left."""
        return [path.name for path in self.files("completed")]

    def field(self, name: str) -> set[str]:
        """Return what Slurm says about the job; of an array about all tasks."""
        done = self.lab.run("login", ["scontrol", "show", "job", self.number])
        assert done.returncode == 0, done.stderr
        return set(re.findall(rf"\b{name}=(\S+)", done.stdout))

    def until(self, has_come: Callable[[], object], what: str, seconds: float = 60.0) -> None:
        """Wait for something that the job does.

        Raises:
            TimeoutError: It has not in time, or the job is over; with what it printed.
        """
        deadline = time.monotonic() + seconds
        while not has_come():
            states = self.field("JobState")
            over = not states & _GOING_ON
            if (over and not has_come()) or time.monotonic() > deadline:
                raise TimeoutError(f"job {self.number} is {states}, and not yet: {what}\n{self.output}")
            time.sleep(_NAP_SECONDS)

    def end(self, seconds: float = 90.0) -> str:
        """Wait until it is over; returns its state, of an array those of all tasks."""
        self.until(lambda: not self.field("JobState") & _GOING_ON, "its end", seconds)
        return " ".join(sorted(self.field("JobState")))

    def signal(self, *arguments: str) -> None:
        """Call scancel for this job."""
        done = self.lab.run("login", ["scancel", *arguments, self.number])
        assert done.returncode == 0, done.stderr


def submit(
    lab: Lab, folder: Path, script: str, *options: str, command: str | None = None, env: Mapping[str, str] | None = None
) -> Job:
    """Submit a copy of ``slurm/SCRIPT.sbatch``.

    Args:
        lab: Where.
        folder: The folder to be in; every host sees it.
        script: Which one.
        options: Options of sbatch.
        command: What the one line that a user edits is to say instead, between its brackets.
        env: Environment variables to add.
    """
    copy = folder / f"{script}.sbatch"
    shutil.copy(SCRIPTS / copy.name, copy)
    if command is not None:
        text, edited = re.subn(r"^COMMAND=\(.*\)$", lambda _: f"COMMAND=({command})", copy.read_text(), flags=re.M)
        assert edited == 1, f"{script} has {edited} lines COMMAND=(...)"
        copy.write_text(text)
    arguments = ["sbatch", "--parsable", *options, copy.name]
    done = lab.run("login", arguments, env=user_environment(env), folder=str(folder))
    assert done.returncode == 0, done.stderr
    return Job(lab, done.stdout.strip(), folder)
