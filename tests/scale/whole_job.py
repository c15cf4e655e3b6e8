"""What became of tests/cluster/programs/whole.py, and what must have, on whichever ranks and nodes it ran."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from tests.cluster.jobs import PROGRAMS, results_in

STEPS = ("sums", "mismatch", "rows", "save", "restore", "late", "killed")
# In it a rank is asleep for more than twice as long.
SETTINGS = {"MPIDIST_WARN_AFTER": "10", "MPIDIST_TIMEOUT": "120"}
PROGRAM = PROGRAMS / "whole.py"
ROWS, BATCH, ODD = 5_000, 300, 37
SCREEN_LINES, SCREEN_COLUMNS = 42, 230
# From the death of a rank to the launcher's end, on cores that many ranks share.
ENDED_SECONDS = 40.0
_ASLEEP = next(number for number, line in enumerate(PROGRAM.read_text().splitlines(), 1) if line.endswith("# asleep"))


@dataclass(frozen=True)
class WholeJob:
    """A job that is over.

    Attributes:
        ranks: How many it had.
        folder: Where they left it, and their checkpoint.
        results: What they left, by rank.
        done: What it printed, and its status.
        seconds_after_the_death: In which the launcher ended, after a rank had killed itself.
    """

    ranks: int
    folder: Path
    results: Mapping[int, Any]
    done: CompletedProcess[str]
    seconds_after_the_death: float

    def all(self, step: str) -> list[Any]:
        """Return what each rank left of a step, by rank."""
        assert sorted(self.results) == list(range(self.ranks)), f"{self.done.stdout}\n{self.done.stderr}"
        return [self.results[rank][step] for rank in range(self.ranks)]

    def check_sums(self) -> None:
        for rank, found in enumerate(self.all("sums")):
            assert not any(found["wrong"].values()), f"rank {rank}: {found}"

    def check_mismatch(self) -> None:
        """Check that the error of all ranks names the odd one and fits on a screen, and that they went on."""
        for found in self.all("mismatch"):
            assert found["error"] == "MismatchError"
            assert re.search(rf"\brank {ODD % self.ranks}\b", found["text"]), found["text"]
            check_screen(found["text"])
            assert found["after"] == self.ranks

    def check_rows(self) -> None:
        """Check that each row was dealt to one rank, and to none more than its share of each batch."""
        dealt = [found["rows"] for found in self.all("rows")]
        assert sorted(row for rows in dealt for row in rows) == list(range(ROWS))
        assert max(map(len, dealt)) <= -(-BATCH // self.ranks) * -(-ROWS // BATCH)

    def check_checkpoint(self) -> None:
        assert {found["files"] for found in self.all("save")} == {self.ranks}
        assert [found["wrong"] for found in self.all("restore")] == [[]] * self.ranks

    def check_report(self) -> None:
        """Check that one report names the rank that is asleep, with its line, and that the job went on."""
        assert [found["after"] for found in self.all("late")] == [self.ranks] * self.ranks
        lines = [line for line in self.done.stderr.splitlines() if "whole.py" in line and f":{_ASLEEP}" in line]
        assert len(lines) == 1, self.done.stderr
        assert re.search(rf"\brank {ODD % self.ranks}\b", lines[0])
        report, *_ = self.done.stderr.partition("Traceback")
        check_screen(report)

    def check_end(self) -> None:
        assert self.done.returncode != 0
        assert self.seconds_after_the_death < ENDED_SECONDS


def check_screen(text: str) -> None:
    """Check that a message fits on a screen."""
    lines = text.splitlines()
    assert len(lines) <= SCREEN_LINES, text
    assert max(map(len, lines), default=0) <= SCREEN_COLUMNS, text


def whole_job(ranks: int, folder: Path, run: Callable[[], CompletedProcess[str]]) -> WholeJob:
    """Run the program, all of its steps, and return what became of it."""
    done = run()
    ended = time.monotonic()
    killed = folder / "killed"
    assert killed.exists(), f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return WholeJob(ranks, folder, results_in(folder), done, ended - float(killed.read_text()))
