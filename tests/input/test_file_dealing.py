"""Whole files for each worker: AutoShardPolicy.FILE, and AUTO where all sources are files."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.input.dataset import Dataset
from mpidist.input.distribute import distribute_dataset
from mpidist.input.sources import FileNames
from tests.input.policy_helpers import (
    AUTO,
    FILE,
    as_lists,
    batches_of,
    distribute,
    error_of,
    named,
    padded,
    passes,
    read,
    rows_of,
)
from tests.input.worker_threads import run_workers, steps_of

pytestmark = pytest.mark.one_rank


@settings(max_examples=120)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=9),
    size=st.integers(1, 9),
    num_workers=st.integers(1, 4),
    replicas=st.integers(1, 3),
    drop=st.booleans(),
    kind=st.sampled_from(["from_files", "list_files"]),
    policy=st.sampled_from([AUTO, FILE]),
)
def test_files_are_dealt_in_turn_and_cut_by_rule_b(lengths, size, num_workers, replicas, drop, kind, policy):
    names, contents = named(lengths)
    if kind == "from_files":
        dataset = Dataset.from_files(names, read)
    else:
        dataset = Dataset(FileNames(names)).interleave(lambda path: Dataset.from_files([path], read), 1)
    counts = (replicas,) * num_workers
    found = distribute(dataset.batch(size, drop_remainder=drop), counts, auto_shard_policy=policy)
    if len(names) < num_workers:
        assert [type(error) for error in found] == [ValueError] * num_workers
        return
    own = [list(itertools.chain(*contents[worker::num_workers])) for worker in range(num_workers)]
    kept = [list(itertools.chain(*batches_of(rows, size, drop))) for rows in own]
    if counts == (1,):  # a lone replica gets the batches as they are
        assert found == [[(batch,) for batch in batches_of(own[0], size, drop)]]
    else:
        assert found == as_lists(padded(kept, size, counts))
    if not drop:
        assert sorted(row for worker in found for row in rows_of(worker)) == list(range(sum(lengths)))


def test_repetitions_of_files_are_partitions_one_after_the_other():
    names, contents = named([2, 3, 1, 2, 4])

    def make():
        files = Dataset(FileNames(names)).shuffle().repeat(3)
        return files.interleave(lambda path: Dataset.from_files([path], read), 1).batch(4)

    found = passes(make, (1, 1), 1)
    for worker in (0, 1):
        mine = list(itertools.chain(*contents[worker::2]))
        rows = rows_of(found[worker][0])
        assert [sorted(rows[i : i + len(mine)]) for i in range(0, len(rows), len(mine))] == [mine] * 3


def test_a_choice_of_files_is_made_before_they_are_dealt():
    names, _ = named([1] * 8)

    def make():
        files = Dataset(FileNames(names)).shuffle().take(5)
        return files.map(lambda path: int(path.split(":")[0])).batch(2)

    found = passes(make, (1, 1, 1), 2)
    for number in range(2):
        rows = [row for worker in found for row in rows_of(worker[number])]
        assert len(set(rows)) == len(rows) == 5


def test_auto_is_data_where_a_source_is_no_file_and_file_is_refused_there():
    names, _ = named([3, 3])
    mixed = Dataset.zip(Dataset.from_files(names, read), Dataset.range(6)).map(lambda x, i: x * 10 + i).batch(2)
    assert distribute(mixed, (1, 1)) == [[([0],), ([22],), ([44],)], [([11],), ([33],), ([55],)]]
    for counts in ((1, 1), (2,)):
        errors = run_workers(
            lambda workers: error_of(
                lambda: distribute_dataset(mixed.with_options(auto_shard_policy=FILE), workers, None)
            ),
            counts,
        )
        assert [type(error) for error in errors] == [ValueError] * len(counts)
        assert all("range(0, 6)" in str(error) and "AutoShardPolicy.DATA" in str(error) for error in errors)
    numbered = Dataset.from_files(names, read).enumerate().map(lambda i, x: x).batch(2)
    assert rows_of(distribute(numbered, (1, 1))[1]) == [3, 4, 5]


def test_files_side_by_side_are_dealt_alike():
    names, _ = named([2, 3, 1])
    pairs = Dataset.zip(Dataset.from_files(names, read), Dataset.from_files(names, read).map(lambda x: -x)).batch(2)
    found = run_workers(
        lambda workers: [
            (x.values[0].tolist(), y.values[0].tolist()) for x, y in distribute_dataset(pairs, workers, None)
        ],
        (1, 1),
    )
    assert found == [
        [([0], [0]), ([1], [-1]), ([5], [-5])],
        [([2], [-2]), ([3], [-3]), ([4], [-4])],
    ]


def test_paths_from_elsewhere_are_dealt_if_what_is_made_of_them_reads_files():
    names, contents = named([2, 3, 1])
    for source in (Dataset.from_source(names), Dataset.from_generator(lambda: iter(names))):
        dataset = source.interleave(lambda path: Dataset.from_files([path], read), 1).batch(2)
        found = distribute(dataset, (1, 1))
        assert [rows_of(worker) for worker in found] == [contents[0] + contents[2], contents[1]]
    plain = Dataset.range(3).interleave(lambda i: Dataset.range(i * 2, i * 2 + 2), 1).batch(2)
    assert [rows_of(worker) for worker in distribute(plain, (1, 1))] == [[0, 2, 4], [1, 3, 5]]


def test_names_that_a_filter_leaves_are_dealt_before_it():
    names, contents = named([2, 3, 1, 4])
    dataset = Dataset(FileNames(names)).filter(lambda path: path != "0:2")
    dataset = dataset.interleave(lambda path: Dataset.from_files([path], read), 1).batch(2)
    found = distribute(dataset, (1, 1))
    assert [rows_of(worker) for worker in found] == [contents[2], contents[1] + contents[3]]


@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("policy", [AUTO, FILE])
def test_fewer_files_than_workers_are_an_error_on_all_that_names_data(counts, policy):
    names, _ = named([4, 4])
    for dataset in (
        Dataset.from_files(names, read),
        Dataset(FileNames(names)).shuffle().map(read),
        Dataset.from_source(names).interleave(lambda path: Dataset.from_files([path], read)),
    ):
        errors = distribute(dataset.batch(3), counts, auto_shard_policy=policy)
        assert [type(error) for error in errors] == [ValueError] * 3
        assert all("2 files for 3 ranks" in str(error) for error in errors)
        assert all("auto_shard_policy=AutoShardPolicy.DATA" in str(error) for error in errors)


def test_each_worker_opens_its_own_files_only():
    opened = {0: [], 1: []}

    def work(workers):
        def reader(path):
            opened[workers.worker_id].append(path)
            return read(path)

        dataset = Dataset.from_files(names, reader).batch(3)
        return steps_of(distribute_dataset(dataset, workers, None))

    names, _ = named([2, 2, 2, 2, 2])
    run_workers(work, (1, 1))
    assert [sorted(set(paths)) for paths in opened.values()] == [names[::2], names[1::2]]
