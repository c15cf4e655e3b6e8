"""Tables, datasets and Parquet files of pyarrow: rows as dicts, and only the row groups read that hold them."""

import threading

import numpy as np
import pytest

from mpidist.core import context
from mpidist.input import arrow as arrow_tables
from mpidist.input.dataset import Dataset
from mpidist.input.distribute import distribute_dataset
from mpidist.input.elements import ArraySpec
from tests.input.worker_threads import run_workers

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed; it is an optional source")
pd = pytest.importorskip("pyarrow.dataset")
pq = pytest.importorskip("pyarrow.parquet")

pytestmark = pytest.mark.one_rank

ROWS = 50


def make_table(rows=ROWS):
    return pa.table(
        {
            "x": pa.array(np.arange(rows, dtype=np.int32)),
            "v": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(rows * 2.0)), 2),
            "text": [f"row {i}" for i in range(rows)],
        }
    )


def of_table(folder):
    return make_table()


def of_chunks(folder):
    return pa.concat_tables([make_table().slice(0, 17), make_table().slice(17)])


def of_batch(folder):
    return make_table().to_batches()[0]


def of_parquet_file(folder):
    pq.write_table(make_table(), folder / "one.parquet", row_group_size=9)
    return pq.ParquetFile(folder / "one.parquet")


def of_dataset(folder):
    pq.write_table(make_table().slice(0, 20), folder / "a.parquet", row_group_size=6)
    pq.write_table(make_table().slice(20), folder / "b.parquet", row_group_size=11)
    return pd.dataset(folder, format="parquet")


@pytest.fixture(params=[of_table, of_chunks, of_batch, of_parquet_file, of_dataset])
def source(request, tmp_path):
    return request.param(tmp_path)


def check(batch):
    assert {name: column.dtype.kind for name, column in batch.items()} == {"x": "i", "v": "f", "text": "U"}
    assert np.array_equal(batch["v"], np.stack([2 * batch["x"], 2 * batch["x"] + 1], axis=1))
    assert batch["text"].tolist() == [f"row {i}" for i in batch["x"]]
    assert batch["x"].flags.writeable
    batch["v"] += 1  # an array of the caller's own


def test_batches_of_rows(source):
    dataset = Dataset.from_source(source)
    assert len(dataset) == ROWS
    for _ in range(2):
        batches = list(dataset.batch(8))
        for batch in batches:
            check(batch)
        assert np.concatenate([batch["x"] for batch in batches]).tolist() == list(range(ROWS))
    shuffled = list(dataset.shuffle(seed=3).repeat(2).batch(8))
    for batch in shuffled:
        check(batch)
    assert sorted(np.concatenate([batch["x"] for batch in shuffled]).tolist()) == sorted([*range(ROWS)] * 2)


def test_single_rows(source):
    dataset = Dataset.from_source(source)
    assert dataset.element_spec["v"] == ArraySpec((2,), np.dtype(float))
    found = list(dataset.skip(15).take(8))
    assert [int(row["x"]) for row in found] == list(range(15, 23))
    assert found[0]["text"] == "row 15"
    assert found[0]["v"].tolist() == [30.0, 31.0]
    found[0]["v"][:] = 0
    assert next(iter(dataset.skip(15)))["v"].tolist() == [30.0, 31.0]


def test_only_some_columns(source):
    dataset = Dataset.from_source(source, columns=["x"])
    assert list(next(iter(dataset.batch(3)))) == ["x"]
    with pytest.raises(ValueError, match="'y'.*'x'"):
        Dataset.from_source(source, columns=["y"])
    with pytest.raises(TypeError, match="pyarrow"):
        Dataset.from_source([1, 2], columns=["x"])


def loaded_pieces(dataset):
    """Return the list to which the numbers of the pieces that are loaded will be added."""
    table, loaded = dataset._node.table, []

    def noting(number, load):
        return lambda: (loaded.append(number), load())[1]

    table._loaders = [noting(number, load) for number, load in enumerate(table._loaders)]
    return loaded


def test_only_the_row_groups_of_a_workers_own_rows_are_read(tmp_path):
    pq.write_table(make_table(), tmp_path / "one.parquet", row_group_size=5)

    def work(workers):
        source = Dataset.from_source(pd.dataset(tmp_path / "one.parquet"))
        loaded = loaded_pieces(source)
        distributed = distribute_dataset(source.batch(10), workers, context.get_strategy())
        assert loaded == []
        return [part.tolist() for step in distributed for part in step["x"].values], loaded

    results = run_workers(work, (1, 1))
    (first, pieces), (second, others) = results
    assert sorted(x for part in first + second for x in part) == list(range(ROWS))
    assert (pieces, others) == ([0, 2, 4, 6, 8], [1, 3, 5, 7, 9])


