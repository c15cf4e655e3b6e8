"""Elements of a kind that nothing can look into: the errors say which structures there are."""

import dataclasses

import numpy as np
import pytest

from mpidist.input.dataset import Dataset
from mpidist.input.distribute import distribute_dataset
from mpidist.input.input_options import InputWorkers
from tests.input.worker_threads import lists

pytestmark = pytest.mark.one_rank

TWO = InputWorkers(1, 0, (2,), None, True)


@dataclasses.dataclass
class Sample:
    x: np.ndarray
    y: int


class Plain:
    pass


SAMPLES = [Sample(np.full(2, i), i) for i in range(4)]
STRUCTURES = "list.*tuple, named tuple, dict or attrs class"


def stream(values):
    return Dataset.from_generator(lambda: iter(values))


@pytest.mark.parametrize("source", [Dataset.from_source, stream])
def test_dataclasses(source):
    with pytest.raises(TypeError, match=f"batch.* got the dataclass Sample.*{STRUCTURES}.*dataclasses.asdict"):
        list(source(SAMPLES).batch(2))
    with pytest.raises(TypeError, match=rf"dataclass Sample at \['s'\].*{STRUCTURES}"):
        list(source([{"s": sample} for sample in SAMPLES]).batch(2))
    with pytest.raises(TypeError, match=STRUCTURES):
        list(distribute_dataset(source(SAMPLES), TWO, None))
    with pytest.raises(TypeError, match=STRUCTURES):
        list(distribute_dataset(source(SAMPLES).batch(2), TWO, None))
    assert [sample.y for sample in source(SAMPLES)] == [0, 1, 2, 3]


def test_what_the_message_advises_works():
    for function in (dataclasses.asdict, lambda sample: {"x": sample.x, "y": sample.y}):
        (step,) = distribute_dataset(Dataset.from_source(SAMPLES).map(function).batch(4), TWO, None)
        assert lists(step["y"]) == ([0, 1], [2, 3])
        assert lists(step["x"]) == ([[0, 0], [1, 1]], [[2, 2], [3, 3]])


@pytest.mark.parametrize("value", [Plain(), None])
def test_other_objects(value):
    with pytest.raises(TypeError, match=STRUCTURES):
        list(distribute_dataset(stream([value]), TWO, None))
    ready_made = Dataset.range(4).batch(2).map(lambda batch: {"x": batch, "object": value})
    with pytest.raises(TypeError, match=f"object of type {type(value).__name__}.*{STRUCTURES}"):
        list(distribute_dataset(ready_made, TWO, None))


def test_single_numbers_are_still_told_to_batch():
    with pytest.raises(ValueError, match=r"single values of int64.*batch\(global_batch_size\)"):
        distribute_dataset(Dataset.range(4), TWO, None)
