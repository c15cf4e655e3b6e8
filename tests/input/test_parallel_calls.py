"""map with several calls at once: same elements in the same order, errors in their turn, no thread left."""

import gc
import threading
import traceback
import weakref

import numpy as np
import pytest

from mpidist.core import context
from mpidist.input.dataset import Dataset
from mpidist.input.input_options import InputWorkers
from tests.input.policy_helpers import stream
from tests.input.worker_threads import run_workers, steps_of

pytestmark = pytest.mark.one_rank

SECONDS = 60


def call_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("mpidist-call")]


def batches(count):
    return Dataset.range(count * 3).batch(3)


class Meeting:
    """A function that returns only when as many calls of it as expected are under way."""

    def __init__(self, calls):
        self.barrier = threading.Barrier(calls, timeout=SECONDS)

    def __call__(self, x):
        self.barrier.wait()
        return x * 2


@pytest.mark.parametrize("source", [Dataset.range, stream, batches])
def test_calls_meet_and_elements_keep_their_order(source):
    found = list(source(12).map(Meeting(4), num_parallel_calls=4))
    assert np.array_equal(found, [2 * x for x in source(12)])
    assert call_threads() == []


def test_the_rows_of_one_batch_are_shared_among_the_threads():
    found = list(Dataset.range(16).shuffle(seed=1).map(Meeting(4), num_parallel_calls=4).batch(16))
    assert sorted(found[0].tolist()) == list(range(0, 32, 2))


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_batches_of_any_size(rows):
    mapped = Dataset.range(rows).map(lambda x: x + 1, num_parallel_calls=3)
    assert [b.tolist() for b in mapped.batch(5)] == [b.tolist() for b in Dataset.range(1, rows + 1).batch(5)]


def test_only_the_function_that_asked_for_threads_runs_in_them():
    seen = {"before": set(), "in": set(), "after": set()}

    def note(where):
        def function(x):
            seen[where].add(threading.current_thread().name)
            return x

        return function

    for batched in (True, False):
        dataset = Dataset.range(40).map(note("before")).map(note("in"), num_parallel_calls=2).map(note("after"))
        assert len(list(dataset.batch(10) if batched else dataset)) == (4 if batched else 40)
    here = {threading.current_thread().name}
    assert seen["before"] == seen["after"] == here
    assert all(name.startswith("mpidist-call") for name in seen["in"])


def test_side_by_side_with_others():
    doubled = Dataset.range(10).map(lambda x: x * 2, num_parallel_calls=2)
    pairs = Dataset.zip((Dataset.range(8), doubled))
    assert [(int(a), int(b)) for a, b in pairs] == [(x, 2 * x) for x in range(8)]
    assert [(int(a), int(b)) for a, b in pairs.map(lambda a, b: (b, a), 3)] == [(2 * x, x) for x in range(8)]
    first, second = next(iter(pairs.map(lambda a, b: (a, b + 1)).batch(8)))
    assert second.tolist() == (2 * first + 1).tolist()


@pytest.mark.parametrize("source", [Dataset.range, stream])
def test_no_more_calls_are_under_way_than_asked_for_and_no_more_results_held(source):
    started, let_go = [], threading.Event()
    fourth = threading.Event()

    def function(x):
        started.append(int(x))
        if len(started) == 4:
            fourth.set()
        return x

    iterator = iter(source(1000).map(function, num_parallel_calls=3))
    next(iterator)
    assert fourth.wait(SECONDS)  # with the one handed over, one more than the threads
    iterator.close()
    assert len(started) == 4
    assert not let_go.is_set()


@pytest.mark.parametrize("source", [Dataset.range, stream])
def test_an_error_comes_in_its_turn_with_its_own_traceback(source):
    def fails(x):
        if x == 3:
            raise OSError("cannot decode 3")
        return x

    iterator = iter(source(10).map(fails, num_parallel_calls=4))
    assert [int(next(iterator)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="decode 3") as caught:
        next(iterator)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "fails"
    assert call_threads() == []


def test_an_error_of_the_source_comes_after_the_elements_before_it():
    def numbers():
        yield from range(3)
        raise OSError("the disk is gone")

    iterator = iter(Dataset.from_generator(numbers).map(lambda x: x, num_parallel_calls=8))
    assert [int(next(iterator)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="disk"):
        next(iterator)


def test_an_error_in_a_batch_makes_no_cycle():
    class Failed(Exception):
        pass

    def fails(_):
        raise Failed

    dataset = Dataset.range(8).map(fails, num_parallel_calls=2).batch(4)

    def fail():
        try:
            next(iter(dataset))
        except Failed as error:
            return weakref.ref(error)

    gc.disable()
    try:
        kept = fail()
        for thread in call_threads():
            thread.join(SECONDS)
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("end", ["close", "drop"])
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("source", [Dataset.range, stream, batches])
def test_threads_end_with_the_iterator(source, prefetch, end):
    dataset = source(1000).map(lambda x: x, num_parallel_calls=3)
    iterator = iter(dataset.prefetch(2) if prefetch else dataset)
    next(iterator)
    threads = call_threads()
    assert threads
    if end == "close":
        iterator.close()
        assert call_threads() == []
    del iterator
    gc.collect()
    for thread in threads:
        thread.join(SECONDS)
    assert call_threads() == []


def test_closing_while_a_reader_waits_for_calls_that_never_begin():
    busy, let_go = threading.Event(), threading.Event()

    def function(x):
        busy.set()
        assert let_go.wait(SECONDS)
        return x

    iterator = iter(Dataset.range(100).map(function, num_parallel_calls=2).batch(50).prefetch(1))
    asking = threading.Thread(target=lambda: list(iterator))
    asking.start()
    assert busy.wait(SECONDS)
    closing = threading.Thread(target=iterator.close)
    closing.start()
    let_go.set()
    closing.join(SECONDS)
    asking.join(SECONDS)
    assert (closing.is_alive(), asking.is_alive()) == (False, False)
    assert call_threads() == []


def test_calls_are_outside_of_any_strategy():
    seen = []
    list(Dataset.range(4).map(lambda x: seen.append(context.has_strategy()) or x, num_parallel_calls=2))
    assert seen == [False] * 4


@pytest.mark.parametrize("calls", [0, -2])
def test_numbers_that_are_none(calls):
    with pytest.raises(ValueError, match="num_parallel_calls"):
        Dataset.range(3).map(lambda x: x, num_parallel_calls=calls)
    assert [int(x) for x in Dataset.range(3).map(lambda x: x, num_parallel_calls=-1)] == [0, 1, 2]


def test_each_worker_calls_it_for_its_own_rows_only():
    from mpidist.input.distribute import distribute_dataset

    def work(workers: InputWorkers):
        called = []
        dataset = Dataset.range(24).map(lambda x: called.append(int(x)) or x, 3).shuffle(seed=4).batch(8)
        distributed = distribute_dataset(dataset, workers, context.get_strategy())
        return steps_of(distributed), sorted(called)

    results = run_workers(work, (1, 1))
    for result in results:
        assert not isinstance(result, Exception), result
    rows = [sorted(x for step in steps for part in step for x in part) for steps, _ in results]
    assert rows == [called for _, called in results]
    assert sorted(rows[0] + rows[1]) == list(range(24))
