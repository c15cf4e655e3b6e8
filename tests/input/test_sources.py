"""Sources as users have them, and that only the rows asked for are read."""

import pickle
from collections import UserDict

import numpy as np
import pytest

from mpidist.input.dataset import Dataset
from mpidist.input.elements import ArraySpec

pytestmark = pytest.mark.one_rank


class Samples:
    """A map-style dataset that remembers what it was asked for."""

    def __init__(self, count):
        self.count = count
        self.asked = []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        assert type(index) is int
        if not 0 <= index < self.count:
            raise IndexError(index)
        self.asked.append(index)
        return {"x": np.full(3, index, np.float32), "y": index}


def test_map_style_dataset_is_read_by_row_and_lazily():
    samples = Samples(10)
    dataset = Dataset.from_source(samples).shuffle(seed=1).skip(2).take(5).shard(2, 1).repeat(2).batch(3)
    assert len(dataset) == 2
    assert samples.asked == []
    first = next(iter(dataset))
    assert len(samples.asked) == 3
    assert first["y"].tolist() == samples.asked
    assert first["x"].dtype == np.float32
    assert first["x"].shape == (3, 3)


def test_map_before_batch_runs_only_for_the_rows_read():
    called = []

    def function(element):
        called.append(int(element))
        return element * 2

    dataset = Dataset.range(100).map(function).shuffle(seed=0).skip(90).batch(4)
    batch = next(iter(dataset))
    assert batch.tolist() == [2 * x for x in called]
    assert len(called) == 4


def test_memory_mapped_array(tmp_path):
    path = tmp_path / "data.bin"
    np.arange(60, dtype=np.int32).reshape(20, 3).tofile(path)
    mapped = np.memmap(path, np.int32, "r", shape=(20, 3))
    for dataset in (Dataset.from_source(mapped), Dataset.from_tensor_slices(mapped)):
        batches = list(dataset.batch(8))
        assert [type(batch) for batch in batches] == [np.ndarray] * 3
        assert np.array_equal(np.concatenate(batches), mapped)
        shuffled = np.concatenate(list(dataset.shuffle(seed=1).batch(8)))
        assert not np.array_equal(shuffled, mapped)
        assert np.array_equal(shuffled[np.argsort(shuffled[:, 0])], mapped)


def test_lists_of_arrays_become_one_array_and_tuples_are_structure():
    dataset = Dataset.from_tensor_slices(([np.zeros(2), np.ones(2)], {"a": [1, 2]}))
    assert dataset.element_spec == (
        ArraySpec((2,), np.dtype(float)),
        {"a": ArraySpec((), np.dtype(np.int64))},
    )
    with pytest.raises(ValueError, match="one array"):
        Dataset.from_tensor_slices([np.zeros(2), np.zeros(3)])


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ((np.zeros(3), np.zeros(4)), "3 at .*4 at"),
        (5, "without axes"),
        ({"a": np.float64(3.0)}, r"\['a'\]"),
        ((), "no arrays"),
    ],
)
def test_arrays_that_cannot_be_sliced(tensors, text):
    with pytest.raises(ValueError, match=text):
        Dataset.from_tensor_slices(tensors)


def test_iterables_are_gone_through_anew():
    class Numbers:
        def __iter__(self):
            return iter(range(4))

    dataset = Dataset.from_source(Numbers()).batch(3)
    assert dataset.cardinality() == -2
    assert [batch.tolist() for batch in dataset] == [[0, 1, 2], [3]]
    assert [batch.tolist() for batch in dataset] == [[0, 1, 2], [3]]


def test_an_iterable_dataset_that_inherits_getitem_is_a_stream():
    class IterableDataset:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            raise NotImplementedError

    class Mine(IterableDataset):
        def __iter__(self):
            return iter((1, 2, 3))

    assert [int(x) for x in Dataset.from_source(Mine())] == [1, 2, 3]


class _Frame:
    iloc = None

    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise KeyError(index)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({"x": [1]}, "from_tensor_slices"),
        (UserDict(x=[1]), "from_tensor_slices"),
        ("abc", "sequence"),
        (_Frame(), "from_tensor_slices"),
        (iter([1]), "only once"),
        (5, "__getitem__"),
    ],
)
def test_what_is_no_source(source, text):
    with pytest.raises(TypeError, match=text):
        Dataset.from_source(source)


def test_a_list_in_a_sample_is_one_array_and_map_can_make_it_a_structure():
    samples = [[np.zeros(2), 1], [np.ones(2), 2]]
    with pytest.raises(ValueError, match=r"dataset.map\(tuple\)"):
        list(Dataset.from_source(samples).batch(2))
    x, y = next(iter(Dataset.from_source(samples).map(tuple).batch(2)))
    assert x.shape == (2, 2)
    assert y.tolist() == [1, 2]


class Rewound:
    """An iterator that begins again with each ``iter``."""

    def __iter__(self):
        self.left = 3
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left


@pytest.mark.parametrize("once", [lambda: (x for x in range(3)), lambda: iter([0, 1, 2]), lambda: zip(range(3))])
@pytest.mark.parametrize("then", [list, lambda dataset: dataset.element_spec])
def test_a_generator_that_is_used_up_is_no_second_pass(once, then):
    elements = once()
    dataset = Dataset.from_generator(lambda: elements).batch(2)
    assert len(list(dataset)) == 2
    for _ in range(2):
        with pytest.raises(ValueError, match=r"lambda.* the same .* as before, with nothing left.* a new iterator"):
            then(dataset)


def test_an_iterator_that_is_given_again_may_have_more():
    again, endless = Rewound(), iter(range(1000))
    dataset = Dataset.from_generator(lambda: again)
    assert [list(dataset), list(dataset)] == [[2, 1, 0]] * 2
    parts = Dataset.from_generator(lambda: endless).take(2)
    assert [list(parts), list(parts)] == [[0, 1], [2, 3]]
    nothing = Dataset.from_generator(lambda: iter([]))
    assert [list(nothing), list(nothing)] == [[], []]


def test_a_generator_is_not_kept_longer_than_its_pass():
    closed = []

    def numbers():
        try:
            yield from range(3)
        finally:
            closed.append(True)

    iterator = iter(Dataset.from_generator(numbers))
    next(iterator)
    iterator.close()
    assert closed == [True]


def test_a_dataset_that_was_read_can_be_pickled():
    dataset = Dataset.from_generator(Rewound)
    assert list(dataset) == list(pickle.loads(pickle.dumps(dataset)))
