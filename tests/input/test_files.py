"""Dataset.from_files: file after file, lazily, and how it is distributed."""

import gzip
import pathlib
import zlib

import numpy as np
import pytest

from mpidist.core.errors import MismatchError
from mpidist.input.dataset import Dataset, TextLineDataset
from mpidist.input.distribute import distribute_dataset
from mpidist.input.elements import ArraySpec
from mpidist.input.input_options import AutoShardPolicy
from tests.input.worker_threads import run_workers, steps_of

pytestmark = pytest.mark.one_rank


@pytest.fixture
def paths(tmp_path):
    """Files with the numbers 0 ... 8: four of them, none, five."""
    for name, numbers in (("a", range(4)), ("b", ()), ("c", range(4, 9))):
        (tmp_path / name).write_text("\n".join(map(str, numbers)))
    return sorted(tmp_path.iterdir())


def lines(path):
    with open(path) as file:
        for line in file:
            yield int(line)


def read_all(path):
    return [int(line) for line in pathlib.Path(path).read_text().split()]


@pytest.mark.parametrize("reader", [lines, read_all, lambda path: np.array(read_all(path), np.int64)])
@pytest.mark.parametrize("kind", [pathlib.Path, str])
def test_file_after_file(paths, reader, kind):
    dataset = Dataset.from_files(map(kind, paths), reader)
    for _ in range(2):
        assert [int(x) for x in dataset] == list(range(9))
    assert dataset.cardinality() == -2
    assert [batch.tolist() for batch in dataset.batch(4, drop_remainder=True)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert sorted(int(x) for x in dataset.shuffle(5).prefetch(2)) == list(range(9))
    assert dataset.element_spec == ArraySpec((), np.dtype(np.int64))
    assert Dataset.from_files(paths[1:], lines).element_spec.shape == ()
    with pytest.raises(ValueError, match="no element"):
        Dataset.from_files(paths[1:2], lines).element_spec


def test_files_are_opened_when_their_turn_comes_with_the_path_as_it_was_given(paths):
    opened = []

    def reader(path):
        opened.append(path)
        return lines(path)

    iterator = iter(Dataset.from_files(paths, reader))
    assert opened == []
    for _ in range(4):
        next(iterator)
    assert opened == paths[:1]
    next(iterator)
    assert opened == paths


def test_files_by_a_pattern(paths, monkeypatch):
    folder = paths[0].parent
    names = [str(path) for path in paths]
    for pattern in (f"{folder}/*", folder / "*", [f"{folder}/[bc]", f"{folder}/[ab]"], (folder / "?",)):
        assert list(Dataset.list_files(pattern, shuffle=False)) == names
    monkeypatch.chdir(folder)
    dataset = Dataset.list_files("**/[ac]", shuffle=False)
    assert list(dataset) == ["a", "c"]
    assert (len(dataset), list(dataset._node.paths)) == (2, ["a", "c"])
    assert repr(dataset).startswith("<Dataset list_files('a' and 1 more [")
    assert [x.tolist() for x in dataset.map(lambda path: np.array(read_all(path)[:2]))] == [[0, 1], [4, 5]]
    rows = dataset.interleave(lambda path: Dataset.from_files([path], lines), cycle_length=2)
    assert [int(x) for x in rows] == [0, 4, 1, 5, 2, 6, 3, 7, 8]


def test_files_by_a_pattern_come_in_another_order_in_each_pass(tmp_path):
    for number in range(6):
        (tmp_path / str(number)).touch()
    files = Dataset.list_files(f"{tmp_path}/*")
    orders = [tuple(files) for _ in range(20)]
    assert {tuple(sorted(order)) for order in orders} == {tuple(sorted(map(str, tmp_path.iterdir())))}
    assert len(set(orders)) > 1
    seeded = [[list(Dataset.list_files(f"{tmp_path}/*", seed=seed)) for seed in (1, 2)] for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert seeded[0][0] != seeded[0][1]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("/nowhere/*.txt",), ValueError, "no file that matches '/nowhere/"),
        (([],), ValueError, "no file that matches"),
        ((5,), TypeError, "5 of type int"),
        ((["a", b"b"],), TypeError, "of type bytes"),
        (("*", False, 3), ValueError, "seed=3 with shuffle=False"),
    ],
)
def test_bad_patterns(arguments, error, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").touch()
    with pytest.raises(error, match=text):
        Dataset.list_files(*arguments)


def test_another_order_of_the_files_on_another_worker_is_refused(paths):
    def work(workers):
        mine = paths[:1] + paths[:0:-1] if workers.worker_id else paths
        dataset = Dataset.from_files(mine, lines).batch(4).with_options(auto_shard_policy=AutoShardPolicy.DATA)
        return distribute_dataset(dataset, workers, None)

    assert [type(error) for error in run_workers(work, (1, 1))] == [MismatchError] * 2


@pytest.mark.parametrize(
    ("paths", "reader", "error", "text"),
    [
        ("a.txt", lines, TypeError, r"from_files\(\[path\], reader\)"),
        (pathlib.Path("a.txt"), lines, TypeError, "several paths"),
        (5, lines, TypeError, "several paths"),
        ([1], lines, TypeError, "1 of type int"),
        (["a.txt"], "r", TypeError, "reader is 'r'"),
        ([], lines, ValueError, "no paths"),
    ],
)
def test_bad_arguments(paths, reader, error, text):
    with pytest.raises(error, match=text):
        Dataset.from_files(paths, reader)


def test_a_reader_that_returns_nothing():
    with pytest.raises(TypeError, match=r"reader\('a.txt'\) returned None"):
        list(Dataset.from_files(["a.txt"], lambda path: None))


@pytest.mark.parametrize(
    ("compression_type", "compress"), [(None, bytes), ("", bytes), ("GZIP", gzip.compress), ("ZLIB", zlib.compress)]
)
def test_text_lines(tmp_path, compression_type, compress):
    """TensorFlow's testTextLineDataset."""
    paths = [tmp_path / f"{i}.txt" for i in range(2)]
    for i, path in enumerate(paths):
        path.write_bytes(compress(f"{i}: 1\r\n{i}: \u00e9\r!\n\n{i}: end".encode()))
    expected = [[f"{i}: 1", f"{i}: \u00e9\r!", "", f"{i}: end"] for i in range(2)]
    assert list(TextLineDataset(paths[1], compression_type)) == expected[1]
    lines = TextLineDataset([str(path) for path in paths], compression_type, buffer_size=10, num_parallel_reads=2)
    assert list(lines) == [*expected[0], *expected[1]]
    assert [batch.tolist() for batch in lines.batch(4)] == expected
    assert type(lines.take(1)) is Dataset
    named = Dataset.list_files(str(tmp_path / "*.txt"), shuffle=False)
    assert list(TextLineDataset(named, compression_type)) == [*expected[0], *expected[1]]


def test_text_lines_of_wrong_arguments(tmp_path):
    with pytest.raises(ValueError, match="compression_type is 'BZ2'"):
        TextLineDataset("lines.txt", "BZ2")
    with pytest.raises(FileNotFoundError):
        list(TextLineDataset(tmp_path / "missing.txt"))
    with pytest.raises(TypeError, match="filenames is 3"):
        TextLineDataset(3)
    with pytest.raises(ValueError, match="filenames is empty"):
        TextLineDataset([])
    (tmp_path / "bad.txt").write_bytes(b"fine\n\xff\n")
    with pytest.raises(ValueError, match=r"line 2 of .*bad.txt is not UTF-8"):
        list(TextLineDataset(tmp_path / "bad.txt"))
    for kind in ("GZIP", "ZLIB"):
        with pytest.raises(ValueError, match=rf"bad.txt is not a file of compression_type '{kind}'"):
            list(TextLineDataset(tmp_path / "bad.txt", kind))


def test_text_lines_on_workers(tmp_path):
    """Whole files go to the workers."""
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text(f"{i}\n" * 2)
    lines_of_all = TextLineDataset(sorted(tmp_path.iterdir())).batch(4)
    found = run_workers(lambda workers: steps_of(distribute_dataset(lines_of_all, workers, None)), (1, 1))
    assert found == [[(["0", "0"],), (["2", "2"],)], [(["1", "1"],), (["3", "3"],)]]
