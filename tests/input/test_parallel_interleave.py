"""interleave with several calls at once: the order of one thread, reads that meet, errors in their turn."""

import gc
import threading
import traceback
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.input.dataset import Dataset

pytestmark = pytest.mark.one_rank

SECONDS = 60


def numbers(dataset):
    return [int(x) for x in dataset]


def call_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("mpidist-call")]


@given(
    lengths=st.lists(st.integers(0, 6), max_size=7),
    cycle_length=st.integers(1, 5),
    block_length=st.integers(1, 4),
    calls=st.integers(2, 6),
    shuffled=st.booleans(),
)
def test_the_order_is_that_of_one_thread(lengths, cycle_length, block_length, calls, shuffled):
    def made(number):
        start = 10 * int(number)
        dataset = Dataset.from_generator(lambda: iter(range(start, start + lengths[number])))
        return dataset.shuffle(10, seed=1) if shuffled else dataset

    def interleaved(num_parallel_calls):
        source = Dataset.range(len(lengths))
        return numbers(source.interleave(made, cycle_length, block_length, num_parallel_calls).repeat(2))

    assert interleaved(calls) == interleaved(None)


def test_datasets_are_opened_and_read_at_once():
    opening, reading = threading.Barrier(3, timeout=SECONDS), threading.Barrier(3, timeout=SECONDS)

    def made(number):
        opening.wait()

        def generate():
            for _ in range(2):
                reading.wait()
                yield int(number)

        return Dataset.from_generator(generate)

    dataset = Dataset.range(3).interleave(made, cycle_length=3, num_parallel_calls=3)
    iterator = iter(dataset)
    assert [int(next(iterator)) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    assert list(iterator) == []
    assert call_threads() == []


def test_the_next_dataset_is_opened_before_the_last_one_ends():
    opened = {number: threading.Event() for number in range(6)}

    def made(number):
        opened[int(number)].set()
        return Dataset.range(number, number + 1).repeat(5)

    iterator = iter(Dataset.range(6).interleave(made, cycle_length=1, num_parallel_calls=2))
    assert int(next(iterator)) == 0
    assert opened[1].wait(SECONDS)
    assert opened[2].wait(SECONDS)
    assert not opened[3].is_set()
    iterator.close()
    assert call_threads() == []


def failing(number):
    def generate():
        yield 10 * int(number)
        yield 10 * int(number) + 1
        if number == 1:
            raise OSError("file 1 is gone")

    return Dataset.from_generator(generate)


def test_an_error_comes_after_the_elements_before_it_with_its_own_traceback():
    iterator = iter(Dataset.range(3).interleave(failing, cycle_length=2, block_length=3, num_parallel_calls=2))
    assert [int(next(iterator)) for _ in range(4)] == [0, 1, 10, 11]
    with pytest.raises(OSError, match="file 1") as caught:
        next(iterator)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "generate"
    assert call_threads() == []


def test_an_error_of_the_input_comes_in_its_turn():
    def source():
        yield 0
        raise OSError("the list is gone")

    dataset = Dataset.from_generator(source).interleave(failing, cycle_length=2, block_length=2, num_parallel_calls=2)
    iterator = iter(dataset)
    assert [int(next(iterator)) for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="the list"):
        next(iterator)


def test_what_makes_no_dataset():
    with pytest.raises(TypeError, match="expected a Dataset"):
        numbers(Dataset.range(3).interleave(lambda x: x, num_parallel_calls=2))
    with pytest.raises(ValueError, match="num_parallel_calls"):
        Dataset.range(3).interleave(Dataset.range, num_parallel_calls=0)


def test_errors_make_no_cycles():
    class Failed(Exception):
        pass

    def fails(_):
        raise Failed

    dataset = Dataset.range(3).interleave(fails, num_parallel_calls=2)

    def fail():
        try:
            next(iter(dataset))
        except Failed as error:
            return weakref.ref(error)

    gc.disable()
    try:
        assert fail()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("prefetch", [False, True])
def test_dropping_the_iterator_ends_the_threads(prefetch):
    dataset = Dataset.range(100).interleave(lambda x: Dataset.range(x), num_parallel_calls=3)
    iterator = iter(dataset.prefetch(2) if prefetch else dataset)
    next(iterator)
    threads = call_threads()
    assert threads
    del iterator
    gc.collect()
    for thread in threads:
        thread.join(SECONDS)
    assert call_threads() == []
