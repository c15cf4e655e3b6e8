"""Elements belong to whoever takes them: nothing that user code keeps is shared with them."""

from array import array

import numpy as np
import pytest

from mpidist.input.dataset import Dataset
from mpidist.input.distribute import distribute_dataset
from mpidist.input.elements import ArraySpec
from mpidist.input.input_options import InputWorkers

pytestmark = pytest.mark.one_rank

ROWS = [[float(i)] * 3 for i in range(6)]


def reusing(wrap=lambda buffer: buffer):
    """Return a generator function that yields one and the same buffer, filled anew each time."""

    def generator():
        buffer = np.empty(3)
        for i in range(6):
            buffer[:] = i
            yield wrap(buffer)

    return generator


class Reusing:
    """A map-style dataset that returns one and the same buffer."""

    def __init__(self):
        self.buffer = np.empty(3)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        self.buffer[:] = index
        return self.buffer


def filling():
    """Return a function that gives its result in one and the same buffer."""
    buffer = np.empty(3)

    def fill(x):
        buffer[:] = x
        return buffer

    return fill


def read(_path):
    return reusing()()


SOURCES = {
    "generator": lambda: Dataset.from_generator(reusing()),
    "signature": lambda: Dataset.from_generator(reusing(), output_signature=ArraySpec((3,), np.float64)),
    "files": lambda: Dataset.from_files(["a path"], read),
    "map-style": lambda: Dataset.from_source(Reusing()),
    "mapped rows": lambda: Dataset.range(6).map(filling()),
    "mapped stream": lambda: Dataset.from_generator(lambda: iter(range(6))).map(filling()),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_buffer_that_is_used_again(source):
    assert [batch.tolist() for batch in source().batch(4)] == [ROWS[:4], ROWS[4:]]
    assert [element.tolist() for element in list(source())] == ROWS
    assert [element.tolist() for element in source().prefetch(4)] == ROWS
    shuffled = np.concatenate(list(source().shuffle(4, seed=1).batch(4)))
    assert sorted(shuffled.tolist()) == ROWS
    assert shuffled.tolist() != ROWS


@pytest.mark.parametrize(
    "wrap",
    [
        lambda buffer: {"x": (buffer,)},
        lambda buffer: [buffer, buffer],
        lambda buffer: (buffer.data,),
    ],
)
def test_structures_around_a_buffer_that_is_used_again(wrap):
    def flat(element):
        value = element["x"] if isinstance(element, dict) else element
        return np.asarray(value[0] if isinstance(value, tuple) else value).tolist()

    alone = [flat(wrap(np.array(row))) for row in ROWS]
    assert [flat(element) for element in Dataset.from_generator(reusing(wrap)).prefetch(6)] == alone


@pytest.mark.parametrize(
    "mutable", [lambda: [0, 0], lambda: {"a": 0, "b": 0}, lambda: bytearray(2), lambda: array("q")]
)
def test_other_containers_that_are_used_again(mutable):
    def generator():
        container = mutable()
        if isinstance(container, array):
            container.extend((0, 0))
        for i in range(3):
            for key in container if isinstance(container, dict) else range(2):
                container[key] = i
            yield container

    for element, expected in zip(Dataset.from_generator(generator).prefetch(3), range(3), strict=True):
        values = element.values() if isinstance(element, dict) else element
        assert [int(x) for x in values] == [expected] * 2


@pytest.mark.torch
def test_tensors_that_are_used_again():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed; it is an optional source")
    dataset = Dataset.from_generator(reusing(lambda buffer: {"x": torch.from_numpy(buffer)}))
    assert [type(element["x"]) for element in dataset] == [torch.Tensor] * 6
    assert [batch["x"].tolist() for batch in dataset.batch(4)] == [ROWS[:4], ROWS[4:]]
    assert [element["x"].tolist() for element in list(dataset)] == ROWS


@pytest.mark.parametrize("replicas", [1, 2])
def test_writing_into_what_is_read_leaves_the_source_as_it_was(replicas):
    kept = np.arange(12.0).reshape(6, 2)
    ready_made = [kept[:4], kept[4:]]
    datasets = [
        Dataset.from_generator(lambda: (kept[i : i + 2] for i in range(0, 6, 2))),
        Dataset.from_generator(lambda: iter(ready_made), output_signature=ArraySpec((None, 2), np.float64)),
        Dataset.from_source(ready_made),
        Dataset.from_files(["a path"], lambda _: ready_made),
        Dataset.range(2).map(lambda i: ready_made[i]),
        Dataset.range(2).batch(1).map(lambda i: ready_made[int(i[0])]),
        Dataset.from_generator(lambda: iter(kept)).batch(2),
        Dataset.from_tensor_slices(kept).batch(2).shuffle(seed=0).prefetch(2),
    ]
    workers = InputWorkers(1, 0, (replicas,), None, True)
    for dataset in datasets:
        for batch in dataset:
            batch += 100
        for step in distribute_dataset(dataset, workers, None):
            for part in step.values:
                part += 100
        assert np.array_equal(kept, np.arange(12.0).reshape(6, 2)), dataset


def test_memory_mapped_parts_of_a_stream_are_read(tmp_path):
    np.arange(6).tofile(tmp_path / "data")
    mapped = np.memmap(tmp_path / "data", np.int64, "r+")
    elements = list(Dataset.from_generator(lambda: (mapped[i : i + 2] for i in (0, 2, 4))))
    mapped[:] = 0
    assert [type(element) for element in elements] == [np.ndarray] * 3
    assert [element.tolist() for element in elements] == [[0, 1], [2, 3], [4, 5]]


def test_masked_arrays_keep_their_masks():
    masked = np.ma.masked_array([1, 2], [True, False])
    (element,) = Dataset.from_generator(lambda: iter([masked]))
    assert element is not masked
    assert element.mask.tolist() == [True, False]
