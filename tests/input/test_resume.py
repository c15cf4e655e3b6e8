"""Iterators that go on where others stood: state() and restore(), in the same layout and in others."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.core.seed import _State, next_seed, set_seed
from mpidist.input.dataset import Dataset
from mpidist.input.distribute import distribute_dataset, distribute_from_function
from mpidist.input.input_options import AutoShardPolicy, InputOptions, InputReplicationMode, InputWorkers
from tests.input.policy_helpers import FILE, OFF, named, read, rows_of, stream
from tests.input.resume_helpers import (
    CASES,
    LAYOUTS,
    NAMES,
    SEEN,
    Case,
    all_rows,
    begin,
    files,
    go_on,
    hinted,
    layouts,
    restored,
    rows,
    shuffled,
)
from tests.input.worker_threads import lists, run_workers, steps_of

pytestmark = pytest.mark.one_rank


@pytest.mark.parametrize("counts", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_same_layout_goes_on_as_if_nothing_had_been(name, counts):
    for taken in (0, 1, 3, 100):
        begun = begin(CASES[name], counts, 4, taken, passes=1)
        states = [state for _, state, _, _ in begun]
        assert all(state == states[0] for state in states)
        for (_, _, rest, following), (first, _, more, next_pass) in zip(
            begun, go_on(CASES[name], counts, 4, states), strict=True
        ):
            assert (first, more) == (rest, [])
            assert next_pass == following


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from([name for name in CASES if name != "off"]),
    old=layouts,
    new=layouts,
    newest=layouts,
    size=st.integers(1, 9),
    taken=st.integers(0, 6),
    more=st.integers(0, 4),
)
def test_nothing_is_lost_and_nothing_comes_twice_from_layout_to_layout(name, old, new, newest, size, taken, more):
    case = CASES[name]
    begun = begin(case, old, size, taken)
    second = go_on(case, new, size, [begun[0][1]], more)
    third = go_on(case, newest, size, [second[0][1]])
    seen = all_rows(worker[0] for worker in begun) + all_rows(worker[0] for worker in second)
    seen += all_rows(worker[0] for worker in third)
    assert sorted(seen) == SEEN.get(name, list(range(37)))
    assert sorted(all_rows(worker[3] for worker in third)) == SEEN.get(name, list(range(37)))


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from([name for name in CASES if name != "function"]),
    old=layouts,
    new=layouts,
    size=st.integers(1, 9),
    taken=st.integers(0, 6),
)
def test_global_batches_stay_what_they_would_have_been(name, old, new, size, taken):
    case = CASES[name]
    begun = begin(case, old, size, taken)
    after = go_on(case, new, size, [begun[0][1]])

    def global_batches(workers, which):
        steps = zip(*(worker[which] for worker in workers), strict=True)
        return [sorted(row for step in workers_steps for part in step for row in part) for workers_steps in steps]

    assert global_batches(after, 0) == global_batches(begun, 2)


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(["rows", "stream"]),
    old=layouts,
    new=layouts,
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    taken=st.integers(0, 3),
    more=st.integers(0, 3),
)
def test_global_batches_may_change_their_size(name, old, new, sizes, taken, more):
    case = CASES[name]
    begun = begin(case, old, sizes[0], taken)
    second = go_on(case, new, sizes[1], [begun[0][1]], more)
    third = go_on(case, old, sizes[2], [second[0][1]])
    seen = all_rows(worker[0] for each in (begun, second, third) for worker in each)
    assert sorted(seen) == list(range(37))


def test_rows_before_the_position_are_not_read():
    asked = []

    class Counted:
        def __len__(self):
            return 1000

        def __getitem__(self, i):
            asked.append(i)
            return i

    one = InputWorkers(1, 0, (2,), None, True)
    iterator = iter(distribute_dataset(Dataset.from_source(Counted()).batch(10), one, None))
    state = {**iterator.state(), "steps": 90}
    asked.clear()
    iterator.restore(state)
    next(iterator)
    assert sorted(asked) == list(range(900, 910))


def test_functions_of_batches_are_not_called_for_what_was_taken():
    called = []

    def note(batch):
        called.append(int(batch[0]))
        return batch

    dataset = stream(20).batch(2).map(note)
    iterator = iter(dataset)
    iterator.restore({**iterator.state(), "steps": 7})
    assert next(iterator).tolist() == [14, 15]
    assert called == [14]


def test_an_endless_dataset_goes_on_elsewhere():
    case = Case(lambda size: Dataset.range(5).shuffle().repeat().batch(size))

    def some(counts, states):
        def work(workers):
            iterator = iter(case.distribute(workers, 4))
            if states is not None:
                iterator.restore(states)
            steps = [lists(step) for step in islice(iterator, 3)]
            return steps, iterator.state()

        return run_workers(work, counts)

    first = some((1, 1), None)
    second = some((1, 1, 1), first[0][1])
    third = some((2,), second[0][1])
    seen = all_rows(worker[0] for each in (first, second, third) for worker in each)
    assert sorted(np.bincount(seen).tolist()) == [7, 7, 7, 7, 8]


def test_endless_pipelines_of_functions_go_on_in_turn():
    def make(size, ctx):
        return Dataset.range(ctx.input_pipeline_id, 100, ctx.num_input_pipelines).repeat().batch(size)

    case = Case(make, from_function=True)

    def some(counts, state):
        def work(workers):
            iterator = iter(case.distribute(workers, 1))
            if state is not None:
                iterator.restore(state)
            return [lists(step) for step in islice(iterator, 2)], iterator.state()

        return run_workers(work, counts)

    first = some((1, 1), None)
    second = some((1, 1, 1), first[0][1])
    third = some((2,), second[0][1])
    assert all_rows([worker[0] for worker in first]) == [0, 2, 1, 3]
    assert [worker[0] for worker in second] == [[([4],), ([7],)], [([5],), ([8],)], [([6],), ([9],)]]
    assert third[0][0] == [([10], [11]), ([12], [13])]
    assert third[0][1]["replica_counts"] == [1, 1]


def test_pipelines_of_replicas():
    options = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)

    def distributed(replicas):
        workers = InputWorkers(1, 0, (replicas,), None, True)
        return distribute_from_function(
            lambda ctx: Dataset.range(ctx.input_pipeline_id, 10, ctx.num_input_pipelines).batch(1),
            workers,
            None,
            options,
            per_replica_allowed=True,
        )

    iterator = iter(distributed(2))
    assert lists(next(iterator)) == ([0], [1])
    other = iter(distributed(3))
    other.restore(iterator.state())
    assert [lists(step) for step in other] == [([2], [3], [4]), ([5], [6], [7]), ([8], [9], [])]


def test_iterators_of_plain_datasets():
    dataset = Dataset.range(10).shuffle()
    whole = [int(x) for x in iter(dataset)]
    iterator = iter(dataset)
    first = [int(next(iterator)) for _ in range(4)]
    again = Dataset.range(10).shuffle()
    other = iter(again)
    other.restore(iterator.state())
    rest = [int(x) for x in other]
    assert rest == [int(x) for x in iterator]
    assert sorted(first + rest) == sorted(whole)
    assert [int(x) for x in again] == [int(x) for x in dataset]


def test_a_plain_dataset_goes_on_where_ranks_stood_and_the_other_way_round():
    begun = begin(CASES["files"], (1, 1), 4, 1)
    alone = files(4).with_options(auto_shard_policy=FILE)
    iterator = iter(alone)
    iterator.restore(begun[0][1])
    batch = next(iterator)
    assert sorted(batch.tolist()) == sorted(row for worker in begun for part in worker[2][0] for row in part)
    after = go_on(CASES["files"], (1, 2), 4, [iterator.state()])
    left = all_rows(worker[0] for worker in begun) + batch.tolist() + all_rows(worker[0] for worker in after)
    assert sorted(left) == SEEN["files"]


def test_a_rank_whose_data_had_run_out_gets_batches_without_rows():
    case = Case(lambda size: Dataset.from_files(named([2, 40])[0], read).batch(size), FILE)
    begun = begin(case, (1, 1), 4, 5)
    after = go_on(case, (1, 1), 4, [begun[0][1]])
    assert after[0][0] == [([],)] * len(after[1][0])
    assert all_rows(worker[0] for worker in after) == all_rows(worker[2] for worker in begun)


def test_what_is_read_ahead_does_not_count():
    dataset = Dataset.range(100).batch(2).prefetch(8)
    iterator = iter(dataset)
    next(iterator)
    assert iterator.state()["steps"] == 1
    iterator.close()


@pytest.mark.parametrize("policy", [AutoShardPolicy.OFF, AutoShardPolicy.HINT])
def test_own_orders_go_on_elsewhere(policy):
    case = Case(rows if policy is OFF else hinted, policy)
    begun = begin(case, (1, 1), 4, 2)
    after = go_on(case, (1, 1, 1), 4, [begun[0][1]])
    times = 2 if policy is OFF else 1
    seen = all_rows(worker[0] for worker in begun) + all_rows(worker[0] for worker in after)
    assert sorted(seen) == sorted(list(range(37)) * times)


@pytest.mark.parametrize("old", [(2,), (3,)])
@pytest.mark.parametrize("new", [(2,), (3,), (4,)])
def test_pipelines_of_replicas_with_shuffles(old, new):
    options = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)

    def begun(counts):
        workers = InputWorkers(1, 0, counts, None, True)
        dataset = distribute_from_function(
            lambda ctx: shuffled(1, ctx), workers, None, options, per_replica_allowed=True
        )
        return dataset, iter(dataset)

    dataset, iterator = begun(old)
    first = [lists(next(iterator)) for _ in range(4)]
    other, again = begun(new)
    again.restore(iterator.state())
    assert sorted(rows_of(first) + rows_of(lists(step) for step in again)) == list(range(36))
    for each in (dataset, other):
        assert sorted(rows_of(steps_of(each))) == list(range(36))


@pytest.mark.parametrize("new", [(1, 1), (1, 1, 1), (2,)])
def test_functions_with_shuffles(new):
    case = Case(shuffled, from_function=True)
    begun = begin(case, (1, 1), 2, 3)
    after = go_on(case, new, 2, [begun[0][1]])
    assert sorted(all_rows(worker[0] for worker in begun) + all_rows(worker[0] for worker in after)) == list(range(36))
    assert sorted(all_rows(worker[3] for worker in after)) == list(range(36))


def test_a_shuffle_on_one_rank_only():
    def make(size, ctx):
        dataset = Dataset.range(ctx.input_pipeline_id, 20, 2)
        return (dataset.shuffle() if ctx.input_pipeline_id else dataset).batch(size)

    case = Case(make, from_function=True)
    begun = begin(case, (1, 1), 1, 5)
    after = go_on(case, (1, 1), 1, [begun[0][1]])
    assert sorted(all_rows(worker[0] for worker in begun) + all_rows(worker[0] for worker in after)) == list(range(20))
    assert [worker[0] for worker in after] == [worker[2] for worker in begun]


def test_an_iterator_keeps_the_seeds_that_it_began_with():
    dataset, other = Dataset.range(20).shuffle(), Dataset.range(20).shuffle()
    first = iter(dataset)
    begun = [int(next(first)) for _ in range(5)]
    iter(dataset).restore(iter(other).state())
    again = iter(dataset)
    again.restore(first.state())
    assert sorted(begun + [int(x) for x in again]) == list(range(20))


def test_files_may_have_moved():
    state = begin(CASES["files"], (2,), 4, 1)[0][1]

    def moved(size):
        def read_moved(path):
            return read(path.removeprefix("/scratch/2/"))

        return Dataset.from_files([f"/scratch/2/{name}" for name in NAMES], read_moved).shuffle(5).batch(size)

    restored(state, moved, FILE)
    with pytest.raises(ValueError, match="another dataset"):
        restored(state, lambda size: Dataset.from_files(NAMES[:3], read).shuffle(5).batch(size), FILE)


def test_restoring_draws_no_seeds():
    state = begin(Case(shuffled, from_function=True), (1, 1), 2, 1)[0][1]
    found = []
    for restores in (False, True):
        set_seed(7)
        iterator = iter(
            distribute_from_function(lambda ctx: shuffled(2, ctx), InputWorkers(1, 0, (3,), None, True), None)
        )
        if restores:
            iterator.restore(state)
        found.append(next_seed())
        _State.seed = None
    assert found[0] == found[1]


def test_nothing_before_the_position_is_read_of_batches_that_are_cut_anew():
    called = []

    def note(batch):
        called.append(len(batch))
        return batch

    dataset = Dataset.range(400).batch(4, drop_remainder=True).map(note).with_options(auto_shard_policy=OFF)
    iterator = iter(distribute_dataset(dataset, InputWorkers(1, 0, (2,), None, True), None))
    state = {**iterator.state(), "steps": 90}
    called.clear()
    iterator.restore(state)
    assert lists(next(iterator)) == ([360, 361], [362, 363])
    assert len(called) == 1