def test_what_is_kept_unpacked_is_bounded(tmp_path, monkeypatch):
    source = of_parquet_file(tmp_path)
    dataset = Dataset.from_source(source)
    loaded = loaded_pieces(dataset)
    for _ in range(2):
        list(dataset.shuffle(seed=1).batch(4))
    assert sorted(loaded) == [0, 1, 2, 3, 4, 5]
    monkeypatch.setattr(arrow_tables, "_KEPT_BYTES", 1)
    dataset = Dataset.from_source(source)
    loaded = loaded_pieces(dataset)
    list(dataset.batch(4))
    assert loaded == [0, 1, 2, 3, 4, 5]
    assert len(dataset._node.table._kept) == 1


def test_several_passes_in_threads_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_tables, "_KEPT_BYTES", 1000)
    dataset = Dataset.from_source(of_dataset(tmp_path)).shuffle(seed=1).batch(4).prefetch(3)
    found = []

    def read():
        for batch in dataset:
            check(batch)
            found.append(len(batch["x"]))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(found) == 4 * ROWS


def test_partitions_come_as_a_column(tmp_path):
    table = pa.table({"x": [1, 2, 3], "part": ["a", "a", "b"]})
    pd.write_dataset(table, tmp_path, format="parquet", partitioning=["part"], partitioning_flavor="hive")
    rows = list(Dataset.from_source(pd.dataset(tmp_path, partitioning="hive")))
    assert sorted((int(row["x"]), str(row["part"])) for row in rows) == [(1, "a"), (2, "a"), (3, "b")]


def test_filtered_datasets_and_other_formats_are_streams(tmp_path):
    filtered = of_dataset(tmp_path).filter(pd.field("x") >= 45)
    dataset = Dataset.from_source(filtered)
    assert dataset.cardinality() == -2
    for _ in range(2):
        (batch,) = list(dataset.batch(8))
        check(batch)
        assert batch["x"].tolist() == list(range(45, 50))
    (tmp_path / "data.csv").write_text("x,y\n1,2.5\n3,4.5\n")
    (batch,) = Dataset.from_source(pd.dataset(tmp_path / "data.csv", format="csv"), columns=["y"]).batch(5)
    assert batch["y"].tolist() == [2.5, 4.5]


def test_kinds_of_columns():
    table = pa.table(
        {
            "image": pa.array([b"\x01\x00", b"\x02\x00"]),
            "name": pa.array(["a", "b"]).dictionary_encode(),
            "when": pa.array(np.array(["2024-01-01", "2024-01-02"], "datetime64[s]")),
            "yes": [True, False],
            "tokens": pa.array([[1, 2], [3, 4]], pa.list_(pa.int64())),
            "point": pa.array([{"a": 1, "b": 2.0}, {"a": 3, "b": 4.0}]),
            "boxes": pa.array([[[1, 2]], [[3, 4]]], pa.list_(pa.list_(pa.int64()))),
            "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(8).reshape(2, 2, 2)),
            "half": pa.array(np.array([1, 2], np.float16)),
            "holes": pa.array([1.0, None]),
        }
    )
    row = next(iter(Dataset.from_source(table)))
    assert row["image"] == b"\x01\x00"  # with its last zero
    assert (row["name"], row["when"], row["yes"]) == ("a", np.datetime64("2024-01-01"), True)
    assert row["tokens"].tolist() == [1, 2]
    assert row["boxes"].tolist() == [[1, 2]]
    assert row["point"] == {"a": 1, "b": 2.0}
    (batch,) = Dataset.from_source(table).batch(2)
    assert batch["image"].tolist() == [b"\x01\x00", b"\x02\x00"]
    assert batch["name"].tolist() == ["a", "b"]
    assert batch["yes"].tolist() == [True, False]
    assert batch["tokens"].tolist() == [[1, 2], [3, 4]]
    assert batch["point"]["b"].tolist() == [2.0, 4.0]
    assert batch["boxes"].shape == (2, 1, 2)
    assert batch["tensor"].tolist() == np.arange(8).reshape(2, 2, 2).tolist()
    assert batch["half"].dtype == np.float16
    assert np.isnan(batch["holes"][1])


@pytest.mark.parametrize("column", [[1, None], [True, None]])
def test_nulls_that_numpy_cannot_hold(column):
    with pytest.raises(ValueError, match="'x'.*1 nulls.*fill_null"):
        list(Dataset.from_source(pa.table({"x": column})).batch(2))


def test_lists_of_unlike_lengths():
    table = pa.table({"tokens": [[1], [2, 3]]})
    assert [row["tokens"].tolist() for row in Dataset.from_source(table)] == [[1], [2, 3]]
    with pytest.raises(ValueError, match="expected one shape"):
        list(Dataset.from_source(table).batch(2))


def test_a_table_without_rows():
    dataset = Dataset.from_source(make_table(0))
    assert len(dataset) == 0
    assert list(dataset.batch(2)) == []
