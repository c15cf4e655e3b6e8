"""Arrays in files with their real libraries: h5py and zarr, read by slices, only the rows that are asked for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.core import context
from mpidist.input import nodes as tables
from mpidist.input.dataset import Dataset
from mpidist.input.distribute import distribute_dataset
from tests.input.worker_threads import run_workers

pytestmark = pytest.mark.one_rank

ROWS = 60
DATA = np.arange(ROWS * 3, dtype=np.int32).reshape(ROWS, 3)


def hdf5(folder, **options):
    h5py = pytest.importorskip("h5py", reason="h5py is not installed; it is an optional source")
    file = h5py.File(folder / "data.h5", "w")
    return file.create_dataset("x", data=DATA, **options)


def zarr_array(folder, **options):
    zarr = pytest.importorskip("zarr", reason="zarr is not installed; it is an optional source")
    array = zarr.create_array(str(folder / "data.zarr"), shape=DATA.shape, dtype=DATA.dtype, **options)
    array[:] = DATA
    return array


def end_threads_of_zarr():
    from zarr.core.sync import cleanup_resources

    cleanup_resources()


KINDS = {
    "hdf5": lambda folder: hdf5(folder),
    "hdf5 in chunks": lambda folder: hdf5(folder, chunks=(7, 3), compression="gzip"),
    "zarr": lambda folder: zarr_array(folder, chunks=(7, 3)),
    "zarr in shards": lambda folder: zarr_array(folder, chunks=(5, 3), shards=(20, 3)),
}


@pytest.fixture(params=KINDS)
def array(request, tmp_path):
    yield KINDS[request.param](tmp_path)
    if request.param.startswith("zarr"):
        end_threads_of_zarr()


class Counting:
    """A stored array that remembers which rows it was asked for, and refuses to be read whole."""

    def __init__(self, array):
        self.array = array
        self.shape, self.dtype, self.chunks = array.shape, array.dtype, array.chunks
        self.asked = []

    def __getitem__(self, index):
        rows = np.atleast_1d(np.arange(self.shape[0])[index])
        self.asked += rows.tolist()
        return self.array[index]

    def __array__(self, *_, **__):
        raise AssertionError("the whole array was read")


@pytest.mark.parametrize("make", [Dataset.from_source, Dataset.from_tensor_slices])
def test_in_order_shuffled_and_by_element(array, make):
    counting = Counting(array)
    dataset = make(counting)
    assert counting.asked == []
    assert dataset.element_spec.shape == (3,)
    batches = list(dataset.batch(8))
    assert {type(batch) for batch in batches} == {np.ndarray}
    assert np.array_equal(np.concatenate(batches), DATA)
    assert counting.asked == list(range(ROWS))
    shuffled = np.concatenate(list(dataset.shuffle(seed=1).batch(8)))
    assert not np.array_equal(shuffled, DATA)
    assert np.array_equal(shuffled[np.argsort(shuffled[:, 0])], DATA)
    assert [x.tolist() for x in dataset.skip(58)] == DATA[58:].tolist()
    every_third = list(dataset.shard(3, 1).batch(5))
    assert np.array_equal(np.concatenate(every_third), DATA[1::3])


@given(st.lists(st.integers(0, 59), min_size=1, max_size=80), st.sampled_from([None, (1,), (7,), (60,), ((30, 30),)]))
def test_any_rows_in_any_order(rows, chunks):
    class InMemory(Counting):
        def __getitem__(self, index):
            assert isinstance(index, slice) or np.all(np.diff(index) > 0)
            return self.array[index]

    class Array:
        shape, dtype = DATA.shape, DATA.dtype

        def __getitem__(self, index):
            return DATA[index]

    Array.chunks = chunks
    assert np.array_equal(tables.read_stored(InMemory(Array()), np.array(rows)), DATA[rows])


def test_a_chunk_is_asked_for_once(tmp_path):
    asked = []

    class Slices(Counting):
        def __getitem__(self, index):
            asked.append((index.start // 7, (index.stop - 1) // 7))
            return super().__getitem__(index)

    array = Slices(hdf5(tmp_path, chunks=(7, 3)))
    rows = np.array([13, 0, 2, 8, 4, 10, 6, 12, 58, 56, 59, 57, 57])
    assert np.array_equal(tables.read_stored(array, rows), DATA[rows])
    assert asked == [(0, 0), (1, 1), (8, 8)]


def test_each_worker_reads_its_own_rows_only(array):
    def work(workers):
        counting = Counting(array)
        dataset = Dataset.from_source(counting).batch(12)
        seen = [part for step in distribute_dataset(dataset, workers, context.get_strategy()) for part in step.values]
        return np.concatenate(seen)[:, 0] // 3, counting.asked

    results = run_workers(work, (1, 1))
    for seen, asked in results:
        assert seen.tolist() == asked
    assert sorted(results[0][1] + results[1][1]) == list(range(ROWS))
