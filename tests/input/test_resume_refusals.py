"""States that are refused, passes that failed, and ranks that do not go on alike."""

import pytest

from mpidist.core.errors import MismatchError
from mpidist.input.dataset import Dataset
from mpidist.input.distribute import distribute_dataset, distribute_from_function
from mpidist.input.input_options import InputContext, InputWorkers
from tests.input.policy_helpers import rows_of
from tests.input.resume_helpers import CASES, begin, go_on_error, restored, rows, sharded, streamed
from tests.input.worker_threads import lists, run_workers

pytestmark = pytest.mark.one_rank


def test_what_is_no_state_is_refused():
    state = begin(CASES["rows"], (2,), 4, 1)[0][1]
    restored(state)
    with pytest.raises(TypeError, match="state is 3 of type int. Pass the result of state"):
        restored(3)
    with pytest.raises(ValueError, match="format None and version None"):
        restored({})
    for change in ({"steps": -1}, {"steps": True}, {"seeds": [1.5]}, {"replica_counts": []}, {"replica_counts": [0]}):
        with pytest.raises(ValueError, match="state is damaged"):
            restored({**state, **change})
    with pytest.raises(ValueError, match="state is damaged"):
        restored({key: value for key, value in state.items() if key != "rows"})


def test_the_state_of_another_dataset_is_refused():
    state = begin(CASES["rows"], (2,), 4, 1)[0][1]
    with pytest.raises(
        ValueError, match=r"another dataset, with 1 shuffles.*\n  range\(0, 37\).*\n.*\n  range\(0, 38\)"
    ):
        restored(state, lambda size: Dataset.range(38).shuffle().map(lambda x: x).batch(size))
    with pytest.raises(ValueError, match="another dataset"):
        restored(state, streamed)
    with pytest.raises(ValueError, match="another dataset"):
        restored(state, lambda size: rows(size, seed=1))


def test_only_global_batches_may_change_their_size():
    state = begin(CASES["files"], (1, 1), 4, 1)[0][1]
    for result in go_on_error(CASES["files"], (1, 1), 8, state):
        assert isinstance(result, Exception)
        assert "batch(4)" in str(result) or "a worker failed" in str(result)


def test_different_states_on_different_ranks_are_an_error_on_all():
    states = [state for taken in (0, 1) for _, state, _, _ in begin(CASES["rows"], (1, 1), 4, taken)[:1]]

    def work(workers):
        iter(CASES["rows"].distribute(workers, 4)).restore(states[workers.worker_id])

    for result in run_workers(work, (1, 1)):
        assert isinstance(result, MismatchError)
        assert "the same state on every rank" in str(result)


def test_functions_that_look_elsewhere_than_at_their_context_are_an_error_on_another_layout():
    def begun(workers):
        rank = workers.worker_id
        return iter(
            distribute_from_function(
                lambda ctx: Dataset.range(9).batch(1 + rank * ctx.input_pipeline_id), workers, None
            )
        )

    state = run_workers(lambda workers: begun(workers).state(), (1, 1, 1))[0]
    for result in run_workers(lambda workers: begun(workers).restore(state), (1, 1)):
        assert isinstance(result, MismatchError)
        assert "depends on its InputContext alone" in str(result)


def test_another_division_is_refused():
    state = begin(CASES["off"], (2,), 4, 1)[0][1]
    with pytest.raises(ValueError, match=r"got its rows by AutoShardPolicy.OFF, and .* its part of each global batch"):
        restored(state)
    state = begin(CASES["function"], (2,), 4, 1)[0][1]
    with pytest.raises(ValueError, match="got what a function made for it"):
        iter(sharded(4, InputContext(1, 0, 2))).restore(state)


def test_a_state_behind_the_end_is_refused():
    for case in (CASES["rows"], CASES["files"]):
        state = begin(case, (2,), 4, 100)[0][1]
        restored(state, case.make, case.policy)
        if case is CASES["rows"]:
            with pytest.raises(ValueError, match="behind the end"):
                restored({**state, "steps": state["steps"] + 1}, case.make, case.policy)
            with pytest.raises(ValueError, match="behind the end"):
                restored({**state, "rows": 40}, case.make, case.policy)


def test_the_failure_of_a_pass_is_not_its_end():
    def fail_once(x, failed=[]):  # noqa: B006 - kept from call to call
        if x == 9 and not failed:
            failed.append(x)
            raise OSError("the disk is gone")
        return x

    dataset = Dataset.range(20).map(fail_once).batch(4)
    iterator = iter(distribute_dataset(dataset.prefetch(1), InputWorkers(1, 0, (2,), None, True), None))
    seen = [lists(next(iterator)) for _ in range(2)]
    with pytest.raises(OSError, match="disk"):
        next(iterator)
    with pytest.raises(RuntimeError, match="failed before, with OSError: the disk is gone"):
        next(iterator)
    iterator.restore(iterator.state())
    assert sorted(rows_of(seen) + rows_of(lists(step) for step in iterator)) == list(range(20))
