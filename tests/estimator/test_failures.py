"""Whatever ends the training, or the evaluation, ends the others: with a message, and soon."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.elastic.test_run import needs_ulfm
from tests.estimator import programs
from tests.support.ranks.jobs import ROOT, run_alone, run_script
from tests.support.speed import scaled

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

FOUR = "chief:1,worker:2,evaluator:1"
# Who waits hears of it within this time.
SOON_SECONDS = scaled(5.0)


def job(what: str, directory: Path, jobs: str, flags: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    script, ranks = ROOT / "tests" / "estimator" / "programs.py", sum(int(part[-1]) for part in jobs.split(","))
    return run_script(script, ranks, what, str(directory), env={"MPIDIST_JOBS": jobs}, flags=flags, timeout=40)


# In a job that goes on ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, programs.Ended]]:
    """How each failure ended on each of four ranks: chief, two workers, evaluator."""
    return run_alone(programs.all_failures, 4, str(tmp_path_factory.mktemp("failures")))


def check_told(others: Sequence[programs.Ended], failed: programs.Ended, said: str) -> None:
    for kind, text, when in others:
        assert kind == "PeerError"
        assert said in text
        assert when - failed[2] < SOON_SECONDS


def test_those_that_wait_for_a_worker_that_fails(ends: list[dict[str, programs.Ended]]) -> None:
    chief, failed, worker, evaluator = [end["worker"] for end in ends]
    assert failed[:2] == ("ValueError", "no more data")
    said = "worker 0 (rank 1) has failed in train_and_evaluate(): ValueError: no more data"
    check_told([chief, worker, evaluator], failed, said)


def test_those_that_wait_for_an_evaluator_that_fails(ends: list[dict[str, programs.Ended]]) -> None:
    *others, failed = [end["evaluator"] for end in ends]
    assert failed[:2] == ("ZeroDivisionError", "no rows")
    check_told(others, failed, "evaluator 0 (rank 3) has failed in train_and_evaluate(): ZeroDivisionError: no rows")


def test_a_training_without_a_checkpoint(ends: list[dict[str, programs.Ended]]) -> None:
    *others, failed = [end["no checkpoint"] for end in ends]
    assert failed[0] == "FileNotFoundError"
    assert "expected train_fn to save one" in failed[1]
    check_told(others, failed, "evaluator 0 (rank 3) has failed in train_and_evaluate(): FileNotFoundError")


def test_wrong_roles_are_an_error_on_all(ends: list[dict[str, programs.Ended]]) -> None:
    found = {end["roles"][:2] for end in ends}
    assert len(found) == 1
    kind, text = found.pop()
    assert kind == "ValueError"
    assert "there are 2 tasks 'evaluator'" in text


def test_ranks_that_do_something_else_find_out(ends: list[dict[str, programs.Ended]]) -> None:
    found = {end["different"][:2] for end in ends}
    assert len(found) == 1
    kind, text = found.pop()
    assert kind == "MismatchError"
    assert "making a train_and_evaluate" in text
    assert "making a MultiWorkerMirroredStrategy" in text


def test_where_all_leave_the_evaluator_leaves_with_the_code_of_the_chief(ends: list[dict[str, programs.Ended]]) -> None:
    found = [end["all leave"][:2] for end in ends]
    assert found == [("SystemExit", "3"), ("SystemExit", "4"), ("SystemExit", "5"), ("SystemExit", "3")]


def test_where_one_leaves_the_others_get_an_error(ends: list[dict[str, programs.Ended]]) -> None:
    chief, left, worker, evaluator = [end["one leaves"] for end in ends]
    assert left[:2] == ("SystemExit", "0")
    check_told([chief, worker, evaluator], left, "worker 0 (rank 1) by sys.exit(0)")


# In a job that ends ---------------------------------------------------------------------------------------------------


def test_a_training_that_raises_ends_the_job(tmp_path: Path) -> None:
    done = job("raise", tmp_path, FOUR)
    assert done.returncode != 0
    assert "rank 2 of 4 on host" in done.stderr
    assert "ValueError: no more data" in done.stderr


def test_a_killed_trainer_ends_the_job(tmp_path: Path) -> None:
    done = job("die", tmp_path, FOUR)
    assert done.returncode != 0
    assert done.stdout == ""


@needs_ulfm
def test_a_killed_trainer_is_noticed_where_mpi_goes_on(tmp_path: Path) -> None:
    done = job("lone", tmp_path, "worker:1,evaluator:1", ("--with-ft", "ulfm"))
    # mpirun returns 0 where one rank was lost and another ends the job.
    assert "RankLostError: a rank was lost while evaluator 0 (rank 1) waited in train_and_evaluate()" in done.stderr


def test_preempted_all_save_and_end_with_code_42(tmp_path: Path) -> None:
    done = job("preempted", tmp_path, "chief:1,worker:1,evaluator:1")
    assert done.returncode == 42, done.stderr
    assert done.stderr.count("preempted: saved") == 1
