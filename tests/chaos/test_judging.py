"""The chaos driver finds what it is there to find: lost steps, hangs, crashes, processes that stay, unclear errors."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.chaos import report
from tests.chaos.job import Ended, Job, Note, NotReachedError
from tests.chaos.rank_faults import went_on
from tests.chaos.trial import STEPS, FailedError, Reference, Trial

pytestmark = [pytest.mark.one_rank, pytest.mark.timeout(300)]

RIGHT = Ended(
    0, f"done after {STEPS} steps: loss 0.1, test accuracy 98.61%, weights 12; checkpoint in out", "", False, 0, []
)


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    """A trial whose job has come to the weights of the undisturbed run, up to rounding."""
    reference = Reference(tmp_path, tmp_path / "expected.npz")
    np.savez(reference.dump, losses=np.zeros(2), w=np.ones(3))
    found = Trial(tmp_path, 1, "kill", reference, 4, is_short=True)
    np.savez(found.dump, losses=np.zeros(1), w=np.ones(3) + 1e-12)
    return found


def test_the_right_end(trial: Trial) -> None:
    trial.check_right(RIGHT)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hung": True}, "hung"),
        ({"left_behind": 2}, "2 processes were still there"),
        ({"stderr": "Fatal Python error: Aborted"}, "Fatal Python error"),
        ({"returncode": 1}, "ended with code 1; expected 0"),
        ({"stdout": "done after 359 steps: loss 0.1, test accuracy 98%"}, "no closing line"),
        ({"stdout": RIGHT.stdout.replace("98.61", "96.9")}, "test accuracy 96.9 %"),
    ],
)
def test_wrong_ends(trial: Trial, changed: dict[str, object], message: str) -> None:
    with pytest.raises(FailedError, match=message):
        trial.check_right(replace(RIGHT, **changed))  # type: ignore[arg-type]


def test_a_lost_step_shows_in_the_weights(trial: Trial) -> None:
    np.savez(trial.dump, losses=np.zeros(1), w=np.array([1, 1, 1 + 1e-5]))
    with pytest.raises(FailedError, match="weights differ by 1e-05"):
        trial.check_right(RIGHT)


def test_an_error_has_to_say_what_it_is(trial: Trial) -> None:
    failed = replace(RIGHT, returncode=1, stderr="OSError: [Errno 28] No space left on device")
    trial.check_clear_error(failed, "No space left")
    with pytest.raises(FailedError, match="no word of 'Too many open files'"):
        trial.check_clear_error(failed, "Too many open files")
    with pytest.raises(FailedError, match="expected an error"):
        trial.check_clear_error(RIGHT, "No space left")


def test_lost_steps_and_the_time_to_go_on(trial: Trial) -> None:
    notes = [Note(1.0, "step", 10, 1, 0), Note(1.1, "step", 11, 1, 0), Note(2.5, "begins", 10, 1, 0)]
    ended = replace(RIGHT, notes=[*notes, Note(3.0, "step", 11, 1, 0)])
    found = went_on(trial, ended, 2.0, "rank 1")
    assert (found.outcome, found.lost, found.seconds) == ("went on", 1, 1.0)
    with pytest.raises(FailedError, match="nobody began again"):
        went_on(trial, ended, 2.6, "rank 1")


@pytest.mark.jobs
def test_a_job_that_hangs_is_ended(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    with Job(tmp_path / "job", ["--out", out], 1) as job:
        pid = job.until_step(0, 1)
        os.kill(pid, signal.SIGSTOP)
        job.longest_silence = 0.0
        ended = job.end()
    assert ended.hung
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.long
@pytest.mark.jobs
def test_a_job_that_ends_too_early(tmp_path: Path) -> None:
    with Job(tmp_path / "job", ["--no-such-option"], 1) as job, pytest.raises(NotReachedError, match="no-such-option"):
        job.until_step(0, 1)


def test_the_report(tmp_path: Path) -> None:
    outcomes = [
        report.Outcome("kill", 1, "went on", "rank 1 after step 3", 1, 0.5),
        report.Outcome("kill", 2, "went on", "rank 0 after step 5", 0, 1.5),
        report.Outcome("kill", 3, report.FAILED, "the job hung"),
        report.Outcome("damage", 1, "refused", "all 3"),
    ]
    assert report.rows(outcomes) == [
        ("kill", "3", "2", "0", "0", "1", "1", "1.00", "1.50"),
        ("damage", "1", "0", "0", "1", "0", "-", "-", "-"),
    ]
    assert outcomes[0].line == "kill --seed 1: went on, 1 steps again, next step after 0.50 s (rank 1 after step 3)"
    report.write(tmp_path / "folder" / "chaos.json", outcomes, 1, {"fill_disk": "no root"})
    written = json.loads((tmp_path / "folder" / "chaos.json").read_text())
    assert (written["seed"], len(written["trials"]), written["skipped"]) == (1, 4, {"fill_disk": "no root"})
