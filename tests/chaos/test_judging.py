"""The chaos driver finds what it is there to find: lost steps, hangs, crashes, processes that stay, unclear errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.chaos.job import Ended, Note
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
