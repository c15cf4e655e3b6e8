"""Dataset.prefetch: the same elements, read in a thread that ends with the iterator."""

import gc
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.core.errors import PeerError
from mpidist.input.dataset import Dataset
from mpidist.input.distribute import distribute_dataset, distribute_from_function
from mpidist.input.input_options import InputOptions, InputReplicationMode, InputWorkers
from tests.input.policy_helpers import stream
from tests.input.test_read_ahead import SECONDS, readers_alive
from tests.input.worker_threads import run_workers, steps_of

pytestmark = pytest.mark.one_rank

TWO = InputWorkers(1, 0, (2,), None, True)


class Samples:
    """A map-style dataset that remembers who asked for what."""

    def __init__(self, count):
        self.count = count
        self.asked = []
        self.threads = set()
        self.changed = threading.Condition()

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        with self.changed:
            self.asked.append(index)
            self.threads.add(threading.current_thread().name)
            self.changed.notify_all()
        return index

    def wait_until_asked_for(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.asked) >= count, SECONDS), self.asked
            assert len(self.asked) == count


def numbers(dataset):
    return [np.asarray(element).tolist() for element in dataset]


STEPS = st.lists(
    st.sampled_from(
        [
            ("batch", 3),
            ("shuffle", 5, 7),
            ("repeat", 2),
            ("skip", 1),
            ("take", 7),
            ("shard", 2, 1),
            ("map", lambda x: x + 1),
            ("filter", lambda x: np.sum(x) % 5 > 0),
        ]
    ),
    max_size=4,
    unique_by=lambda step: step[0],
)


@pytest.mark.parametrize("source", [Dataset.range, stream], ids=["rows", "stream"])
@settings(max_examples=60)
@given(length=st.integers(0, 15), steps=STEPS, places=st.sets(st.integers(0, 4), min_size=1), size=st.integers(1, 4))
def test_the_elements_and_their_order_are_the_same(source, length, steps, places, size):
    plain = prefetched = source(length)
    for place, (name, *args) in enumerate([*steps, ("take", -1)]):
        prefetched = prefetched.prefetch(size) if place in places else prefetched
        plain, prefetched = getattr(plain, name)(*args), getattr(prefetched, name)(*args)
    prefetched = prefetched.prefetch(size)
    assert prefetched.cardinality() == plain.cardinality()
    for _ in range(2):
        assert numbers(prefetched) == numbers(plain)
        assert readers_alive() == []
    assert prefetched.batch(2)._node.batched


@pytest.mark.parametrize(
    ("transform", "rows", "ahead"),
    [
        (lambda d: d.prefetch(3), 1, 3),
        (lambda d: d.batch(2).prefetch(3), 2, 6),
        (lambda d: d.prefetch(3).batch(2), 2, 4),
        (lambda d: d.prefetch(1).prefetch(2), 1, 3),
        (lambda d: d.batch(2).prefetch(1).prefetch(2), 2, 6),
        (lambda d: d.prefetch(3).map(lambda x: x).skip(0), 1, 3),
        (lambda d: d.batch(2).prefetch(3).take(50), 2, 6),
        (lambda d: d.batch(2).prefetch(3).map(lambda x: x), 2, 6),
        (lambda d: Dataset.zip(d.prefetch(3), Dataset.range(100)), 1, 3),
    ],
)
def test_how_far_rows_are_read_ahead(transform, rows, ahead):
    samples = Samples(100)
    iterator = iter(transform(Dataset.from_source(samples)))
    assert samples.asked == []
    for step in range(1, 6):
        next(iterator)
        samples.wait_until_asked_for(step * rows + ahead)
    iterator.close()
    assert readers_alive() == []
    assert samples.asked == list(range(5 * rows + ahead))
    assert samples.threads == {"mpidist-read-ahead"}


def test_a_look_at_the_elements_starts_no_thread():
    samples = Samples(10)
    dataset = Dataset.from_source(samples).batch(2).prefetch(2).map(lambda x: x).prefetch(2)
    dataset.element_spec
    distribute_dataset(dataset, TWO, None).element_spec
    iter(dataset)
    assert samples.threads <= {threading.current_thread().name}
    assert readers_alive() == []


def pipelines():
    def source():
        yield from range(10)

    return [
        Dataset.range(10).batch(2).prefetch(2),
        Dataset.range(10).prefetch(2),
        Dataset.from_generator(source).prefetch(2).batch(2),
        Dataset.from_generator(source).prefetch(2).repeat(),
        Dataset.from_generator(source).batch(2).prefetch(2).repeat().prefetch(2),
        Dataset.zip(Dataset.range(10).prefetch(2), Dataset.from_generator(source).prefetch(2)),
    ]


