"""Datasets of other libraries with the real thing: PyTorch, Hugging Face, grain."""

import numpy as np
import pytest

from mpidist.core import context
from mpidist.input.dataset import Dataset
from mpidist.input.distribute import distribute_dataset
from mpidist.input.input_options import InputWorkers
from tests.input.worker_threads import run_workers

pytestmark = pytest.mark.one_rank

ROWS = 30


def check_rows(dataset):
    """Check a dataset of ROWS dicts with x and v = (x, x + 0.5), in order, shuffled, and dealt to two workers."""
    assert len(dataset) == ROWS
    batches = list(dataset.batch(8))
    assert np.concatenate([batch["x"] for batch in batches]).tolist() == list(range(ROWS))
    for batch in dataset.shuffle(seed=1).batch(7):
        assert batch["x"].dtype == np.int64
        assert np.array_equal(batch["v"], np.stack([batch["x"], batch["x"] + 0.5], axis=1))

    def work(workers):
        distributed = distribute_dataset(dataset.shuffle(seed=2).batch(10), workers, context.get_strategy())
        return [int(x) for step in distributed for part in step["x"].values for x in part]

    first, second = run_workers(work, (1, 1))
    assert sorted(first + second) == list(range(ROWS))


def hugging_face(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets are not installed; an optional source")
    return datasets.Dataset.from_dict({"x": list(range(ROWS)), "v": [[x, x + 0.5] for x in range(ROWS)]})


@pytest.mark.parametrize("form", [None, "numpy"])
def test_hugging_face_dataset(form, monkeypatch, tmp_path):
    check_rows(Dataset.from_source(hugging_face(monkeypatch, tmp_path).with_format(form)))


def test_hugging_face_dataset_is_asked_for_the_rows_of_a_batch_at_once(monkeypatch, tmp_path):
    source = hugging_face(monkeypatch, tmp_path)
    asked = []
    get_items = type(source).__getitems__
    monkeypatch.setattr(type(source), "__getitems__", lambda self, keys: asked.append(keys) or get_items(self, keys))
    next(iter(Dataset.from_source(source).skip(5).batch(4)))
    assert asked == [[5, 6, 7, 8]]


def test_hugging_face_iterable_dataset(monkeypatch, tmp_path):
    streamed = Dataset.from_source(hugging_face(monkeypatch, tmp_path).to_iterable_dataset())
    for _ in range(2):
        batches = list(streamed.batch(20))
        assert [len(batch["x"]) for batch in batches] == [20, 10]
        assert batches[1]["v"][-1].tolist() == [29.0, 29.5]


def test_hugging_face_datasets_are_distributed_by_a_loader(monkeypatch, tmp_path):
    source = hugging_face(monkeypatch, tmp_path)
    workers = InputWorkers(1, 0, (2,), None, True)
    for rows in (source, source.to_iterable_dataset()):
        with pytest.raises(TypeError, match=r"DataLoader\(dataset.with_format\('torch'\), batch_size="):
            distribute_dataset(rows, workers, context.get_strategy())
        torch = pytest.importorskip("torch", reason="PyTorch is not installed; it is an optional source")
        made = torch.utils.data.DataLoader(rows.with_format("torch"), batch_size=8)
        steps = list(distribute_dataset(made, workers, context.get_strategy()))
        assert [[len(part) for part in step["x"].values] for step in steps] == [[4, 4]] * 3 + [[3, 3]]
        parts = [part for step in steps for part in step["v"].values]
        assert torch.cat(parts).tolist() == [[x, x + 0.5] for x in range(ROWS)]


@pytest.fixture
def grain():
    pytest.importorskip("grain", reason="grain is not installed; it is an optional source")
    import grain

    return grain


def as_row(x):
    return {"x": np.int64(x), "v": np.array([x, x + 0.5])}


def test_grain_map_dataset(grain):
    check_rows(Dataset.from_source(grain.MapDataset.range(ROWS).map(as_row)))


def test_grain_map_dataset_that_repeats_without_end(grain):
    dataset = Dataset.from_source(grain.MapDataset.range(5).repeat()).batch(4)
    iterator = iter(dataset)
    assert [next(iterator).tolist() for _ in range(3)] == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4, 0, 1]]


def test_grain_iter_dataset(grain):
    source = grain.MapDataset.range(6).filter(lambda x: x % 2 == 1).map(as_row).to_iter_dataset()
    streamed = Dataset.from_source(source).batch(2)
    for _ in range(2):
        assert [batch["x"].tolist() for batch in streamed] == [[1, 3], [5]]


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="PyTorch is not installed; it is an optional source")


@pytest.mark.torch
def test_pytorch_map_style_dataset(torch):
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return ROWS

        def __getitem__(self, index):
            return {"x": torch.tensor(index), "v": torch.tensor([index, index + 0.5])}

    check_rows(Dataset.from_source(Rows()))


@pytest.mark.torch
def test_pytorch_subset_is_asked_for_the_rows_of_a_batch_at_once(torch):
    data = torch.utils.data.TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))
    subset = torch.utils.data.Subset(data, [4, 2, 0])
    (batch,) = Dataset.from_source(subset).batch(3)
    assert batch[1].tolist() == [4, 2, 0]
    assert batch[0].tolist() == [[8.0, 9.0], [4.0, 5.0], [0.0, 1.0]]


@pytest.mark.torch
def test_pytorch_iterable_dataset_is_read_anew_in_each_pass(torch):
    class Streamed(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.arange(3))

    streamed = Dataset.from_source(Streamed()).batch(2)
    for _ in range(2):
        assert [batch.tolist() for batch in streamed] == [[0, 1], [2]]
