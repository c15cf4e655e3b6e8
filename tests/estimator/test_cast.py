"""Who does what, of what the ranks have told."""

from __future__ import annotations

import pytest

from mpidist.estimator.by_role import Told, cast_of

pytestmark = pytest.mark.one_rank


def told(*tasks: str) -> list[Told]:
    split = [task.split(":") for task in tasks]
    return [(job, int(index), "/out") for job, index in split]


def test_a_chief_two_workers_and_an_evaluator() -> None:
    cast = cast_of(told("evaluator:0", "worker:0", "chief:0", "worker:1"), 1)
    assert (cast.chief, cast.evaluator, cast.trainers) == (2, 0, [1, 2, 3])
    assert (cast.trains, cast.evaluates) == (True, False)
    assert cast.name(3) == "worker 1 (rank 3)"


def test_without_a_chief_the_first_worker_is_it_and_evaluates() -> None:
    cast = cast_of(told("ps:0", "worker:1", "worker:0"), 0)
    assert (cast.chief, cast.evaluator, cast.trainers) == (2, 2, [1, 2])
    assert (cast.trains, cast.evaluates) == (False, False)


def test_with_a_coordinator_the_workers_do_not_train() -> None:
    cast = cast_of(told("chief:0", "worker:0", "ps:0"), 1, ("chief",))
    assert (cast.trainers, cast.trains, cast.evaluator) == ([0], False, 0)


def test_resolvers_that_know_nothing() -> None:
    cast = cast_of([(None, None, "/out")] * 2, 1)
    assert cast.tasks == (("worker", 0), ("worker", 1))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (told("chief:0", "evaluator:0", "evaluator:1"), "there are 2 tasks 'evaluator' .*; expected at most one"),
        (told("chief:0", "chief:1"), "there are 2 tasks 'chief'"),
        (
            told("evaluator:0"),
            r"no rank trains \(rank 0: evaluator\). At least one rank must have the job chief or worker",
        ),
        (told("worker:0", "worker:1", "worker:0"), "ranks 0 and 2 are both worker 0"),
        (told("worker:0", "master:0"), "rank 1 is master:0 by its cluster resolver; expected one of chief"),
        ([("worker", 0, "/out"), (None, None, "/out")], "rank 1 is None:None"),
        ([("worker", 0, "/a"), ("worker", 1, "/b")], "different checkpoint_dir: /a and /b; expected the same"),
    ],
)
def test_roles_that_do_not_fit(given: list[Told], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        cast_of(given, 0)
