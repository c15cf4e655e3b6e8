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


class WholeJobTests:
    """What must have become of a job: a class of tests inherits it beside a fixture ``job``."""

    def test_sums_are_right_on_all_ranks(self, job: WholeJob) -> None:
        for rank, found in enumerate(job.all("sums")):
            assert not any(found["wrong"].values()), f"rank {rank}: {found}"

    def test_the_odd_rank_is_named_by_the_error_of_all(self, job: WholeJob) -> None:
        # It fits on a screen, and they went on.
        for found in job.all("mismatch"):
            assert found["error"] == "MismatchError"
            assert re.search(rf"\brank {ODD % job.ranks}\b", found["text"]), found["text"]
            check_screen(found["text"])
            assert found["after"] == job.ranks

    def test_each_row_is_dealt_to_one_rank(self, job: WholeJob) -> None:
        # And to none more than its share of each batch.
        dealt = [found["rows"] for found in job.all("rows")]
        assert sorted(row for rows in dealt for row in rows) == list(range(ROWS))
        assert max(map(len, dealt)) <= -(-BATCH // job.ranks) * -(-ROWS // BATCH)

    def test_all_ranks_write_a_part_and_read_it_again(self, job: WholeJob) -> None:
        assert {found["files"] for found in job.all("save")} == {job.ranks}
        assert [found["wrong"] for found in job.all("restore")] == [[]] * job.ranks

    def test_a_rank_that_is_asleep_is_named_with_its_line(self, job: WholeJob) -> None:
        # By one report; then the job went on.
        assert [found["after"] for found in job.all("late")] == [job.ranks] * job.ranks
        lines = [line for line in job.done.stderr.splitlines() if "whole.py" in line and f":{_ASLEEP}" in line]
        assert len(lines) == 1, job.done.stderr
        assert re.search(rf"\brank {ODD % job.ranks}\b", lines[0])
        # Open MPI may have printed warnings before the report.
        report = re.search(r"^mpidist: .* waited .*?(?=^Traceback|\Z)", job.done.stderr, re.MULTILINE | re.DOTALL)
        assert report is not None, job.done.stderr
        check_screen(report[0])

    def test_all_end_when_one_is_killed(self, job: WholeJob) -> None:
        assert job.done.returncode != 0
        assert job.seconds_after_the_death < ENDED_SECONDS


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