@pytest.mark.parametrize("dataset", pipelines(), ids=repr)
def test_the_thread_ends_with_the_iterator(dataset):
    iterator = iter(dataset)
    next(iterator)
    assert readers_alive()
    iterator.close()
    assert readers_alive() == []
    assert list(iterator) == []

    list(dataset.take(3))
    assert readers_alive() == []

    for _ in dataset:
        threads = readers_alive()
        break
    gc.collect()
    assert threads
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_an_error_in_the_thread_comes_in_its_turn():
    def read(x):
        if x == 4:
            raise OSError("the disk is gone")
        return x

    for dataset in (Dataset.range(9).map(read).batch(2).prefetch(5), stream(9).map(read).prefetch(5).batch(2)):
        iterator = iter(dataset)
        assert [next(iterator).tolist(), next(iterator).tolist()] == [[0, 1], [2, 3]]
        with pytest.raises(OSError, match="disk") as caught:
            next(iterator)
        assert caught.traceback[-1].name == "read"
        assert readers_alive() == []
        with pytest.raises(RuntimeError, match="failed before, with OSError: the disk is gone"):
            next(iterator)


@pytest.mark.parametrize("counts", [(1,), (3,), (1, 1), (2, 1)])
@pytest.mark.parametrize("source", [Dataset.range, stream], ids=["rows", "stream"])
def test_distributed_steps_are_the_same(source, counts):
    def work(workers):
        plain = source(23).shuffle(23, seed=3).batch(5)
        results = []
        for dataset in (plain, plain.prefetch(2), source(23).shuffle(23, seed=3).prefetch(4).batch(5).prefetch(1)):
            distributed = distribute_dataset(dataset, workers, None)
            results.append([steps_of(distributed), steps_of(distributed)])
        return results

    for plain, *others in run_workers(work, counts):
        assert others == [plain, plain]
    assert readers_alive() == []


def test_each_worker_reads_ahead_its_own_rows_only():
    def work(workers):
        samples = Samples(24)
        iterator = iter(distribute_dataset(Dataset.from_source(samples).batch(8).prefetch(1), workers, None))
        before = workers.communicator.exchanges
        next(iterator)
        samples.wait_until_asked_for(8)
        ahead = list(samples.asked)
        rest = len(list(iterator))
        return ahead, samples.asked, samples.threads, rest, workers.communicator.exchanges - before

    first, second = run_workers(work, (1, 1))
    assert first[:2] == ([0, 1, 2, 3, 8, 9, 10, 11], [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19])
    assert second[1] == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]
    assert first[2:] == second[2:] == ({"mpidist-read-ahead"}, 2, 0)


@pytest.mark.parametrize("ending", ["close", "drop", "exhaust"])
@pytest.mark.parametrize("source", [Dataset.range, stream], ids=["rows", "stream"])
def test_the_thread_ends_with_the_distributed_iterator(source, ending):
    for distributed in (
        distribute_dataset(source(40).batch(4).prefetch(2), TWO, None),
        distribute_from_function(lambda _: source(40).batch(4).prefetch(2), TWO, None),
        distribute_from_function(
            lambda _: source(40).batch(4).prefetch(2),
            TWO,
            None,
            InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA),
            per_replica_allowed=True,
        ),
    ):
        iterator = iter(distributed)
        next(iterator)
        threads = readers_alive()
        assert threads
        if ending == "close":
            iterator.close()
            assert readers_alive() == []
            assert not iterator.get_next_as_optional().has_value()
        elif ending == "drop":
            del iterator
        else:
            list(iterator)
            assert readers_alive() == []
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive()


@pytest.mark.parametrize("source", [Dataset.range, stream], ids=["rows", "stream"])
def test_an_error_after_the_prefetch_ends_the_thread_of_a_distributed_dataset_too(source):
    def fail(_):
        raise RuntimeError("no")

    distributed = distribute_dataset(source(40).batch(4).prefetch(2).map(fail), TWO, None)
    with pytest.raises(RuntimeError, match="no") as caught:
        list(distributed)
    assert readers_alive() == []
    assert caught.traceback[-1].name == "fail"


@pytest.mark.parametrize("ahead", [lambda dataset: dataset, lambda dataset: dataset.prefetch(2)])
def test_an_error_in_reading_reaches_all_workers(ahead):
    def work(workers):
        def read(x):
            if workers.worker_id == 1 and x == 3:
                raise OSError("the disk is gone")
            return x

        distributed = distribute_dataset(ahead(Dataset.range(8).map(read).batch(4)), workers, None)
        steps_of(distributed)
        iter(distributed)

    errors = run_workers(work, (1, 1))
    assert [type(error) for error in errors] == [PeerError, OSError]
    assert readers_alive() == []


@pytest.mark.parametrize("size", [0, -2])
def test_bad_sizes(size):
    with pytest.raises(ValueError, match=f"buffer_size is {size}"):
        Dataset.range(3).prefetch(size)
    with pytest.raises(TypeError):
        Dataset.range(3).prefetch("2")
